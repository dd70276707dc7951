"""The heat of a skill's text: a probe, which lets others go on after each mix that it measures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from notes_cli.errors import Progress
from notes_cli.measure.picture import as_json
from notes_cli.measure.probing import Probing, probe_skill
from notes_cli.runtime.asking import Listener
from notes_cli.serve.parsing import Reader
from notes_cli.serve.refusals import Refused
from notes_cli.serve.replies import Json
from notes_cli.serve.scheduler import Scheduler

CHOICES = 64  # answers to decide among, at most
MARGIN = 512  # tokens for the template, the new value and an answer, beside the texts
SEQUENCES = 4  # its own, one to compile in, and two looks ahead


def parse(data: Any) -> tuple[Probing, bool]:
    """What is to be probed, and whether progress is to be told. Raise Refused."""
    given = Reader(data)
    names = {key: given.text(key) for key in ("skill", "field")}
    for key, name in names.items():
        if not name:
            raise Refused(400, f"{key} is missing: which {key} is to be probed?", param=key, code="invalid_value")
    choices = given.texts("choices", CHOICES)
    if len(choices) == 1:
        raise given.wrong("choices", "two strings or more", list(choices))
    wanted = Probing(
        **names,
        value=given.text("value") or None,
        question=given.text("question") or None,
        choices=choices or None,
        system=given.text("system") or None,
        window=given.whole("window", 1, 2**31 - 1),
    )
    stream = given.flag("stream")
    given.end()
    return wanted, stream


def probing(scheduler: Scheduler, wanted: Probing, told: Callable[[Json], object]) -> Callable[[], Json]:
    """What probes, telling how far it has come, and gives the picture that docs/json.md has of it, with the text."""

    @contextmanager
    def watch(label: str, *_: object, **__: object) -> Iterator[Progress]:
        def update(done: int, total: int) -> None:
            told({"step": label, "done": done, "total": total})
            scheduler.between()

        yield update

    def work() -> Json:
        workspace, room = scheduler.workspace, scheduler.budget
        segment = scheduler.segment_cache.segment(str(wanted.skill))  # a client names skills, no files of this machine
        words = [len(workspace.model.tokenize(text or "")) for text in (wanted.question, wanted.system)]
        tokens = 2 * len(segment) + sum(words) + MARGIN
        if not room.make_room(tokens, SEQUENCES):
            raise Refused(503, f"there is no room for the {tokens:,} tokens of a probe now", code="no_room", wait=5)
        with room.reserving(tokens, SEQUENCES):  # no answer is to count on it
            found = probe_skill(workspace, replace(wanted, skill=segment), Listener(watch=watch))
        return {"version": 1, **as_json(found), "text": found.text}

    return work
