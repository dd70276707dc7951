"""Tests that capabilities derived from a model's head are those of the loaded context and of the measurements."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny

from notes_cli.engine.architectures import ARCHITECTURES, ollama_evidence, skills_of
from notes_cli.engine.context import Context
from notes_cli.engine.header import Header, read_header
from notes_cli.engine.model import Model
from notes_cli.engine.options import ContextOptions
from notes_cli.errors import ModelError

MakeModel = Callable[..., Path]
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
    """Each is found, and is why llama.cpp refuses the file, or misreads it: without the change it loads, without a
    sign."""
    path = tiny.alter_model(tmp_path / "ollama.gguf", make_model(kind), **changes)
    assert ollama_evidence(read_header(path))
    assert "Ollama" in skills_of(read_header(path)).why and skills_of(read_header(path)).how == "refused"
    if loads:
        Model(path).close()
    else:
        with pytest.raises(ModelError, match="cannot load"):
            Model(path)
    same = tiny.alter_model(tmp_path / "same.gguf", make_model(kind))
    assert ollama_evidence(read_header(same)) == ""
    Model(same).close()


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
