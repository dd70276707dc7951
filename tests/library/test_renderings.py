"""What templates have rendered, remembered from one process to the next."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest

from notes_cli.errors import ModelError
from notes_cli.library.renderings import KEPT, Renderings
from notes_cli.text import template as templates
from notes_cli.text import untrusted
from notes_cli.text.rendering import Rendering, render
from notes_cli.text.template import ChatTemplate
from notes_cli.text.untrusted import marker

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
    assert untrusted._SECRET not in (tmp_path / "renderings.json").read_text()
    before = untrusted._SECRET
    other = "f" * len(before)
    monkeypatch.setattr(untrusted, "_SECRET", other)
    monkeypatch.setattr(untrusted, "_NO_TEXT", re.compile(f"NOTES{other}text\\d+x"))
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
    """What is drawn, a time in a form that may ask for gigabytes, what may hold words of a user, and what is long."""
    ask(source, talk)
    ask(source, talk)
    assert rendered == [source, source]


@pytest.mark.parametrize("source", ["{% if", "{{ 1 / 0 }}"])
def test_an_error_that_may_pass_is_not_remembered(source: str, ask: Asked, rendered: list[str]) -> None:
    """What Python raises, and a template that cannot be read, may be for the installation."""
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
    """A text of another version of Jinja, or of ours, is not taken for what this one renders."""
    ask(PLAIN)
    monkeypatch.setattr(templates, "code_stamp", lambda: "another")
    ask(PLAIN)
    assert len(rendered) == 2


def test_the_latest_are_kept(tmp_path: Path) -> None:
    """The file does not grow without end, and two processes add to it."""
    file = tmp_path / "renderings.json"
    for first in (0, KEPT // 2, KEPT):
        memory = Renderings(file)
        for number in range(first, first + KEPT // 2):
            memory.keep(str(number), Rendering("text", steady=True))
        memory.save()
    assert list(json.loads(file.read_text())) == [str(number) for number in range(KEPT // 2, KEPT + KEPT // 2)]


def test_what_a_killed_process_left_goes_with_the_next_though_nothing_is_new(
    ask: Asked, rendered: list[str], tmp_path: Path
) -> None:
    ask(PLAIN)
    left = tmp_path / ".renderings.json.abc.tmp"
    left.write_text("{")
    ask(PLAIN)
    assert rendered == [PLAIN]
    assert not left.exists()
