"""Tests of reading GGUF headers, against llama.cpp: metadata, other files, digests, and what a model can do."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tiny

from notes_cli.engine.context import Context
from notes_cli.engine.gguf import BLOCKS
from notes_cli.engine.header import ARCHITECTURES, Header, ollama_evidence, read_header, skills_of
from notes_cli.engine.limits import ContextOptions
from notes_cli.engine.model import Model
from notes_cli.engine.native import llama
from notes_cli.errors import ModelError
from notes_cli.runtime.workspace import Workspace

from ..conftest import MakeModel

HEAD = b"GGUF" + struct.pack("<I", 3)
STRING, ARRAY, UINT32 = 8, 9, 4


@pytest.mark.parametrize("kind", ["Q8_0", "gemma3", "lfm2", "mamba"])
def test_facts_are_those_of_llama_cpp(make_model: MakeModel, kind: str) -> None:
    """Architecture, quantization, trained context, and how many tensors and tokens there are."""
    path = make_model("llama", quantization=gguf.GGMLQuantizationType.Q8_0) if kind == "Q8_0" else make_model(kind)
    header = read_header(path)
    with Model(path) as model:
        facts = (model.architecture, model.quantization, model.n_ctx_train, model.n_vocab)
    tokens = header.number("tokenizer.ggml.tokens")
    assert (header.architecture, header.quantization, header.context, tokens) == facts
    assert header.size == path.stat().st_size and header.model
    assert len(header.tensors) == len(gguf.GGUFReader(path).tensors)


def test_blocks_are_those_of_ggml() -> None:
    """Of all types that gguf knows: a wrong size would call whole files broken."""
    known = {int(kind): size for kind, size in gguf.GGML_QUANT_SIZES.items()}
    assert {kind: size for kind, size in BLOCKS.items() if kind in known} == known


def value(kind: int, content: bytes) -> bytes:
    return HEAD + struct.pack("<QQ", 0, 1) + struct.pack("<Q", 1) + b"k" + struct.pack("<I", kind) + content


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a GGUF file"),
        (b"PK\x03\x04" * 100, "not a GGUF file"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(99), "version 1"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(99), "big-endian"),
        *((HEAD + struct.pack("<QQ", *many) + bytes(99), "too many entries") for many in ((2**63, 0), (0, 2**64 - 1))),
        *((value(STRING, struct.pack("<Q", size)), "ends too early") for size in (2**40, 2**64 - 1)),
        *((value(ARRAY, struct.pack("<IQ", of, 2**60) + bytes(99)), "ends too early") for of in (STRING, UINT32)),
        (value(ARRAY, struct.pack("<IQ", ARRAY, 1) + bytes(99)), "unknown type 9"),
        (value(99, bytes(99)), "unknown type 99"),
        (HEAD + struct.pack("<QQQ", 1, 0, 1) + b"t" + struct.pack("<I", 2**31), "dimensions"),
    ],
    ids=lambda given: str(given)[:30],
)  # fmt: skip
def test_a_hostile_head(tmp_path: Path, data: bytes, message: str) -> None:
    """Lengths that are lies are found before anything is read for them."""
    path = tmp_path / "hostile.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelError, match=message):
        read_header(path)


def test_a_large_file_of_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("notes_cli.engine.gguf.MAX_HEAD", 1 << 20)
    path = tmp_path / "long.gguf"
    path.write_bytes(value(ARRAY, struct.pack("<IQ", STRING, 2**33)))
    os.truncate(path, 2**37)  # sparse
    with pytest.raises(ModelError, match="more than 1 MiB"):
        read_header(path)


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    (tmp_path / "folder.gguf").mkdir()
    for name in ("pipe.gguf", "folder.gguf", "none.gguf"):
        for read in (read_header, Model):
            with pytest.raises(ModelError, match=name):
                read(tmp_path / name)


def test_a_split_model_is_read_as_one(make_model: MakeModel, tmp_path: Path) -> None:
    """Its sizes add up, and a part that is missing or cut is named; llama.cpp loads the same parts."""
    parts = [tmp_path / f"m-{number + 1:05d}-of-00003.gguf" for number in range(3)]
    for number, part in enumerate(parts):
        tiny.alter_model(part, make_model("llama"), part=(number, 3))
    header = read_header(parts[0])
    assert header.size == sum(part.stat().st_size for part in parts)
    assert header.tensors == read_header(make_model("llama")).tensors
    Model(parts[0]).close()
    data = parts[2].read_bytes()
    parts[2].write_bytes(data[:-1])
    with pytest.raises(ModelError, match=r"00003-of-00003\.gguf: .* bytes are there"):
        read_header(parts[0])
    parts[2].unlink()
    with pytest.raises(ModelError, match=r"00003-of-00003\.gguf"):
        read_header(parts[0])


def test_what_is_no_language_model(make_model: MakeModel, tmp_path: Path) -> None:
    """A projector of pictures, a LoRA, a vocabulary alone."""
    lora = tiny.alter_model(tmp_path / "lora.gguf", make_model("llama"), keys={"general.type": "adapter"})
    assert not read_header(lora).model
    writer = gguf.GGUFWriter(tmp_path / "sees.gguf", "clip")
    writer.add_tensor("v.patch_embd.weight", np.zeros(32, np.float32))
    assert not read_header(tiny.finish(writer, tmp_path / "sees.gguf")).model
    writer = gguf.GGUFWriter(tmp_path / "words.gguf", "llama")
    tiny.write_tokenizer(writer)
    assert not read_header(tiny.finish(writer, tmp_path / "words.gguf")).model


@pytest.fixture
def path(make_model: MakeModel, tmp_path: Path) -> Path:
    """A model that a test may change."""
    return shutil.copy(make_model(), tmp_path / "model.gguf")


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def rewrite(path: Path, byte: bytes = b"\x01") -> None:
    """Write another byte into the last tensor, and set the modification time back."""
    times = path.stat()
    with path.open("r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(byte)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_a_model_that_is_replaced_after_it_was_loaded_keeps_its_identity(path: Path, make_model: MakeModel) -> None:
    expected, other = sha256(path), make_model(seed=1)
    with Workspace(path) as workspace:
        shutil.copy(other, path.with_suffix(".new"))
        os.replace(path.with_suffix(".new"), path)
        with pytest.raises(ModelError, match="changed after it was loaded"):
            _ = workspace.weights  # the times of the old file show its removal, and may hide other changes
    with Workspace(path) as workspace:
        assert workspace.weights == sha256(other) != expected


def test_a_model_that_is_swapped_while_it_is_loaded(
    path: Path, make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path names another file when llama.cpp opens it, and the first one again afterwards."""
    other, expected, load = make_model(seed=1), sha256(path), llama.llama_model_load_from_splits
    away = path.parent.with_name("away")

    def swapped(*arguments: Any) -> Any:
        path.parent.rename(away)
        path.parent.mkdir()
        shutil.copy(other, path)
        try:
            return load(*arguments)
        finally:
            shutil.rmtree(path.parent)
            away.rename(path.parent)

    monkeypatch.setattr(llama, "llama_model_load_from_splits", swapped)
    logits = []
    for _ in range(2):  # swapped, and not
        with Workspace(path, ContextOptions(n_ctx=256)) as workspace:
            monkeypatch.undo()
            assert workspace.weights == expected
            sequence = workspace.sequence()
            sequence.append([30, 31, 32])
            logits.append(sequence.logits())
    assert (logits[0] == logits[1]).all()


