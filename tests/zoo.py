"""The zoo's models, a tiny random one per architecture, and copies with other metadata.

All files of the zoo have one RoPE base, no scaling, two layers, and fully rotated heads, so peculiarities of a graph do
not show. Copies with other metadata or more layers show them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tiny import SPECIAL, alter_model, byte_tokens, write_tokenizer

MODELS = Path(__file__).parents[1] / "build" / "zoo" / "models"


def zoo_model(name: str) -> Path:
    """The zoo's model of that name, such as `gemma3-dense`."""
    path = MODELS / f"{name}.gguf"
    if not path.exists():
        pytest.fail(f"there is no model {path}. Run: make test")
    return path


@cache
def reader(name: str) -> gguf.GGUFReader:
    """Reads a model of the zoo; slow, so once for all its variants."""
    return gguf.GGUFReader(zoo_model(name))


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
    fields = reader(name).fields
    architecture = fields["general.architecture"].contents()
    had = int(fields[f"{architecture}.block_count"].contents())
    layers = layers or had
    overrides = {f"{architecture}.{key}": value for key, value in overrides.items()}
    unknown = overrides.keys() - fields.keys()
    assert not unknown, f"{name} says nothing of {unknown}"
    lists = {key: field.contents() for key, field in fields.items() if field.types[0] == gguf.GGUFValueType.ARRAY}
    keys = {key: (value * layers)[:layers] for key, value in lists.items() if len(value) == had}
    keys |= {**overrides, f"{architecture}.block_count": layers}
    last = f"blk.{had - 1}."

    def change(tensor: Any) -> list[tuple[str, Any]]:
        shape = next((shape for end, shape in (shapes or {}).items() if tensor.name.endswith(end)), tensor.data.shape)
        number = (fill or {}).get(tensor.name, (fill or {}).get(tensor.name.rpartition(".")[0]))
        data = np.resize(tensor.data if number is None else np.full_like(tensor.data, number), shape)
        more = range(had, layers) if tensor.name.startswith(last) else ()
        return [(each, data) for each in (tensor.name, *(tensor.name.replace(last, f"blk.{i}.") for i in more))]

    return alter_model(path, reader(name), keys=keys, change=change)


def texted(name: str, path: Path) -> Path:
    """Write a copy of a zoo model that reads texts, byte by byte, and has room for some thousand of them."""
    source = gguf.GGUFReader(zoo_model(name))
    architecture = source.fields["general.architecture"].contents()
    learned = any(tensor.name.startswith("position_embd") for tensor in source.tensors)
    had = len(source.fields["tokenizer.ggml.tokens"].contents())
    size = len(byte_tokens()) + len(SPECIAL)
    changed = {"vocab_size": size} if learned else {"vocab_size": size, "context_length": 8192}
    keys = {key: value for end, value in changed.items() if (key := f"{architecture}.{end}") in source.fields}

    def change(tensor: Any) -> list[tuple[str, Any]]:
        data = tensor.data
        if len(data) == had and tensor.name.split(".")[0] in ("token_embd", "output"):
            chance = np.random.default_rng(had)  # each token has a vector of its own
            more = np.resize(data, (size - had, *data.shape[1:]))
            data = np.concatenate([data, more + data.std() / 2 * chance.standard_normal(more.shape)]).astype(data.dtype)
        return [(tensor.name, data)]

    drop = [key for key in source.fields if key.startswith("tokenizer.")]
    return alter_model(path, source=zoo_model(name), keys=keys, drop=drop, begin=write_tokenizer, change=change)
