"""Tests of cached facts about models: digests, forms, renderings."""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest

from notes_cli.engine import architectures, header
from notes_cli.errors import ModelError, Progress
from notes_cli.library import facts
from notes_cli.library.facts import RENDERINGS, Renderings
from notes_cli.text import messages
from notes_cli.text import template as templates
from notes_cli.text.messages import marker
from notes_cli.text.rendering import Rendering, render
from notes_cli.text.template import ChatTemplate


def file_sha256(path: Path, memory: Path, progress: Progress | None = None) -> str:
    with path.open("rb") as file:
        return facts.file_sha256(path, file, memory, progress)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A file that was written an hour ago."""
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights" * 1000)
    os.utime(path, (time.time() - 3600,) * 2)
    return path


def test_hashed_once(model: Path, tmp_path: Path) -> None:
    """The second time nothing is read; progress ends at the whole."""
    seen: list[tuple[int, int]] = []
    memory = tmp_path / "cache/digests.json"
    expected = hashlib.sha256(model.read_bytes()).hexdigest()
    assert file_sha256(model, memory, lambda done, size: seen.append((done, size))) == expected
    assert seen == [(7000, 7000)]
    assert file_sha256(model, memory, lambda done, size: seen.append((done, size))) == expected
    assert len(seen) == 1


def test_a_changed_file_is_hashed_again(model: Path, tmp_path: Path) -> None:
    """Other size or other time: other content, until shown otherwise."""
    memory = tmp_path / "digests.json"
    first = file_sha256(model, memory)
    model.write_bytes(b"WEIGHTS" * 1000)
    assert file_sha256(model, memory) != first


def test_another_file_with_the_same_size_and_time_is_hashed_again(model: Path, tmp_path: Path) -> None:
    """Copying tools keep modification times: two models of one size can share path and time, but not the file."""
    memory = tmp_path / "digests.json"
    first = file_sha256(model, memory)
    other = tmp_path / "other"
    other.write_bytes(b"WEIGHTS" * 1000)
    os.utime(other, ns=(model.stat().st_atime_ns, model.stat().st_mtime_ns))
    assert other.stat().st_size == model.stat().st_size
    os.replace(other, model)
    assert file_sha256(model, memory) != first


def test_a_file_just_written_is_not_remembered(tmp_path: Path) -> None:
    """It might change again within one tick of the clock."""
    path, memory = tmp_path / "new", tmp_path / "digests.json"
    path.write_bytes(b"x")
    file_sha256(path, memory)
    assert not memory.exists()


@pytest.mark.parametrize("data", ["", "{", "[]", '{"a": 1}', '{"MODEL": [1, 2, "x"]}', "[" * 100_000, '{"MODEL": {}}'])
def test_a_damaged_memory_is_forgotten(model: Path, tmp_path: Path, data: str) -> None:
    """It costs time, never a wrong answer."""
    memory = tmp_path / "digests.json"
    memory.write_text(data.replace("MODEL", str(model)))
    expected = hashlib.sha256(model.read_bytes()).hexdigest()
    assert file_sha256(model, memory) == expected
    assert list(json.loads(memory.read_text())) == [str(model)]


def test_an_unwritable_memory_is_no_error(model: Path, tmp_path: Path) -> None:
    """The digest is still right."""
    (tmp_path / "file").touch()
    assert file_sha256(model, tmp_path / "file/digests.json") == hashlib.sha256(model.read_bytes()).hexdigest()


def test_the_memory_stays_small(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the latest files are kept."""
    monkeypatch.setattr(facts, "DIGESTS", 1)
    memory = tmp_path / "digests.json"
    other = tmp_path / "other.gguf"
    other.write_bytes(b"o")
    os.utime(other, (1, 1))
    file_sha256(model, memory)
    file_sha256(other, memory)
    assert list(json.loads(memory.read_text())) == [str(other)]


def test_what_is_open_is_hashed_and_not_what_the_path_names_by_then(model: Path, tmp_path: Path) -> None:
    """A model that is replaced between load and digest would give its rows the identity of another file."""
    memory = tmp_path / "digests.json"
    expected = hashlib.sha256(model.read_bytes()).hexdigest()
    with model.open("rb") as file:
        other = tmp_path / "other"
        other.write_bytes(b"WEIGHTS" * 1000)
        os.utime(other, (1, 1))
        os.replace(other, model)
        assert facts.file_sha256(model, file, memory) == expected
    assert file_sha256(model, memory) == hashlib.sha256(b"WEIGHTS" * 1000).hexdigest()