def test_a_model_that_is_written_into_while_it_is_loaded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = llama.llama_model_load_from_splits

    def written(*arguments: Any) -> Any:
        handle = load(*arguments)
        rewrite(path)
        return handle

    monkeypatch.setattr(llama, "llama_model_load_from_splits", written)
    with pytest.raises(ModelError, match="changed while it was being loaded"):
        Model(path)


def test_a_model_that_is_written_into_while_it_is_in_use(path: Path) -> None:
    """Its memory is the file: before the digest and after it."""
    with Workspace(path) as workspace:
        rewrite(path)
        with pytest.raises(ModelError, match="changed after it was loaded"):
            _ = workspace.weights
    with Workspace(path) as workspace:
        before = workspace.weights
        rewrite(path, b"\x02")
        with pytest.raises(ModelError, match="changed after it was loaded"):
            _ = workspace.identity
    with Workspace(path) as workspace:
        assert workspace.weights != before


def test_a_model_that_is_moved_or_touched_while_it_is_in_use(path: Path) -> None:
    with Workspace(path) as workspace:
        before, other = workspace.weights, path.with_name("other.gguf")
        for act in (lambda: path.rename(other), lambda: os.utime(other), other.unlink):
            act()
            assert workspace.weights == before


def test_descriptors_are_closed(path: Path) -> None:
    broken = path.with_name("broken.gguf")
    broken.write_bytes(path.read_bytes()[:5000])
    Model(path).close()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        Model(path).close()
        with pytest.raises(ModelError):
            Model(broken)
    assert len(os.listdir("/proc/self/fd")) == before


