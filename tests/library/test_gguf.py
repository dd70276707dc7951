"""Tests of the GGUF head against that of the package gguf."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from notes_cli.engine.segment import Q8_0
from notes_cli.library.info import DTYPES, head_of, read_head

KINDS = [dtype for dtype in DTYPES.values() if dtype != Q8_0]
LETTERS = st.characters(codec="utf-8", exclude_characters=".")  # so that no name is that of the architecture
NAMES = st.text(LETTERS, min_size=1, max_size=12)
VALUES = st.one_of(st.integers(0, 2**32 - 1), st.text(st.characters(codec="utf-8"), max_size=60))


def stock(path: Path, values: dict[str, str | int], tensors: dict[str, NDArray[Any]]) -> bytes:
    """The head as that package writes it."""
    writer = gguf.GGUFWriter(None, str(values["general.architecture"]))
    for key, value in values.items():
        if key != "general.architecture":  # which the writer has by itself
            kind = gguf.GGUFValueType.UINT32 if isinstance(value, int) else gguf.GGUFValueType.STRING
            writer.add_key_value(key, value, kind)
    for name, tensor in tensors.items():
        if tensor.dtype == Q8_0:
            blocks = tensor.view(np.uint8).reshape(len(tensor), -1)
            writer.add_tensor(name, blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    assert writer.fout is not None
    writer.write_padding(writer.fout[0], writer.fout[0].tell())
    writer.close()
    return path.read_bytes()


@given(
    values=st.dictionaries(NAMES, VALUES, max_size=8),
    shapes=st.lists(st.tuples(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.sampled_from(KINDS)), max_size=6),
    blocks=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 3)), max_size=3),
)
@settings(max_examples=60, deadline=None)
def test_a_head_is_as_the_package_writes_it(
    tmp_path_factory: Any,
    values: dict[str, str | int],
    shapes: list[tuple[list[int], np.dtype[Any]]],
    blocks: list[tuple[int, int]],
) -> None:
    values = {"general.architecture": "notes", **values}
    tensors: dict[str, NDArray[Any]] = {f"t{i}": np.zeros(shape, kind) for i, (shape, kind) in enumerate(shapes)}
    tensors |= {f"q{i}": np.zeros(shape, Q8_0) for i, shape in enumerate(blocks)}
    head = head_of(values, tensors)
    assert head == stock(tmp_path_factory.mktemp("gguf") / "a.gguf", values, tensors)
    end = len(head) + sum(-(-tensor.nbytes // 32) * 32 for tensor in tensors.values())
    found = read_head(memoryview(head), end)
    assert (found.metadata, found.end) == (values, end)
    assert [(name, one.shape, one.dtype) for name, one in found.tensors.items()] == [
        (name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()
    ]
