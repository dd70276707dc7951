"""The identity matrix: segments of similar but different models are refused, those of the same model are accepted.

Each refusal names both values and a command, which is run here as printed, and solves the problem.
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest

from notes_cli.engine import native
from notes_cli.errors import EngineError
from notes_cli.library.container import open_segment, peek, write_segment

from .conftest import Notes, Outcome, run_apart

MakeModel = Callable[..., Path]
ASK = ("ask", "Why?", "--splice", "returns", "-n", 1, "--json")


def edited(
    source: Path,
    target: Path,
    keys: dict[str, Any] | None = None,
    tensor: Callable[[str, Any], Any] | None = None,
    architecture: str = "",
    parts: int = 0,
) -> Path:
    """A copy of a model with other keys, tensors or another architecture, or in several files of so many tensors."""
    reader = gguf.GGUFReader(source)
    old = reader.fields["general.architecture"].contents()
    new = architecture or old
    writer = gguf.GGUFWriter(target, new, split_max_tensors=parts)
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        value, name = (keys or {}).get(key, field.contents()), key
        if key.startswith(f"{old}."):
            name = f"{new}.{key.removeprefix(f'{old}.')}"
        kind = field.types[0]
        if kind is gguf.GGUFValueType.ARRAY:
            writer.add_key_value(name, value, kind, sub_type=field.types[-1])
        else:
            writer.add_key_value(name, value, kind)
    for one in reader.tensors:
        data = tensor(one.name, one.data.copy()) if tensor else one.data
        writer.add_tensor(one.name, data, raw_dtype=one.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target if not parts else next(target.parent.glob(f"{target.stem}-00001-of-*.gguf"))


def one_value(name: str, data: Any) -> Any:
    """One number of one tensor, by the smallest step."""
    if name == "blk.1.ffn_up.weight":
        data[0, 0] = np.nextafter(data[0, 0], np.float32(9))
    return data


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
        return edited(source, target, found)

    return change


def other(**settings: Any) -> Callable[[Path, Path, MakeModel], Path]:
    return lambda _source, _target, make: make(**settings)


def replaced(old: str, new: str) -> Callable[[list[str]], list[str]]:
    return lambda values: [new if value == old else value for value in values]


FILES = ("compiled with tiny llama F32 (", "this model is tiny llama F32 (")
BASE = "compiled with RoPE norm base 10000 scale 1"
MISSES = {
    "one number of one tensor": Miss(FILES, lambda source, target, _make: edited(source, target, tensor=one_value)),
    "other weights of the same name": Miss(FILES, other(seed=1)),
    "quantization": Miss(
        ("compiled with tiny llama F32, this model is Q8_0",), other(quantization=gguf.GGMLQuantizationType.Q8_0)
    ),
    "one merge of the tokenizer": Miss(FILES, keys(tokenizer__ggml__merges=["a c"])),
    "the text of one token": Miss(FILES, keys(tokenizer__ggml__tokens=replaced("<|im_end|>", "<|im_stop|>"))),
    "the type of one token": Miss(FILES, keys(tokenizer__ggml__token_type=lambda kinds: [*kinds[:-1], 4])),
    "a BOS": Miss(FILES, other(bos=True)),
    "chat template": Miss(FILES, keys(tokenizer__chat_template=lambda text: text.replace("user", "person") + " ")),
    "norm epsilon": Miss(FILES, keys(llama__attention__layer_norm_rms_epsilon=1e-5)),
    "rope base of the file": Miss(FILES, keys(llama__rope__freq_base=20000.0)),
    "one file and several": Miss(FILES, lambda source, target, _make: edited(source, target, parts=10)),
    "an architecture of the same shapes": Miss(
        ("compiled for architecture llama, this model is smollm3",),
        lambda source, target, _make: edited(source, target, architecture="smollm3"),
    ),
    "rope base": Miss((BASE, "this context uses norm base 20000 scale 1"), None, ("--rope-freq-base", "20000")),
    "rope scale": Miss((BASE, "this context uses norm base 10000 scale 0.5"), None, ("--rope-freq-scale", "0.5")),
    "yarn": Miss(
        (BASE, "norm base 10000 scale 0.25"),
        None,
        ("--rope-scaling", "yarn", "--rope-freq-scale", "0.25", "--yarn-orig-ctx", "256"),
    ),
    "where yarn starts from": Miss(
        ("compiled with RoPE norm base 10000 scale 0.25 (", "this context uses norm base 10000 scale 0.25 ("),
        lambda source, _target, _make: source,
        ("--yarn-orig-ctx", "2048"),
        "yarn",
    ),
    "yarn switched off": Miss(
        ("compiled with RoPE norm base 10000 scale 0.25", "this context uses norm base 10000 scale 1"),
        lambda source, _target, _make: source,
        ("--rope-scaling", "none", "--beyond-trained"),
        "yarn",
    ),
    "the size of the context, where the rotation goes by it": Miss(
        ("compiled with RoPE neox base 10000 scale 1 (", "this context uses neox base 10000 scale 1 ("),
        lambda source, _target, _make: source,
        ("-c", "8192", "--beyond-trained"),
        "phi3",
    ),
    "K in f32": Miss(("from a f16/f16 K/V cache, this context keeps f32/f16",), None, ("-ctk", "f32")),
    "V in f32": Miss(("from a f16/f16 K/V cache, this context keeps f16/f32",), None, ("-ctv", "f32")),
    "K in f32, V in bf16": Miss(
        ("from a f16/f16 K/V cache, this context keeps f32/f16",), None, ("-ctk", "f32", "-ctv", "bf16")
    ),
}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "yarn": {"scaling": "yarn"},
    "phi3": {"kind": "phi3", "name": "long"},  # llama.cpp knows "phi3" in a name
}


def spliced(asked: Outcome) -> int:
    assert asked.code == 0, asked.err
    return int(asked.json["tokens"]["spliced"])


@pytest.mark.parametrize("by_path", [False, True])
@pytest.mark.parametrize("name", MISSES)
def test_a_near_miss_is_refused_and_mended(
    notes: Notes, skill: Path, make_model: MakeModel, tmp_path: Path, name: str, by_path: bool
) -> None:
    """One line with both values; the printed command compiles the skill for this model, also from the segment's text if
    the file is gone."""
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
    from dataclasses import replace

    segment = open_segment(compiled)
    other_file = tmp_path / "lora.gguf"
    write_segment(other_file, replace(segment, identity=replace(segment.identity, adapters="0123456789abcdef")))
    refused = notes(*ASK[:3], other_file, *ASK[4:])
    assert refused.code == 1
    assert "adapters (LoRA): 0123456789ab" in refused.err
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


@pytest.mark.parametrize(
    "how",
    [
        *("renamed", "in another folder", "by a symbolic link", "by a hard link", "copied", "touched", "read-only"),
        *("by a relative path", "by its variable", "in a new process"),
    ],
)
def test_the_same_model_elsewhere_is_the_same(
    notes: Notes, skill: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Nothing is compiled again, and nothing is refused."""
    first = tmp_path / "model.gguf"
    shutil.copy(model, first)
    assert notes("compile", skill, "-m", first).code == 0
    options: list[object] = ["-m", tmp_path / "other.gguf"]
    if how == "renamed":
        first.rename(tmp_path / "other.gguf")
    elif how == "in another folder":
        (tmp_path / "a b").mkdir()
        options[1] = shutil.move(first, tmp_path / "a b" / "model.gguf")
    elif how == "by a symbolic link":
        (tmp_path / "other.gguf").symlink_to(first)
    elif how == "by a hard link":
        (tmp_path / "other.gguf").hardlink_to(first)
    elif how == "copied":
        shutil.copyfile(first, tmp_path / "other.gguf")
    elif how == "by a relative path":
        monkeypatch.chdir(tmp_path)
        options[1] = "./model.gguf"
    elif how == "by its variable":
        monkeypatch.setenv("NOTES_MODEL", str(first))
        options = []
    else:
        options[1] = first
    if how == "touched":
        os.utime(first, (1, 1))
    if how == "read-only":
        first.chmod(0o400)
    run = run_apart if how == "in a new process" else notes
    assert spliced(run(*ASK, *options)) > 50
    assert "up to date" in run("compile", skill, *options).err