ROOT = Path(__file__).resolve().parents[2]
KINDS = ["llama", "qwen2", "smollm3", "gemma3", "mistral3", "lfm2", "mamba", "gpt2", "llama-embed"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_head_says_what_the_context_says(make_model: MakeModel, kind: str) -> None:
    path = make_model(kind)
    with Model(path) as model, Context(model, ContextOptions(n_ctx=256, n_threads=1)) as context:
        splice, restore = context.supports("splice"), context.supports("restore")
    skills = skills_of(read_header(path))
    assert skills.how == ("refused" if restore else "restored" if splice else "spliced")
    assert skills.why == (restore or splice or "")


def measured() -> list[tuple[str, ...]]:
    """The rows of docs/architectures.md: models, splice, restore, carry, and the reason."""
    text = (ROOT / "docs" / "architectures.md").read_text(encoding="utf-8")
    names, word = r"[\w.-]+-(?:dense|moe)", r"exact\*?|refused"
    row = rf"^\| ({names}(?:, {names})*) \| ({word}) \| ({word}) \| [^|]* \| ([^|]*) \|.*\| (.*) \|$"
    return re.findall(row, text, re.M)


def test_every_architecture_is_as_it_was_measured() -> None:
    """docs/architectures.md, written by `make zoo`: exact operations, refused ones and the reasons."""
    found = [(name, *results) for names, *results in measured() for name in names.split(", ")]
    assert len(found) > 130
    for model, splice, restore, carried, why in found:
        name = re.sub("-(dense|moe)$", "", model)
        skills = ARCHITECTURES[name]
        assert skills.how == ("refused" if restore == "refused" else "restored" if splice == "refused" else "spliced")
        assert carried == "exact" or skills.why in why, name


def test_no_more_is_promised_than_has_been_verified() -> None:
    """The list has as many as native/notes_graph.cpp, and each of them has been measured."""
    source = (ROOT / "native" / "notes_graph.cpp").read_text(encoding="utf-8")
    known = re.findall(r"LLM_ARCH_\w+", source.split("KNOWN = {")[1].split("};")[0])
    spliced = {name for name, skills in ARCHITECTURES.items() if skills.how == "spliced"}
    exact = {name for names, splice, *_ in measured() if splice.startswith("exact") for name in names.split(", ")}
    assert len(spliced) == len(known)
    assert all({f"{name}-dense", f"{name}-moe"} & exact for name in spliced)


def test_an_architecture_that_there_is_not(make_model: MakeModel, tmp_path: Path) -> None:
    """And a model whose attention looks ahead, whatever its architecture."""
    assert skills_of(Header({"general.architecture": "mllama"}, {"a": ()}, 1)).why.endswith("'mllama'")
    path = tiny.alter_model(tmp_path / "a.gguf", make_model("llama"), keys={"llama.attention.causal": False})
    assert skills_of(read_header(path)).how == "refused"
    with Model(path) as model, Context(model, ContextOptions(n_ctx=256, n_threads=1)) as context:
        assert context.supports("restore") == skills_of(read_header(path)).why


# Differences of Ollama's converter, as its llama/compat detects them, and whether llama.cpp loads it all the same.
SIGNS: list[tuple[str, bool, dict[str, Any]]] = [
    ("llama", False, {"more": ["v.patch_embd.weight"]}),
    ("gemma3", False, {"more": ["mm.input_projection.weight"]}),
    ("gemma3", False, {"drop": ["gemma3.attention.layer_norm_rms_epsilon"]}),
    ("lfm2", False, {"tensors": {"token_embd_norm.weight": "output_norm.weight"}}),
    ("gemma3", True, {"keys": {"gemma3.rope.local.freq_base": 10000.0}, "drop": ["gemma3.rope.freq_base_swa"]}),
    ("mistral3", True, {"keys": {"mistral3.rope.scaling.beta_fast": 32.0}}),
]


@pytest.mark.parametrize(("kind", "loads", "changes"), SIGNS)
def test_signs_of_ollamas_own_form(
    make_model: MakeModel, tmp_path: Path, kind: str, loads: bool, changes: dict[str, Any]
) -> None:
    """Each is found, and is why llama.cpp refuses the file, or misreads it; without the change there is no sign."""
    path = tiny.alter_model(tmp_path / "ollama.gguf", make_model(kind), **changes)
    assert ollama_evidence(read_header(path))
    assert "Ollama" in skills_of(read_header(path)).why and skills_of(read_header(path)).how == "refused"
    if loads:
        Model(path).close()
    else:
        with pytest.raises(ModelError, match="cannot load"):
            Model(path)
        Model(tiny.alter_model(tmp_path / "same.gguf", make_model(kind))).close()
    assert ollama_evidence(read_header(make_model(kind))) == ""


def head(name: str, keys: dict[str, Any] | None = None, tensors: dict[str, tuple[int, ...]] | None = None) -> Header:
    return Header({"general.architecture": name, **(keys or {})}, tensors or {}, 1)


LLAMA3 = {"tokenizer.ggml.tokens": 128256, "tokenizer.chat_template": "<|start_header_id|>"}


@pytest.mark.parametrize(
    ("signed", "plain"),
    [
        (head("gptoss"), head("gpt-oss")),
        (head("qwen25vl"), head("qwen2vl")),
        (head("qwen35", {"qwen35.ssm.v_head_reordered": True}), head("qwen35")),
        (head("qwen35moe", tensors={"mtp.0.x": ()}), head("qwen35moe", {"qwen35moe.feed_forward_length": 8})),
        (head("qwen3vl"), head("qwen3vl", {"qwen3vl.rope.dimension_sections": 4})),
        (head("qwen3next", tensors={"blk.0.ssm_dt": ()}), head("qwen3next", tensors={"blk.0.ssm_dt.bias": ()})),
        (head("gemma4", {"tokenizer.ggml.model": "llama"}), head("gemma4", {"tokenizer.ggml.model": "gemma4"})),
        (
            head("gemma3n", tensors={"token_embd.weight": (8, 99), "per_layer_token_embd.weight": (8, 90)}),
            head("gemma3n", tensors={"token_embd.weight": (8, 90), "per_layer_token_embd.weight": (8, 90)}),
        ),
        (
            head("nemotron_h_moe", tensors={"blk.1.ffn_latent_in.weight": ()}),
            head("nemotron_h_moe", tensors={"blk.1.ffn_latent_down.weight": ()}),
        ),
        (head("llama", LLAMA3), head("llama", {**LLAMA3, "tokenizer.ggml.pre": "llama-bpe"})),
    ],
)
def test_signs_of_what_is_too_large_to_have_here(signed: Header, plain: Header) -> None:
    """One head with the sign, one of the same model as llama.cpp's converter writes it."""
    assert ollama_evidence(signed) and not ollama_evidence(plain)