def test_a_file_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    """One line, with the path."""
    (tmp_path / "none").touch()
    with (tmp_path / "none").open("wb") as file, pytest.raises(ModelError, match=r"cannot read .*none"):
        facts.file_sha256(tmp_path / "none", file, tmp_path / "digests.json")


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files whose heads have been read."""
    found: list[Path] = []
    original = header.read_header

    def counting(path: Path) -> header.Header:
        found.append(path)
        return original(path)

    monkeypatch.setattr(header, "read_header", counting)
    return found


@pytest.fixture
def old(make_model: Callable[..., Path], tmp_path: Path) -> Path:
    """A model that was written an hour ago."""
    path = tmp_path / "model.gguf"
    path.write_bytes(make_model("qwen3").read_bytes())
    os.utime(path, (time.time() - 3600,) * 2)
    return path


def test_a_head_is_read_once(old: Path, tmp_path: Path, read: list[Path]) -> None:
    for _ in range(2):
        assert facts.form_of(old, tmp_path / "memory" / "forms.json") == ""
    assert read == [old]


def test_a_model_that_changed_is_read_again(old: Path, tmp_path: Path, read: list[Path]) -> None:
    facts.form_of(old, tmp_path / "forms.json")
    os.utime(old, (time.time() - 1800,) * 2)
    facts.form_of(old, tmp_path / "forms.json")
    assert read == [old, old]


def test_other_rules_look_again(old: Path, tmp_path: Path, read: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of an earlier version knew fewer signs."""
    facts.form_of(old, tmp_path / "forms.json")
    (other := tmp_path / "architectures.py").write_text("")
    monkeypatch.setattr(architectures, "__file__", str(other))
    for _ in range(2):
        facts.form_of(old, tmp_path / "forms.json")
    assert read == [old, old]
    monkeypatch.setattr(architectures, "__file__", str(tmp_path / "none"))
    for _ in range(2):
        assert facts.form_of(old, tmp_path / "forms.json") == ""
    assert len(read) == 4


