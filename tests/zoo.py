"""The zoo's models, a tiny random one per architecture, and copies with other metadata.

All files of the zoo have one RoPE base, no scaling, two layers, and fully rotated heads, so peculiarities of a graph do
not show. Copies with other metadata or more layers show them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tiny import write_tokenizer

MODELS = Path(__file__).parents[1] / "build" / "zoo" / "models"


def zoo_model(name: str) -> Path:
    """The zoo's model of that name, such as `gemma3-dense`."""
    path = MODELS / f"{name}.gguf"
    if not path.exists():
        pytest.fail(f"there is no model {path}. Run: make test")
    return path


def variant(
    name: str,
    path: Path,
    overrides: dict[str, Any],
    layers: int = 0,
    shapes: dict[str, tuple[int, ...]] | None = None,
    fill: Mapping[str, float] | None = None,
) -> Path:
    """Write a copy of a zoo model with other metadata. `overrides`: keys without the architecture's name; lists of one
    value per layer repeat. `layers`: number of layers; the last one repeats. `shapes`: shapes of tensors by suffix of
    their names; values are repeated or cut. `fill`: a constant for tensors by name without `.weight`."""
    source = gguf.GGUFReader(zoo_model(name))
    architecture = source.fields["general.architecture"].contents()
    had = int(source.fields[f"{architecture}.block_count"].contents())
    layers = layers or had
    writer = gguf.GGUFWriter(path, architecture)
    overrides = {f"{architecture}.{key}": value for key, value in overrides.items()}
    overrides[f"{architecture}.block_count"] = layers
    unknown = overrides.keys() - source.fields.keys()
    assert not unknown, f"{name} says nothing of {unknown}"
    for key, field in source.fields.items():
        value = overrides.get(key, field.contents())
        if key.startswith("GGUF.") or key == gguf.Keys.General.ARCHITECTURE or value == []:
            continue
        if isinstance(value, list):
            if len(value) == had and key not in overrides:
                value = (value * layers)[:layers]
            writer.add_key_value(key, value, gguf.GGUFValueType.ARRAY, field.types[-1])
        else:
            writer.add_key_value(key, value, field.types[-1])
    last = f"blk.{had - 1}."
    for tensor in source.tensors:
        shape = next((shape for end, shape in (shapes or {}).items() if tensor.name.endswith(end)), tensor.data.shape)
        number = (fill or {}).get(tensor.name, (fill or {}).get(tensor.name.rpartition(".")[0]))
        data = tensor.data if number is None else np.full_like(tensor.data, number)
        names = [tensor.name]
        if tensor.name.startswith(last):
            names += [f"blk.{layer}.{tensor.name.removeprefix(last)}" for layer in range(had, layers)]
        for each in names:
            writer.add_tensor(each, np.resize(data, shape), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def texted(name: str, path: Path) -> Path:
    """Write a copy of a zoo model that reads texts, byte by byte, and has room for some thousand of them."""
    source = gguf.GGUFReader(zoo_model(name))
    architecture = source.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(path, architecture)
    learned = any(tensor.name.startswith("position_embd") for tensor in source.tensors)
    had = len(source.fields["tokenizer.ggml.tokens"].contents())
    size = write_tokenizer(writer)
    changed = {"vocab_size": size} if learned else {"vocab_size": size, "context_length": 8192}
    for key, field in source.fields.items():
        value = changed.get(key.removeprefix(f"{architecture}."), field.contents())
        if key.startswith(("GGUF.", "tokenizer.")) or key == gguf.Keys.General.ARCHITECTURE or value == []:
            continue
        if isinstance(value, list):
            writer.add_key_value(key, value, gguf.GGUFValueType.ARRAY, field.types[-1])
        else:
            writer.add_key_value(key, value, field.types[-1])
    for tensor in source.tensors:
        data = tensor.data
        if len(data) == had and tensor.name.split(".")[0] in ("token_embd", "output"):
            chance = np.random.default_rng(had)  # each token has a vector of its own
            more = np.resize(data, (size - had, *data.shape[1:]))
            data = np.concatenate([data, more + data.std() / 2 * chance.standard_normal(more.shape)]).astype(data.dtype)
        writer.add_tensor(tensor.name, data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
