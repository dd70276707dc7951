"""Tests of tokenizing a user's text: it never yields a control token of the model."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from weakref import WeakSet

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from notes_cli.engine.model import LIKELY, Model
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
    check_bound(model, text)


def check_bound(model: Model, text: str) -> None:
    """No text is certain to have more tokens than it has."""
    bound, count = model._token_bound, len(model.tokenize(text))
    assert bound is None or not bound.exceeds(text.encode(), count), text


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
        draw = random.Random(3)
        pieces = [model.text([draw.randrange(model.n_vocab)]).replace("\ufffd", "") for _ in range(400)]
        for text in ("".join(pieces), " ".join(pieces), "\u2581".join(pieces), "\x04\r\n " * 99, "a" * 999, " " * 999):
            check_bound(model, text)


@pytest.mark.parametrize("name", ["qwen2", "llama-spm", "falcon", "starcoder"])
def test_what_cannot_fit_is_known_without_tokenizing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a tenth of the tokens for words, letters, blanks and signs; never too early (`check_bound`)."""
    with Vocabulary(next(path for path in VOCABULARIES if path.stem == f"ggml-vocab-{name}")) as model:
        words = "The return of a chair takes nine days. "
        texts = [words * 900, "a" * 40_000, "\u4e2d\u6587" * 9000, "b" + " " * 40_000]
        counts = [len(model.tokenize(text)) for text in texts]
        monkeypatch.setattr(Model, "_tokenize", lambda *_: pytest.fail("it was tokenized"))
        for text, count in zip(texts, counts, strict=True):
            assert model.exceeds(text, min(count * 9 // 10, len(text) // LIKELY - 1)), text[:9]
            assert not model.exceeds(text, count)


def test_a_long_word_needs_a_deep_stack() -> None:
    """std::regex in llama.cpp recurses for each character of a word, which ended the process."""
    path = next(path for path in VOCABULARIES if path.stem == "ggml-vocab-falcon")
    code = (
        "import sys; from pathlib import Path; from engine.test_tokens import Vocabulary\n"
        "print(len(Vocabulary(Path(sys.argv[1])).tokenize('!' * 100_000)))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code, str(path)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and int(done.stdout) > 1000, done.stderr


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
