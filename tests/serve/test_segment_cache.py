"""Tests many skills: matching texts opens only matched segments, and few stay open."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from samples import SAMPLES

from notes_cli import config
from notes_cli.config import Paths
from notes_cli.engine.limits import ContextOptions
from notes_cli.library.container import open_segment, write_segment
from notes_cli.library.store import Library
from notes_cli.runtime.workspace import Workspace
from notes_cli.serve.segment_cache import OPEN, SegmentCache

from .conftest import QUESTION, Served, compile_into, pieces, reply_text, started

MANY = 100


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with one shipped skill and many others, each with its own text."""
    home = tmp_path_factory.mktemp("full")
    compile_into(home, "returns")
    library = Paths.under(home).library
    (path,) = library.glob("returns.*.gguf")
    segment = open_segment(path)
    for number in range(MANY):
        text = f"This is the text of skill number {number}, which is long enough to be looked for in messages."
        name = f"skill{number:03d}"
        other = replace(segment, name=name, text=text, fields=())
        write_segment(library / path.name.replace("returns", name), other)
    return home


@pytest.fixture
def many(full: Path) -> Iterator[Served]:
    with started(full) as served:
        yield served


def files() -> int:
    return len(os.listdir("/dev/fd"))


def test_looking_texts_up_opens_what_is_found(many: Served) -> None:
    """A chat request is matched with all of them, and opens one file: that of the skill in its message."""
    policy = (SAMPLES / "returns" / "SKILL.md").read_text().split("---\n")[2].strip()
    many.chat([{"role": "user", "content": QUESTION}], max_tokens=1)
    before = files()
    many.chat([{"role": "user", "content": f"{QUESTION} Please."}], max_tokens=1)
    assert files() == before
    reply = many.chat([{"role": "system", "content": policy}, {"role": "user", "content": QUESTION}])
    assert reply_text(reply) == "accepted" and reply["usage"]["prompt_tokens_details"]["cached_tokens"] >= 100
    assert files() <= before + 1
    listed = {one["id"] for one in many.http.get("/v1/models").json()["data"]}
    assert len(listed) == MANY + 2 and files() <= before + 1


POLICY = (SAMPLES / "returns" / "SKILL.md").read_text().split("---\n")[2].strip()


@pytest.mark.parametrize(
    ("text", "spliced", "said"),
    [
        (POLICY.replace("\n", "\r\n"), True, ""),
        (POLICY.replace("\n", "  \n"), True, ""),
        (f"We sell books.  \nAll of them. \n\n{POLICY}\t\n\nBe  \nbrief.", True, ""),
        (POLICY.replace("\n", "\n  "), False, "indented, numbered"),
        ("\n".join(f"{n:6}\t{line}" for n, line in enumerate(POLICY.split("\n"), 1)), False, "indented, numbered"),
        (POLICY.replace("gold\n", "silver\n"), False, "line 4 is another than 'tier: gold'"),
        ("We have a returns policy of Harbor Books.", False, ""),
    ],
)
def test_a_text_that_is_nearly_that_of_a_skill(
    served: Served, text: str, spliced: bool, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Line ends may differ; a text that does not match is reported in the log and by explain."""
    messages = [{"role": "system", "content": text}, {"role": "user", "content": QUESTION}]
    reply = served.chat(messages, max_tokens=1, notes={"explain": True, "cache_salt": ""})
    assert ("splice" in {kind for kind, _, _ in pieces(reply)}) is spliced
    explained = served.http.post("/v1/notes/explain", json={"messages": messages}).json()
    notices = explained["notices"]
    assert notices == reply["notes"]["notices"] and [said in one for one in notices] == [True] * bool(said)
    logged = capfd.readouterr().err.count("not as it was compiled")
    assert logged == (said != "" and "\t" not in text), "once: the numbered text has the same line as the indented one"
    shown = served.http.post("/apply-template", json={"messages": messages}).json()["prompt"]
    assert (POLICY in shown) is spliced and ("Be  \nbrief." in shown) is ("Be  " in text)


def test_few_stay_open(full: Path) -> None:
    """The most recently requested ones; all users of a skill share one segment."""
    with Workspace(config.shipped_model(), ContextOptions(n_threads=1), paths=Paths.under(full)) as workspace:
        segment_cache = SegmentCache(workspace, lambda function: function())
        first, before = segment_cache.segment("skill000"), files()
        for number in range(1, 2 * OPEN):
            segment_cache.segment(f"skill{number:03d}")
        assert files() <= before + OPEN and segment_cache.segment("skill000") is first
        infos = {info.name: info for info in segment_cache.known()}
        again = segment_cache.open(infos["skill001"])
        assert again is not None and again.text == infos["skill001"].text


def test_a_text_that_has_changed_is_not_taken_for_the_old_one(full: Path) -> None:
    """Metadata of a file that holds another skill now opens nothing."""
    with Workspace(config.shipped_model(), ContextOptions(n_threads=1), paths=Paths.under(full)) as workspace:
        segment_cache = SegmentCache(workspace, lambda function: function())
        old = next(info for info in segment_cache.known() if info.name == "skill099")
        write_segment(old.path, replace(open_segment(old.path), text=old.text + " And more."))
        assert segment_cache.open(old) is None
        new = next(info for info in segment_cache.known() if info.name == "skill099")
        assert segment_cache.open(new) is not None and new.text.endswith("more.")
        Library(old.path.parent).remove("skill099")
        assert segment_cache.open(new) is None and "skill099" not in {info.name for info in segment_cache.known()}


def test_a_server_may_open_as_many_files_as_the_system_lets_it() -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    program = (
        "import resource; from notes_cli.library.safe_files import raise_file_limit as go;"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, (64, {most}));"
        "go(); print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.split() == [str(most), str(most)]
