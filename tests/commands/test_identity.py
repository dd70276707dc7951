"""The identity matrix: segments of similar but different models are refused, those of the same model are accepted.

Each refusal names both values and a command, which is run here as printed, and solves the problem.
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import pytest

from notes_cli.engine import native
from notes_cli.errors import EngineError
from notes_cli.library.container import open_segment, peek, write_segment

from ..tiny import alter_model
from .conftest import Notes, Outcome

MakeModel = Callable[..., Path]
ASK = ("ask", "Why?", "--splice", "returns", "-n", 1, "--json")


def one_bit(source: Path, target: Path) -> Path:
    """A copy of a model with the lowest bit of one number of one tensor changed."""
    tensor = next(one for one in gguf.GGUFReader(source).tensors if one.name == "blk.1.ffn_up.weight")
    data = bytearray(source.read_bytes())
    data[tensor.data_offset] ^= 1
    target.write_bytes(data)
    return target


def in_two_files(source: Path, target: Path) -> Path:
    first, second = (target.with_name(f"parts-0000{number}-of-00002.gguf") for number in (1, 2))
    alter_model(second, source, part=(1, 2))
    return alter_model(first, source, part=(0, 2))


@dataclass(frozen=True)
class Miss:
    """A different model (`change` makes it of the first one's file), or other options, and the expected message."""

    says: Sequence[str]
    change: Callable[[Path, Path, MakeModel], Path] | None = None
    options: Sequence[str] = ()
    kind: str = "llama"


def keys(**values: Any) -> Callable[[Path, Path, MakeModel], Path]:
    """The file with some other keys; a function is given the old value."""

    def change(source: Path, target: Path, _make: MakeModel) -> Path:
        fields = gguf.GGUFReader(source).fields
        wanted = {name.replace("__", "."): value for name, value in values.items()}
        found = {name: value(fields[name].contents()) if callable(value) else value for name, value in wanted.items()}
        return alter_model(target, source, keys=found, drop=tuple(found))

    return change


def other(**settings: Any) -> Callable[[Path, Path, MakeModel], Path]:
    return lambda _source, _target, make: make(**settings)


def replaced(old: str, new: str) -> Callable[[list[str]], list[str]]:
    return lambda values: [new if value == old else value for value in values]


# The digest of a file is of all its bytes (tests/library/test_facts.py): few cells for it.
FILES = ("compiled with tiny llama F32 (", "this model is tiny llama F32 (")
BASE = "compiled with RoPE norm base 10000 scale 1"
MISSES = {
    "one number of one tensor": Miss(FILES, lambda source, target, _make: one_bit(source, target)),
    "quantization": Miss(
        ("compiled with tiny llama F32, this model is Q8_0",), other(quantization=gguf.GGMLQuantizationType.Q8_0)
    ),
    "the text of one token": Miss(FILES, keys(tokenizer__ggml__tokens=replaced("<|im_end|>", "<|im_stop|>"))),
    "chat template": Miss(FILES, keys(tokenizer__chat_template=lambda text: text.replace("user", "person") + " ")),
    "one file and several": Miss(FILES, lambda source, target, _make: in_two_files(source, target)),
    "architecture": Miss(("compiled for architecture llama, this model is qwen2",), other(kind="qwen2")),
    "rope base": Miss((BASE, "this context uses norm base 20000 scale 1"), None, ("--rope-freq-base", "20000")),
    "rope scale": Miss((BASE, "this context uses norm base 10000 scale 0.5"), None, ("--rope-freq-scale", "0.5")),
    "yarn": Miss(
        (BASE, "norm base 10000 scale 0.25"),
        options=("--rope-scaling", "yarn", "--rope-freq-scale", "0.25", "--yarn-orig-ctx", "256"),
    ),
    "where yarn starts from": Miss(
        ("compiled with RoPE norm base 10000 scale 0.25 (", "this context uses norm base 10000 scale 0.25 ("),
        None,
        ("--yarn-orig-ctx", "2048"),
        "yarn",
    ),
    "yarn switched off": Miss(
        ("compiled with RoPE norm base 10000 scale 0.25", "this context uses norm base 10000 scale 1"),
        None,
        ("--rope-scaling", "none", "--beyond-trained"),
        "yarn",
    ),
    "the size of the context, where the rotation goes by it": Miss(
        ("compiled with RoPE neox base 10000 scale 1 (", "this context uses neox base 10000 scale 1 ("),
        None,
        ("-c", "8192", "--beyond-trained"),
        "phi3",
    ),
    "K in f32": Miss(("from a f16/f16 K/V cache, this context keeps f32/f16",), None, ("-ctk", "f32")),
    "V in f32": Miss(("from a f16/f16 K/V cache, this context keeps f16/f32",), None, ("-ctv", "f32")),
}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "yarn": {"scaling": "yarn"},
    "phi3": {"kind": "phi3", "name": "long"},  # llama.cpp knows "phi3" in a name
}


def spliced(asked: Outcome) -> int:
    assert asked.code == 0, asked.err
    return int(asked.json["tokens"]["spliced"])