def test_another_form_is_told_each_time(
    old: Path, tmp_path: Path, read: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(architectures._NAMES, "qwen3", "another")
    for _ in range(2):
        assert "Ollama" in facts.form_of(old, tmp_path / "forms.json")
    assert len(read) == 2 and not (tmp_path / "forms.json").exists()


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    (path := tmp_path / "text.gguf").write_text("text")
    os.utime(path, (time.time() - 3600,) * 2)
    for _ in range(2):
        with pytest.raises(ModelError, match="not a GGUF file"):
            facts.form_of(path, tmp_path / "forms.json")
    with pytest.raises(ModelError, match="cannot be read"):
        facts.form_of(tmp_path / "none.gguf", tmp_path / "forms.json")


def test_of_several_files_each_is_looked_at(old: Path, tmp_path: Path, read: list[Path]) -> None:
    """One that is not there is missed each time, whatever is remembered of the first."""
    first = old.rename(tmp_path / "model-00001-of-00002.gguf")
    second = tmp_path / "model-00002-of-00002.gguf"
    second.write_bytes(first.read_bytes())
    for _ in range(2):
        facts.form_of(first, tmp_path / "forms.json")
    assert len(read) == 2


TALK = [{"role": "system", "content": marker(0)}, {"role": "user", "content": marker(1)}]
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
Asked = Callable[..., str]


@pytest.fixture
def rendered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The templates that were rendered, not remembered."""
    sources: list[str] = []

    def counting(source: str, *given: object) -> Rendering:
        sources.append(source)
        return render(source, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(templates, "render", counting)
    return sources


@pytest.fixture
def ask(tmp_path: Path) -> Asked:
    """The text of a conversation by a template, as a process of its own finds it."""

    def process(source: str, talk: list[dict[str, str]] = TALK, **more: object) -> str:
        templates._rendered.cache_clear()
        memory = Renderings(tmp_path / "renderings.json")
        try:
            return ChatTemplate(source, memory=memory, **more)._render(talk, True)  # type: ignore[arg-type]
        finally:
            memory.save()

    return process


def test_the_next_process_renders_nothing(ask: Asked, rendered: list[str], tmp_path: Path) -> None:
    """The same text comes without Jinja, in a file that is one user's alone; other messages or options are others."""
    assert ask(PLAIN) == ask(PLAIN) == f"<system>{marker(0)}<user>{marker(1)}"
    assert rendered == [PLAIN]
    assert (tmp_path / "renderings.json").stat().st_mode & 0o777 == 0o600
    ask(PLAIN, TALK[1:])
    ask(PLAIN, options={"enable_thinking": True})
    ask(PLAIN, bos="<s>")
    ask(PLAIN, now=datetime(2026, 1, 1))
    assert len(rendered) == 5


def test_marks_are_those_of_the_process(
    ask: Asked, rendered: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The secret of a process is not in the file, and the text has that of the process which asks."""
    first = ask(PLAIN)
    assert messages._SECRET not in (tmp_path / "renderings.json").read_text()
    before = messages._SECRET
    other = "f" * len(before)
    monkeypatch.setattr(messages, "_SECRET", other)
    monkeypatch.setattr(messages, "_NO_TEXT", re.compile(f"NOTES{other}text\\d+x"))
    talk = [{**message, "content": message["content"].replace(before, other)} for message in TALK]
    assert ask(PLAIN, talk) == first.replace(before, other) and rendered == [PLAIN]


def test_a_refusal_is_remembered(ask: Asked, rendered: list[str]) -> None:
    """Many templates refuse a system message, which is asked of them each time."""
    source = "{{ raise_exception('no system role') }}"
    for _ in range(2):
        with pytest.raises(ModelError, match="no system role"):
            ask(source)
    assert rendered == [source]


def test_the_time_is_told_again(ask: Asked, rendered: list[str], tmp_path: Path) -> None:
    """A text with the date is the same until that changes."""
    source = "{{ strftime_now('%d %b %Y') }}"
    assert ask(source) == ask(source) == datetime.now().strftime("%d %b %Y")
    assert rendered == [source]
    file = tmp_path / "renderings.json"
    file.write_text(file.read_text().replace(datetime.now().strftime("%d %b %Y"), "01 Jan 1999"))
    assert ask(source) == datetime.now().strftime("%d %b %Y") and len(rendered) == 2


@pytest.mark.parametrize(
    ("source", "talk"),
    [
        ("{{ [1, 2] | random }}", TALK),
        ("{{ strftime_now('%9d') }}", TALK),
        (PLAIN, [{"role": "user", "content": "words of a user"}]),
        (PLAIN, [{**TALK[1], "tool_calls": "words of a user"}]),
        ("\ue000", TALK),
        (PLAIN + "x" * 20_000, TALK),
    ],
)
def test_what_is_not_remembered(source: str, talk: list[dict[str, str]], ask: Asked, rendered: list[str]) -> None:
    """Not cached: random texts, times in formats that may expand to gigabytes, texts with words of a user, long
    texts."""
    ask(source, talk)
    ask(source, talk)
    assert rendered == [source, source]


@pytest.mark.parametrize("source", ["{% if", "{{ 1 / 0 }}"])
def test_an_error_that_may_pass_is_not_remembered(source: str, ask: Asked, rendered: list[str]) -> None:
    """Errors of Python and unreadable templates are not cached, as they may be due to the installation."""
    for _ in range(2):
        with pytest.raises(ModelError):
            ask(source)
    assert rendered == [source, source]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": {}}', '{"a": {"text": 1, "steady": true}}', '{"a": {"b": 1}}'])
def test_a_damaged_file(text: str, ask: Asked, rendered: list[str], tmp_path: Path) -> None:
    """It costs a rendering, and is whole afterwards."""
    (tmp_path / "renderings.json").write_text(text)
    assert ask(PLAIN) == ask(PLAIN) and len(rendered) == 1


def test_other_code_renders_again(ask: Asked, rendered: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A cached text of another version of Jinja, or of notes, is not used."""
    ask(PLAIN)
    monkeypatch.setattr(templates, "code_stamp", lambda: "another")
    ask(PLAIN)
    assert len(rendered) == 2


def test_the_latest_are_kept(tmp_path: Path) -> None:
    """The file does not grow without end, and two processes add to it."""
    file = tmp_path / "renderings.json"
    for first in (0, RENDERINGS // 2, RENDERINGS):
        memory = Renderings(file)
        for number in range(first, first + RENDERINGS // 2):
            memory.keep(str(number), Rendering("text", steady=True))
        memory.save()
    assert list(json.loads(file.read_text())) == [
        str(number) for number in range(RENDERINGS // 2, RENDERINGS + RENDERINGS // 2)
    ]


def test_what_a_killed_process_left_goes_with_the_next_though_nothing_is_new(
    ask: Asked, rendered: list[str], tmp_path: Path
) -> None:
    ask(PLAIN)
    left = tmp_path / ".renderings.json.abc.tmp"
    left.write_text("{")
    ask(PLAIN)
    assert rendered == [PLAIN]
    assert not left.exists()
