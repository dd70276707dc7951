"""The logits of this project's engine: f32 weights, an f32 K/V cache, no flash attention."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from bench.random_model import finish
from bench.reference.cases import CaseTokens
from notes_cli.engine.context import Context
from notes_cli.engine.limits import ContextOptions
from notes_cli.engine.model import Model
from notes_cli.engine.positions import Patch
from notes_cli.engine.segment import Segment
from notes_cli.engine.sequence import KVSequence

Logits = NDArray[np.float32]
EDITS = {  # state of the cache -> whether the field is replaced in place, whether an erratum follows the context
    "stale": (False, False),
    "field in place": (True, False),
    "erratum": (False, True),
    "field + erratum": (True, True),
}
FULL = "full prefill"
TRANSPLANTED = "transplant: "
OTHER_LENGTH = "field in place, other length"


def in_f32(path: Path, folder: Path) -> Path:
    """Write the model with its weights dequantized to f32, unless the file exists."""
    target = folder / f"{path.stem}-f32-{hashlib.sha256(path.read_bytes()).hexdigest()[:8]}.gguf"
    if target.exists():
        return target
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(None, str(reader.fields["general.architecture"].contents()))
    for name, one in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            writer.add_key_value(name, one.contents(), one.types[0], one.types[-1] if len(one.types) > 1 else None)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
    return finish(writer, target)


def open_context(model: Model, n_ctx: int, threads: int) -> Context:
    """A context that rounds as little as possible, for a sequence and its fork."""
    exact = ContextOptions(n_ctx, n_threads=threads, flash_attention="off", type_k="f32", type_v="f32")
    return Context(model, replace(exact, n_sequences=2, unified=True))


def logits_of(context: Context, case: CaseTokens) -> dict[str, Logits]:
    """The logits for the next token after the request, by state of the cache."""
    first, last = case.chunk
    with KVSequence(context) as prefilled:
        prefilled.append(case.context)
        found = dict(_edited(prefilled, case))
    with KVSequence(context) as whole:
        whole.append(case.full)
        found[FULL] = whole.logits()
    chunk = compiled(context, case.context[first:last])
    with KVSequence(context) as spliced:
        spliced.append(case.context[:first])
        spliced.splice(chunk)
        spliced.append(case.context[last:])
        return found | {f"{TRANSPLANTED}{state}": logits for state, logits in _edited(spliced, case)}


def logits_of_other_length(context: Context, case: CaseTokens) -> dict[str, Logits]:
    """The logits with the field in place where the new value has more or fewer tokens."""
    with KVSequence(context) as prefilled:
        prefilled.append(case.context)
        prefilled.replace([Patch(*case.field, case.value)])
        prefilled.append(case.ask)
        return {OTHER_LENGTH: prefilled.logits()}


def compiled(context: Context, tokens: list[int]) -> Segment:
    """Compile tokens alone, from position 0 on."""
    with KVSequence(context) as alone:
        alone.append(tokens)
        alone.flush()
        rows, _ = alone.read(0, len(tokens), "f32")
    ids, nothing = np.array(tokens, np.int32), np.zeros(0, np.int32)
    return Segment("chunk", "", "", ids, 0, nothing, (), context.identity(""), rows)


def _edited(base: KVSequence, case: CaseTokens) -> Iterator[tuple[str, Logits]]:
    """Edit a fork of the sequence in each way, append the request, and yield the logits."""
    for state, (in_place, erratum) in EDITS.items():
        with base.share() as fork:
            if in_place:
                fork.replace([Patch(*case.field, case.value)])
            fork.append(case.erratum if erratum else case.ask)
            yield state, fork.logits()
