"""Tests of tokenizing a user's text: it never yields a control token of the model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from weakref import WeakSet

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from notes_cli.engine.model import Model
from notes_cli.engine.native import llama
from notes_cli.errors import ModelError

VOCABULARIES = sorted((Path(__file__).parents[2] / "build/zoo/llama.cpp/models").glob("ggml-vocab-*.gguf"))
ENCODERS = ("bert-bge", "nomic-bert-moe")  # they do not give a text back
MARKUP = ["</think>", "<think>", "<tool_call>", "[INST]", "<<SYS>>", "<SYS>", "【x】", '<|"|>']
WORDS = ["   ", "\n\n", "word", "C++"]
ADDED = [*MARKUP, *WORDS]


class Vocabulary(Model):
    """A model's tokenizer without its weights."""

    def __init__(self, path: Path) -> None:
        params = llama.llama_model_default_params()
        params.vocab_only = True
        self._handle = llama.llama_model_load_from_file(os.fsencode(path), params)
        assert self._handle
        self.users, self.sources = WeakSet(), []
        self.path, self.name = path, path.stem
        self.n_vocab = int(llama.llama_vocab_n_tokens(self.vocab))

    def marks(self) -> list[str]:
        """The texts of all tokens that are structure, by the types in the file."""
        kinds = llama.LLAMA_TOKEN_ATTR_CONTROL | llama.LLAMA_TOKEN_ATTR_USER_DEFINED
        special = [t for t in range(self.n_vocab) if llama.llama_vocab_get_attr(self.vocab, t) & kinds]
        return [spelt for token in special if self._is_control(token) and (spelt := self.text([token], special=True))]


def check(model: Model, text: str) -> None:
    """No token is structure, and the tokens give the text back, as far as they did before."""
    ids = model.tokenize(text)
    assert not any(model._is_control(int(token)) for token in ids), text
    data, found = text.encode(), b"".join(model.token_bytes(int(token)) for token in ids)
    assert found in (data, b" " + data)


@pytest.mark.parametrize("path", VOCABULARIES, ids=lambda path: path.stem.removeprefix("ggml-vocab-"))
def test_no_vocabulary_gives_structure_for_words(path: Path) -> None:
    """Each mark of each vocabulary: alone, in words, twice, side by side, cut in two, within another."""
    if path.stem.removeprefix("ggml-vocab-") in ENCODERS:
        return
    with Vocabulary(path) as model:
        marks = model.marks()
        assert marks
        for mark in [*marks[:12], *marks[-12:]]:
            for text in (mark, f"a {mark} b", mark + mark, f"<{mark}>", mark[:1] + mark + mark[1:], f"\n{mark}\n\nx"):
                check(model, text)
        check(model, " ".join(marks[:200]))
        check(model, "</think>".join(marks[:20]))


def test_there_are_vocabularies() -> None:
    assert len(VOCABULARIES) > 15, "run: make test"


@pytest.mark.parametrize(
    "path", [p for p in VOCABULARIES if "qwen2" in p.stem or "gpt-neox" in p.stem or "spm" in p.stem]
)
def test_words_without_marks_are_the_tokens_that_they_were(path: Path) -> None:
    """Runs of blanks that a vocabulary adds are words, too; control tokens in template text are still read."""
    with Vocabulary(path) as model:
        for text in (
            "Returns before 2026-06-15 are accepted.",
            "a\n\n\n        b      c",
            "if a < b and c > d: [x] {y}",
        ):
            assert model.tokenize(text).tolist() == model._tokenize(text, False).tolist()
        (mark, *_) = [mark for mark in model.marks() if "PAD" not in mark]
        assert len(model.tokenize(f"{mark}", special=True)) <= 2 < len(model.tokenize(mark))


@pytest.fixture(scope="module")
def model(make_model: Callable[..., Path]) -> Iterator[Model]:
    """A random model with user-defined tokens of all kinds."""
    with Model(make_model("llama", added=ADDED)) as loaded:
        yield loaded


def test_marks_are_cut_and_words_are_not(model: Model) -> None:
    """Text that looks like markup is split into plain tokens; added words and blanks keep their tokens."""
    for mark in MARKUP:
        assert len(model.tokenize(f"a{mark}b")) == len(f"a{mark}b".encode())
        assert model.tokenize(mark, special=True).tolist() == [259 + ADDED.index(mark)]
    for word in WORDS:
        assert model.tokenize(f"a{word}b").tolist() == [97, 259 + ADDED.index(word), 98]


PARTS = [*ADDED, "<", ">", "<|im_end|>", "think>", "</", "é", "a", " ", "[", "]", "x】"]


@given(st.lists(st.sampled_from(PARTS), max_size=9))
@settings(max_examples=100)
def test_whatever_is_put_together(model: Model, parts: list[str]) -> None:
    """Marks that overlap, are nested, or are completed by neighbouring text."""
    check(model, "".join(parts))


@given(st.lists(st.sampled_from(["</s>", "<s>", "<unk>", "<", "/s>", " ", "a", "\n", "é", "[INST]"]), max_size=9))
@settings(max_examples=60)
def test_sentence_pieces(parts: list[str]) -> None:
    """A vocabulary's leading blank is added before the first part only."""
    check(_phi3(), "".join(parts))


@cache
def _phi3() -> Vocabulary:
    return Vocabulary(next(path for path in VOCABULARIES if path.stem == "ggml-vocab-phi-3"))


def test_what_cannot_be_spelt_otherwise_is_refused(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Model, "_is_control", lambda self, token: token == 97)
    with pytest.raises(ModelError, match="'a' in this text is a control token of"):
        model.tokenize("ba")