@pytest.mark.parametrize(
    "options",
    [
        *(("-t", "2"), ("-c", "512"), ("-c", "2048"), ("-b", "64", "-ub", "32"), ("-fa", "on"), ("-fa", "off")),
        *(("-ngl", "0"), ("-ctk", "bf16"), ("-ctv", "bf16"), ("--rope-freq-base", "10000")),
        ("--rope-freq-scale", "1"),
    ],
    ids=" ".join,
)
def test_what_does_not_change_rows_is_not_asked_for(notes: Notes, skill: Path, compiled: Path, options: Any) -> None:
    """Threads, sizes, flash attention, another type of cache (quantized: test_cache_types), a setting that is the
    model's own."""
    assert spliced(notes(*ASK, *options)) > 50
    assert "up to date" in notes("compile", skill, *options).err


def test_a_template_is_part_of_the_model_and_its_opening_is_kept(
    notes: Notes, skill: Path, model: Path, tmp_path: Path
) -> None:
    """The file's digest covers its template, so another one is another model. The text that preceded a skill is
    in the segment besides: after other words the same rows are spliced with a seam."""
    path = notes("compile", skill, "-m", model).out.strip()
    assert len(peek(Path(path)).context) > 0
    assert notes(*ASK, "-m", model).json["tokens"]["seam"] == 0
    behind = notes(*ASK, "-m", model, "-s", "Be kind.").json["tokens"]
    assert behind["seam"] > 0 and behind["spliced"] > 50


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


def test_compiling_again_keeps_blocks(notes: Notes, skill: Path) -> None:
    """For another model, too."""
    blocks = peek(Path(notes("compile", skill, "--blocks", 3).out.strip())).blocks
    again = notes("compile", "--from", "returns", "--rope-freq-base", 20000)
    assert again.code == 0 and len(peek(Path(again.out.strip())).blocks) == len(blocks) > 1
