"""Carries recurrent state through spliced segments: captures state transitions at compile time, applies them later.

These hooks (native/notes_carry.h) are in a library only if it was built with the patch group `recurrent`. Without it a
context does not support `carry` and gives the reason; nothing else here may be called then.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from notes_cli.engine import native
from notes_cli.engine.context import Context
from notes_cli.engine.native import check_layers, int32_pointer, int_array, row_pointers
from notes_cli.engine.segment import LayerRows, Tokens, Transition
from notes_cli.errors import EngineError, UnsupportedError

_FORMS = (None, "diagonal", "matrix")


class _LayerTransition(ctypes.Structure):
    """struct notes_transition: the effect of a run of tokens on the state of a recurrent layer."""

    _fields_ = [
        ("form", ctypes.c_int32),
        ("n_a", ctypes.c_int32),
        ("run", ctypes.c_int32),
        ("head", ctypes.c_int32),
        ("a", ctypes.c_void_p),
        ("b", ctypes.c_void_p),
    ]


_int32_p = ctypes.POINTER(ctypes.c_int32)
if "recurrent" in native.PATCHES:
    native.bind(
        {
            "notes_can_carry": [ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32],
            "notes_margins": [ctypes.c_void_p, _int32_p, _int32_p],
            "notes_capture_begin": [ctypes.c_void_p, ctypes.c_int32],
            "notes_captured": [ctypes.c_void_p, ctypes.POINTER(_LayerTransition), ctypes.c_int32],
            "notes_capture_end": [ctypes.c_void_p],
            "notes_carry": [
                *(ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32, _int32_p, ctypes.c_int32),
                *(ctypes.POINTER(native.LayerPointers), ctypes.POINTER(_LayerTransition)),
                *(ctypes.c_int32, ctypes.c_int32),
            ],
        },
        {"notes_can_carry": ctypes.c_bool, "notes_capture_end": None},
    )


def can_carry(context: Context, base: int, position: int, count: int) -> str | None:
    """Return None if `count` rows computed at `base` can be placed at `position` with the recurrent state carried
    through them, else the reason."""
    return (
        context.supports("carry")
        or native.refusal("notes_can_carry", context.handle, base, position, count)
        or (context.unmovable if position != base else None)
    )


def margins(context: Context) -> tuple[int, int]:
    """Return the number of tokens at the beginning and at the end of a segment that must be decoded again when state is
    carried through it."""
    before, after = ctypes.c_int32(), ctypes.c_int32()
    _call(context, "notes_margins", ctypes.byref(before), ctypes.byref(after))
    return before.value, after.value


@contextmanager
def capturing(context: Context, seq_id: int) -> Iterator[Callable[[], tuple[Transition, ...]]]:
    """Capture the state transition of each recurrent layer while tokens are decoded in this sequence. Call the yielded
    function for the transitions from the beginning of the block to the last decoded token. Raises UnsupportedError,
    also in that call, where this model's state cannot be captured."""
    _call(context, "notes_capture_begin", seq_id)
    try:
        yield lambda: _captured(context, seq_id)
    finally:
        with suppress(EngineError):  # the context is closed, which has discarded the capture
            native.call("notes_capture_end", context.handle)


def _captured(context: Context, seq_id: int) -> tuple[Transition, ...]:
    count = len(context.layers)
    out = (_LayerTransition * count)()
    _call(context, "notes_captured", out, count)
    kept = []
    for entry, layer in zip(out, context.layers, strict=True):
        size = layer.n_embd_v if entry.form else 0
        a, b = np.empty(entry.n_a, np.float32), np.empty(size, np.float32)
        kept.append((a, b))
        if entry.form:
            entry.a, entry.b = a.ctypes.data, b.ctypes.data
    _call(context, "notes_captured", out, count)
    rows = context.read(seq_id, 0, context.length(seq_id), base=0, dtype="f32")
    return tuple(
        Transition(layer.layer, here.k[0].astype(np.float32), a, b, entry.head)
        for entry, layer, here, (a, b) in zip(out, context.layers, rows, kept, strict=True)
        if layer.part == "state"
    )


def carry(
    context: Context,
    seq_id: int,
    position: int,
    tokens: Tokens,
    layers: Sequence[LayerRows],
    transitions: Sequence[Transition],
    base: int,
) -> None:
    """Place rows as `Context.splice` does, and apply `transitions` to the recurrent state that the sequence has at
    `position` - 1. The state rows in `layers` are ignored."""
    ids = int_array(tokens, "a token")
    rows, transitions_arg = _arguments(layers, transitions, context.layers)
    check_layers(rows, context.layers, len(ids))
    pointers, count = row_pointers(rows)
    _call(
        *(context, "notes_carry", seq_id, position, int32_pointer(ids), len(ids)),
        *(pointers, transitions_arg, count, base),
    )


def _call(context: Context, name: str, *arguments: Any) -> None:
    """Call a hook of the patch group `recurrent`. Raises UnsupportedError in a library without it."""
    if "recurrent" not in native.PATCHES:
        raise UnsupportedError(str(context.supports("carry")))
    native.call(name, context.handle, *arguments)


def _arguments(
    layer_rows: Sequence[LayerRows], transitions: Sequence[Transition], layers: Sequence[native.Layer]
) -> tuple[list[LayerRows], Any]:
    """Build the arguments `rows` and `transitions` of notes_carry. A recurrent layer's row is the residual input of its
    last tokens. The result keeps alive the arrays it points into. Raises EngineError for a transition that is missing
    or does not fit."""
    by_layer = {transition.layer: transition for transition in transitions}
    if len(layer_rows) != len(layers):
        raise EngineError(f"there are rows of {len(layer_rows)} layers, and the context has {len(layers)}")
    out = (_LayerTransition * len(layers))()
    rows: list[LayerRows] = []
    kept: list[Any] = []
    out.kept = kept  # type: ignore[attr-defined]
    for entry, layer, own in zip(out, layers, layer_rows, strict=True):
        if layer.part != "state":
            rows.append(own)
            continue
        transition = by_layer.get(layer.layer)
        if transition is None:
            raise EngineError(f"there is no transition of layer {layer.layer}")
        size = layer.n_embd_v if len(transition.b) else 0
        if len(transition.r) != layer.n_embd_k or len(transition.b) != size or bool(size) != bool(layer.n_embd_v):
            raise EngineError(f"the transition of layer {layer.layer} does not fit its state")
        a, b = (np.ascontiguousarray(array, np.float32) for array in (transition.a, transition.b))
        kept += [a, b]
        if size:
            entry.form = _FORMS.index("matrix" if transition.head else "diagonal")
            entry.n_a, entry.head, entry.run = len(a), transition.head, size // max(1, len(a))
            entry.a, entry.b = a.ctypes.data, b.ctypes.data
        r = np.ascontiguousarray(transition.r, np.float32)[None]
        rows.append(LayerRows(layer.layer, r, np.zeros((1, layer.n_embd_v), np.float32), "state"))
    return rows, out
