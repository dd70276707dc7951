"""The commands that write, and whether a home is as before or as after one of them that was stopped."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from bench.faults.events import Events, read
from bench.faults.frame import SCRATCH, Failed, Kind, check
from bench.faults.stage import TEXT, Command, Contents, Outcome, Stage, contents
from notes_cli.config import Paths
from notes_cli.runtime.naming import save_model_defaults

CHANGED = TEXT.replace("06-15", "06-25")


class Job(NamedTuple):
    """A command, the home in which it runs, and the session that it changes."""

    name: str
    command: Command
    session: str = ""
    home: str = "begun"
    text: str = TEXT  # of the skill's file


def save_defaults(home: Path, seam: int = 4) -> Path:
    """Write defaults of a model into config.yaml, as `notes verify --save` does."""
    return save_model_defaults("other F32", {"method": "erratum", "seam": str(seam)}, Paths.under(home))


JOBS = (
    Job("compile", "compile returns.txt", home="empty"),
    Job("recompile", "compile returns.txt --force", text=CHANGED),
    Job("compile another", "compile support.txt --name third"),
    Job("ask first", "ask 'May I?' --splice returns --session new", "new"),
    Job("ask later", "ask And? --session mine", "mine"),
    Job("ask with a skill", "ask Open? --splice support --session mine", "mine"),
    Job("edit, erratum", "edit mine --field date=2026-07-01 --method erratum", "mine"),
    Job("edit, suffix", "edit other --field tier=silver --method suffix", "other"),
    Job("fork", "session fork mine fork", "fork"),
    Job("undo", "session undo mine", "mine"),
    Job("compact", "session compact mine", "mine"),
    Job("forget, cut", "session forget mine 1", "mine"),
    Job("forget, suffix", "session forget mine 1 --method suffix -y", "mine"),
    Job("export", "session export mine HOME/out/new.notes.tar"),
    Job("export over", "session export mine HOME/out/old.notes.tar -f"),
    Job("import", "session import HOME/out/old.notes.tar --name came", "came"),
    Job("export skill", "export returns HOME/out/returns.gguf"),
    Job("import skill", "import HOME/out/skill.gguf --name came"),
    Job("rm --stale", "rm --stale -y", text=CHANGED),
    Job("rm", "rm support"),
    Job("session rm", "session rm other -y"),
    Job("defaults", save_defaults),
)
BEGUN = (
    "compile returns.txt",
    "compile support.txt",
    "ask 'May I?' --splice returns --session other",
    "ask 'May I?' --splice returns --session mine",
    "edit mine --field tier=silver --method erratum",
    "ask 'And now?' --session mine",
    "session export other HOME/out/old.notes.tar",
    "edit mine --field tier=blue --method erratum",
    "export returns HOME/out/skill.gguf",
)


class Jobs:
    """The commands, all or `only` those named, with the contents of their homes before and after."""

    def __init__(self, stage: Stage, only: Sequence[str] = ()) -> None:
        self.stage = stage
        self.jobs = [job for job in JOBS if not only or job.name in only]
        self.before: dict[str, Contents] = {}
        self.after: dict[str, Contents] = {}
        self.answers: dict[str, str] = {}  # to a further turn
        self.events: dict[str, list[str]] = {}
        self.seconds: dict[str, float] = {}
        for job in self.jobs:
            home, journal = self.copied(job, "reference"), stage.folder / "journal"
            self.before[job.name] = contents(home)
            started = time.monotonic()
            outcome = self.run(job, home, Events(home, journal, "count", -1).install)
            self.seconds[job.name] = time.monotonic() - started
            if outcome.code:
                raise RuntimeError(f"{job.name} fails by itself: {outcome.err}")
            self.events[job.name] = [entry[0] for entry in read(journal) if entry[0] != "synced"]
            self.after[job.name] = contents(home)
            self.answers[job.name] = self.further_turn(job, home).out

    def home(self, job: Job) -> Path:
        """The home in which a command runs, as it is before."""
        fresh = not (self.stage.folder / job.home).exists()
        home = self.stage.prepared(job.home, BEGUN if job.home == "begun" else ())
        if fresh and job.home == "begun":
            save_defaults(home, seam=1)
        return home

    def copied(self, job: Job, name: str = "home") -> Path:
        return self.stage.copied(self.home(job), name)

    def write_text(self, job: Job) -> None:
        """Write the skill's file as it is when this command runs."""
        (self.stage.folder / "returns.txt").write_text(job.text)

    def run(self, job: Job, home: Path, before: Callable[[], object] | None = None) -> Outcome:
        self.write_text(job)
        return self.stage.run(job.command, home, before)

    def further_turn(self, job: Job, home: Path) -> Outcome:
        """Another turn of the session that the command changes."""
        return self.stage.run(f"ask Last? --session {job.session}", home) if job.session else Outcome(0, "", "")

    def judge(self, job: Job, home: Path, ended: Outcome | None = None) -> None:
        """Raise Failed where a home is neither as before nor as after a command that was stopped, or where the command
        or another turn fails afterwards. `ended`: the command's outcome, if it was not killed."""
        before, after, found = self.before[job.name], self.after[job.name], contents(home)
        check(not found.problems, f"{job.name}: {[*found.problems, ''][0]}", "loss")
        for kind in ("segments", "sessions", "exports"):
            was, will, now = (getattr(one, kind) for one in (before, after, found))
            for name in {*was, *will, *now}:
                how = "is gone" if name not in now else "is neither as before nor as after"
                check(now.get(name) in (was.get(name), will.get(name)), f"{job.name}: of {kind} {name} {how}", "loss")
        same_before, same_after = (found[:3] == one[:3] for one in (before, after))
        check(same_before or same_after, f"{job.name}: half of it has happened", "loss")
        if ended is not None:
            check(ended.code or same_after, f"{job.name}: status 0, and it has not happened")
            failed = ended.code in (1, 2)
            check(same_before or not failed, f"{job.name}: {ended.err.strip()[-150:]}, and it has happened")
        if not same_after or before[:3] == after[:3]:
            again = self.run(job, home)
            check(again.code == 0, f"{job.name} again: status {again.code}: {again.err.strip()[-300:]}", "loss")
            check(contents(home)[:3] == after[:3], f"{job.name} again comes to something else", "loss")
        last = self.further_turn(job, home)
        right = last.code == 0 and last.out == self.answers[job.name]
        check(right, f"{job.name}, then a turn: status {last.code}, {last.out!r} {last.err.strip()[-200:]}")
        left = contents(home).temporary
        if left and not job.session:  # it had done all of its work, so no command has run since
            self.run(job, home)
            left = contents(home).temporary
        check(not left, f"{job.name} leaves {left}")


@cache
def all_jobs() -> Jobs:
    """Every command, made ready once for all kinds of faults."""
    return Jobs(Stage.make(SCRATCH / "jobs"))


class Listed(Kind):
    """A kind whose cases are in a list, each of commands under some condition, in an order by chance."""

    def __init__(self, seed: int, jobs: Jobs | None = None) -> None:
        super().__init__(seed)
        self.jobs = jobs or all_jobs()
        self.every = self.listed(random.Random(seed))
        random.Random(seed).shuffle(self.every)
        self.cases = len(self.every)

    def listed(self, rng: random.Random) -> list[Any]:
        raise NotImplementedError

    def judged(self, number: int, case: Any) -> str:
        """The outcome of a case. Raises Failed."""
        raise NotImplementedError

    def judge(self, number: int) -> str:
        case = self.every[number]
        try:
            return self.judged(number, case)
        except Failed as error:
            names = (str(getattr(one, "name", one)) for one in case)
            raise Failed(f"{', '.join(names)}: {error}", error.outcome) from error
