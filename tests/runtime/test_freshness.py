"""Tests what makes segments stale: each reason and no other."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from notes_cli.engine.segment import FieldSpan, Identity
from notes_cli.library.container import write_segment
from notes_cli.library.store import Library
from notes_cli.runtime import freshness
from notes_cli.runtime.freshness import Stale, stale_reasons
from notes_cli.text.skill import Skill, load_skill, load_source, stamp_of

from ..conftest import MakeSegment


@pytest.fixture
def library(tmp_path: Path) -> Library:
    return Library(tmp_path / "library")


@pytest.fixture
def compiled(tmp_path: Path, library: Library, identity: Identity, make_segment: MakeSegment) -> Callable[..., Path]:
    """Write a text, and its segment; the file has not changed since."""

    def compiled(name: str = "returns", text: str = "date: 1\nfee: 2\n", settled: bool = True) -> Path:
        file = tmp_path / f"{name}.txt"
        file.write_text(text)
        skill = load_skill(file)
        found = file.stat()
        stamp = (found.st_size, found.st_mtime_ns, found.st_ctime_ns) if settled else ()
        spans = tuple(FieldSpan(*one, 0, 1) for one in skill.fields)
        segment = make_segment(name=name, text=skill.text, fields=spans, description="", source=str(file))
        write_segment(library.path(name, identity), replace(segment, stamp=stamp))
        return file

    return compiled


def why(library: Library, name: str = "returns", **more: object) -> list[tuple[Stale, str]]:
    """Return the reasons of the only file of that name."""
    entries = library.entries(name)
    (entry,) = entries
    return [(reason.kind, reason.what) for reason in stale_reasons(entry, entries, **more)]  # type: ignore[arg-type]


def test_tools_that_were_compiled_at_once(library: Library, identity: Identity, make_segment: MakeSegment) -> None:
    """A file that changed too recently for its times to count: a later change is still detected."""
    file = library.folder.parent / "tools.json"
    file.write_text("[]")
    segment = make_segment(name="tools", text="none", fields=(), description="", source=str(file))
    made = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    write_segment(library.path("tools", identity), replace(segment, tools=True, stamp=()), created=made)
    assert why(library, "tools") == []
    earlier = (datetime.now(timezone.utc) - timedelta(seconds=9)).strftime("%Y-%m-%dT%H:%M:%SZ")
    write_segment(library.path("tools", identity), replace(segment, tools=True, stamp=()), created=earlier)
    assert why(library, "tools") == [(Stale.TEXT, f"the file has changed: {file}")]


def test_a_file_left_alone(library: Library, compiled: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal size and times are enough; else the text is read, and only the text counts. A change that keeps both, as by
    `touch -r`, is seen by the time of the status change."""
    file = compiled()
    read: list[str] = []

    def counted(source: str, name: str | None = None) -> Skill:
        read.append(source)
        return load_source(source, name)

    monkeypatch.setattr(freshness, "load_source", counted)
    assert why(library) == [] and read == []
    os.utime(file, (1, 1))
    assert why(library) == [] and read == [str(file)]
    file = compiled()
    before = file.stat()
    time.sleep(0.02)
    file.write_text("date: 9\nfee: 2\n")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_size == before.st_size
    assert why(library) == [(Stale.TEXT, f"the text has changed: {file}")]


def test_a_file_that_was_just_written_is_not_trusted_by_its_times(tmp_path: Path) -> None:
    """It may change again within a tick of the clock, which its stamp records; that of an older file does not."""
    file = tmp_path / "a.txt"
    file.write_text("x")
    found = file.stat()
    assert load_skill(file).stamp == (1, found.st_mtime_ns, found.st_ctime_ns, 1)
    old = time.time() - 60
    os.utime(file, (old, old))
    found = file.stat()
    assert len(load_skill(file).stamp) == 4  # its status has just changed
    before = os.stat_result((*found[:7], int(old), int(old), int(old)))
    assert stamp_of(before) == (1, before.st_mtime_ns, before.st_ctime_ns)


def test_every_reason(
    library: Library, compiled: Callable[..., Path], identity: Identity, tmp_path: Path, make_segment: MakeSegment
) -> None:
    """Text, fields, description, a file that is gone or cannot be compiled, another model, damage, a newer format."""
    file = compiled(settled=False)
    assert why(library) == [] and why(library, weights=identity.weights) == []
    ((kind, what),) = why(library, weights="f" * 64)
    assert kind is Stale.MODEL and "tiny Q8_0" in what
    file.write_text("---\ndescription: New.\n---\ndate: 1\nfee: 2\n")
    assert why(library) == [(Stale.TEXT, f"the description has changed: {file}")]
    file.write_text("---\nname: [\n")
    ((kind, what),) = why(library)
    assert kind is Stale.TEXT and "cannot be compiled any more" in what
    file.unlink()
    os.mkfifo(file)
    assert why(library) == [(Stale.UNREADABLE, f"{file} is no regular file")]  # without waiting
    file.unlink()
    assert why(library) == [(Stale.GONE, f"its file is gone: {file}")]
    path = library.path("returns", identity)
    data = path.read_bytes()
    path.write_bytes(data[:200])
    assert why(library)[0][0] is Stale.DAMAGED
    path.write_bytes(data.replace(b"notes.format\x04\x00\x00\x00\x01", b"notes.format\x04\x00\x00\x00\x63"))
    assert why(library)[0][0] is Stale.FORMAT
    write_segment(library.path("piped", identity), make_segment(name="piped", source="-"))
    assert why(library, "piped") == []