@pytest.mark.parametrize(("name", "by_path"), [*((name, False) for name in MISSES), ("architecture", True)])
def test_a_near_miss_is_refused_and_mended(
    notes: Notes, skill: Path, make_model: MakeModel, tmp_path: Path, name: str, by_path: bool
) -> None:
    """One line with both values; the printed command compiles the skill, also from the segment's text alone."""
    miss = MISSES[name]
    first = make_model(**KINDS[miss.kind])
    compiled = notes("compile", skill, "-m", first).out.strip()
    skill.unlink()
    second = miss.change(first, tmp_path / "other model.gguf", make_model) if miss.change else first
    ask = [*ASK[:3], compiled if by_path else "returns", *ASK[4:], "-m", second, *miss.options]
    refused = notes(*ask)
    assert refused.code == 1 and refused.err.count("\n") == 1
    assert all(part in refused.err for part in miss.says), refused.err
    command = shlex.split(refused.err.split("Run: ")[1])
    assert command[:4] == ["notes", "compile", "--from", compiled if by_path else "returns"]
    mended = notes(*command[1:])
    assert mended.code == 0, mended.err
    assert spliced(notes(*ASK, "-m", second, *miss.options)) > 50
    if not by_path:  # the first one is still there, for the first model
        assert spliced(notes(*ASK, "-m", first)) > 50


def test_adapters_are_part_of_it(notes: Notes, compiled: Path, tmp_path: Path) -> None:
    """A segment computed with a LoRA is refused. (Contexts with one: tests/engine.)"""
    segment = open_segment(compiled)
    other_file = tmp_path / "lora.gguf"
    write_segment(other_file, replace(segment, identity=replace(segment.identity, adapters="0123456789abcdef")))
    refused = notes(*ASK[:3], other_file, *ASK[4:])
    assert refused.code == 1 and "adapters (LoRA): 0123456789ab" in refused.err
    assert notes(*shlex.split(refused.err.split("Run: ")[1])[1:]).code == 0


def test_binding_and_library_are_of_one_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interface and llama.cpp versions must match: both are named, with a command."""
    binding = native.llama
    packages = {"notes_cli.lib": SimpleNamespace(__version__="0.0.1"), "notes_cli.lib.llama_cpp": binding}
    with monkeypatch.context() as patched:
        patched.setattr(native.importlib, "import_module", packages.__getitem__)
        with pytest.raises(EngineError, match=rf"{native.UPSTREAM}, its binding is of 0.0.1. Build it with"):
            native._load()
    monkeypatch.setattr(native, "ABI_VERSION", 99)
    with pytest.raises(EngineError, match=r"has interface [0-9]+, this version of notes needs 99. Build it with"):
        native._load()


def test_the_same_model_elsewhere_is_the_same(
    notes: Notes, skill: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linked, copied, touched, read-only, by a relative path, moved: nothing is compiled again or refused."""
    first, linked, copied = (tmp_path / f"{name}.gguf" for name in ("model", "linked", "copied"))
    shutil.copy(model, first)
    assert notes("compile", skill, "-m", first).code == 0
    linked.symlink_to(first)
    shutil.copyfile(first, copied)
    os.utime(copied, (1, 1))
    copied.chmod(0o400)
    monkeypatch.chdir(tmp_path)
    for second in (linked, copied, Path("copied.gguf"), tmp_path / "moved.gguf"):
        if second.stem == "moved":
            first.rename(second)
        assert spliced(notes(*ASK, "-m", second)) > 50, second
        assert "up to date" in notes("compile", skill, "-m", second).err, second


def test_what_does_not_change_rows_is_not_asked_for(notes: Notes, skill: Path, compiled: Path) -> None:
    """Threads, sizes, flash attention, another type of cache, a setting that is the model's own."""
    for options in (
        *(("-t", "2"), ("-c", "512"), ("-ub", "32"), ("-fa", "on"), ("-fa", "off"), ("-ngl", "0")),
        *(("-ctk", "bf16"), ("-ctv", "bf16"), ("--rope-freq-base", "10000"), ("--rope-freq-scale", "1")),
    ):
        assert spliced(notes(*ASK, *options)) > 50, options
        assert "up to date" in notes("compile", skill, *options).err, options


def test_compiling_again_from_a_segment(notes: Notes, skill: Path, compiled: Path, model: Path, tmp_path: Path) -> None:
    """Its text, fields, description, name and source; in blocks if it was; under another name if asked."""
    before = peek(compiled)
    skill.unlink()
    compiled.rename(tmp_path / "kept.gguf")
    again = notes("compile", "--from", tmp_path / "kept.gguf")
    assert again.code == 0 and Path(again.out.strip()) == compiled
    after = peek(compiled)
    for part in ("name", "description", "text", "fields", "source", "blocks", "identity"):
        assert getattr(after, part) == getattr(before, part), part
    assert "up to date" in notes("compile", "--from", "returns").err
    named = notes("compile", "--from", "returns", "--name", "copy").out.strip()
    assert peek(Path(named)).name == "copy" and peek(Path(named)).text == before.text
