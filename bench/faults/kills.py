"""Processes killed: at every change of a file, in the middle of every write, by a cut of the power, at random."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

from bench.faults.events import Events, cut, read
from bench.faults.frame import ACCEPTED, SCRATCH, Budget, Row, Verdict, chance, tried
from bench.faults.stage import ANSWER, OTHER, TEXT, Look, Outcome, Stage, look, temporary
from notes_cli.engine.segment import Identity
from notes_cli.library.profiles import Measured, Profile, Profiles

TITLE = (
    "`notes` killed by SIGKILL at every change of a file (open, write, fsync, rename, link, mkdir, remove), in the "
    "middle of every write, with the power cut there (what was not synced is torn, a rename without its folder's fsync "
    "is taken back), and at random instants: compile, compile of a changed text, ask (first and later turns, with a "
    "skill), edit by erratum and in the rows, fork, undo, compact, "
    "forget by both methods, export and import of sessions and of skills, prune, "
    "rm of both kinds, a profile. Forked from a process that has imported everything and opened no model; every fourth "
    "of the random ones is executed from scratch."
)
FAILS = (
    "anything in the library or the sessions that is neither as before nor as after the command, a file that does not "
    "open, the same command failing afterwards or coming to something else, another answer of the session, or "
    "temporary files that are still there after the next command."
)
RANDOM = 700  # kills at random instants
CASES, SHARE = 100_000, 4  # as many as there are events, and RANDOM


@dataclass(frozen=True)
class Job:
    """A command, the home in which it runs, and the session that it is about."""

    name: str
    home: str
    arguments: Sequence[str] | Callable[[Path], object]
    session: str = ""
    text: str = TEXT  # of the skill's file


class Case(NamedTuple):
    """`at`: the number of the event, or the part of the time that it takes, for a kill at random."""

    job: Job
    mode: str
    at: float


class Jobs:
    """Commands, all or `only` those named, with the contents of their homes before and after."""

    def __init__(self, stage: Stage, only: Sequence[str] = ()) -> None:
        self.stage = stage
        self.text = stage.folder / "returns.txt"
        self.text.write_text(TEXT)
        (stage.folder / "support.txt").write_text(OTHER)
        self.jobs = [job for job in jobs(stage) if not only or job.name in only]
        if not stage.home("begun").exists():
            prepare(stage)
        self.before: dict[str, Look] = {}
        self.after: dict[str, Look] = {}
        self.said: dict[str, str] = {}
        self.events: dict[str, list[str]] = {}
        self.seconds: dict[str, float] = {}
        for job in self.jobs:
            self._reference(job)

    def _reference(self, job: Job) -> None:
        home, journal = self.stage.copied(self.stage.home(job.home), "reference"), self.stage.folder / "journal"
        self.before[job.name] = look(home)
        begun = time.monotonic()
        outcome = self.run(job, home, Events(home, journal, "count", -1).install)
        self.seconds[job.name] = time.monotonic() - begun
        if outcome.code:
            raise RuntimeError(f"{job.name} fails by itself: {outcome.err}")
        self.events[job.name] = [entry[0] for entry in read(journal) if entry[0] != "synced"]
        self.after[job.name] = look(home)
        self.said[job.name] = self.go_on(job, home).out

    def run(self, job: Job, home: Path, before: Callable[[], object] | None = None) -> Outcome:
        self.text.write_text(job.text)
        return self.stage.run(self.arguments(job, home), home, before=before)

    def arguments(self, job: Job, home: Path) -> Sequence[str] | Callable[[], object]:
        if callable(job.arguments):
            return partial(job.arguments, home)
        return [argument.replace("HOME", str(home)) for argument in job.arguments]

    def go_on(self, job: Job, home: Path) -> Outcome:
        """Another turn of the session that the command was about."""
        if not job.session:
            return Outcome(0, "", "")
        return self.stage.run(["ask", "Last?", "--session", job.session, *self.stage.options(), *ANSWER], home)

    def judge(self, job: Job, home: Path, *, ended: Outcome | None = None) -> Verdict:
        """Judge the contents of a home after a command was stopped; `ended`: its status."""
        before, after = self.before[job.name], self.after[job.name]
        found = look(home)
        if found.problems:
            return Verdict("loss", f"{job.name}: {found.problems[0]}")
        for kind in ("segments", "sessions", "exports"):
            was, will, now = (getattr(one, kind) for one in (before, after, found))
            for name in {*was, *will, *now}:
                if now.get(name) not in (was.get(name), will.get(name)):
                    how = "is gone" if name not in now else "is neither as before nor as after"
                    return Verdict("loss", f"{job.name}: of {kind} {name} {how}")
        same_before, same_after = (found[:3] == one[:3] for one in (before, after))
        if not same_before and not same_after:
            return Verdict("loss", f"{job.name}: half of it has happened")
        if ended is not None and ended.code == 0 and not same_after:
            return Verdict("wrong", f"{job.name}: status 0, and it has not happened")
        if ended is not None and ended.code in (1, 2) and not same_before:
            return Verdict(
                "wrong", f"{job.name}: status {ended.code} ({ended.err.strip()[-150:]}), and it has happened"
            )
        if not same_after or before[:3] == after[:3]:
            again = self.run(job, home)
            if again.code:
                return Verdict("loss", f"{job.name} again: status {again.code}: {again.err.strip()[-300:]}")
            if look(home)[:3] != after[:3]:
                return Verdict("loss", f"{job.name} again comes to something else")
        last = self.go_on(job, home)
        if last.code or last.out != self.said[job.name]:
            return Verdict(
                "wrong", f"{job.name}, then a turn: status {last.code}, {last.out!r} {last.err.strip()[-200:]}"
            )
        left = temporary(look(home).files)
        if left and not job.session:  # it had done all that it is for, so nothing has run since
            self.run(job, home)
            left = temporary(look(home).files)
        return Verdict("wrong", f"{job.name} leaves {left[0]}") if left else ACCEPTED


def jobs(stage: Stage) -> list[Job]:
    """The commands that write."""
    model, ask = stage.options(), [*stage.options(), *ANSWER]
    text, support = str(stage.folder / "returns.txt"), str(stage.folder / "support.txt")
    changed = TEXT.replace("06-15", "06-25")
    return [
        Job("compile", "empty", ["compile", text, *model]),
        Job("recompile", "begun", ["compile", text, "--force", *model], text=changed),
        Job("compile another", "begun", ["compile", support, "--name", "third", *model]),
        Job("ask first", "begun", ["ask", "May I?", "--splice", "returns", "--session", "new", *ask], "new"),
        Job("ask later", "begun", ["ask", "And?", "--session", "mine", *ask], "mine"),
        Job("ask with a skill", "begun", ["ask", "Open?", "--splice", "support", "--session", "mine", *ask], "mine"),
        Job(
            "edit, said", "begun", ["edit", "mine", "--field", "date=2026-07-01", "--method", "erratum", *model], "mine"
        ),
        Job("edit, rows", "begun", ["edit", "other", "--field", "tier=silver", "--method", "suffix", *model], "other"),
        Job("fork", "begun", ["session", "fork", "mine", "fork"], "fork"),
        Job("undo", "begun", ["session", "undo", "mine"], "mine"),
        Job("compact", "begun", ["session", "compact", "mine", *model], "mine"),
        Job("forget, cut", "begun", ["session", "forget", "mine", "1", *model], "mine"),
        Job("forget, suffix", "begun", ["session", "forget", "mine", "1", "--method", "suffix", "-y", *model], "mine"),
        Job("export", "begun", ["session", "export", "mine", "HOME/out/new.notes.tar"]),
        Job("export over", "begun", ["session", "export", "mine", "HOME/out/old.notes.tar", "-f"]),
        Job("import", "begun", ["session", "import", "HOME/out/old.notes.tar", "--name", "came"], "came"),
        Job("export skill", "begun", ["export", "returns", "HOME/out/returns.gguf"]),
        Job("import skill", "begun", ["import", "HOME/out/skill.gguf", "--name", "came", *model]),
        Job("prune", "begun", ["prune", "--stale", "-y"], text=changed),
        Job("rm", "begun", ["rm", "support"]),
        Job("session rm", "begun", ["session", "rm", "other", "-y"]),
        Job("profile", "begun", save_profile),
    ]


def save_profile(home: Path) -> object:
    identity = Identity("tiny", "llama", "F32", "ab" * 32, "c0ffee", "neox base 10000", "f16/f16", "")
    verdicts = {"direct": "39 of 40", "reasoned": "none holds"}
    measured = [Measured("method", f"selective@{k}", "direct", 40, 39, 38, 0.99, 12.5, 3.25) for k in range(40)]
    ways = {"direct": "erratum", "reasoned": "recompute"}
    decisive = {"direct": 40, "reasoned": 39}
    profile = Profile(
        identity, "f16/f16", 40, decisive, ways, "now", 1, "early", measured, "2026-06-01T12:00:00Z", verdicts
    )
    return Profiles(home / "profiles").save(profile, "notes 0")


def prepare(stage: Stage) -> None:
    """The homes in which the commands run."""
    for name in ("empty", "begun"):
        stage.home(name).mkdir(mode=0o700)
    home = stage.home("begun")
    (home / "out").mkdir(mode=0o700)
    model, ask = stage.options(), [*stage.options(), *ANSWER]
    for arguments in (
        ["compile", str(stage.folder / "returns.txt"), *model],
        ["compile", str(stage.folder / "support.txt"), *model],
        ["ask", "May I?", "--splice", "returns", "--session", "other", *ask],
        ["ask", "May I?", "--splice", "returns", "--session", "mine", *ask],
        ["edit", "mine", "--field", "tier=silver", "--method", "erratum", *model],
        ["ask", "And now?", "--session", "mine", *ask],
        ["session", "export", "other", str(home / "out/old.notes.tar")],
        ["edit", "mine", "--field", "tier=blue", "--method", "erratum", *model],
        ["export", "returns", str(home / "out/skill.gguf")],
    ):
        outcome = stage.run(arguments, home)
        if outcome.code:
            raise RuntimeError(f"{' '.join(arguments[:3])}: {outcome.err}")
    stage.run(lambda: save_profile(home), home)


@cache
def all_jobs() -> Jobs:
    """Every command, made ready once for all the kinds of faults that befall them."""
    return Jobs(Stage.set(SCRATCH / "jobs"))


def run(budget: Budget, seed: int) -> Row:
    kills = Kills(all_jobs(), seed)
    row = tried(kills, Budget(min(budget.cases, len(kills.cases)), budget.until), say="kills")
    events = sum(map(len, kills.jobs.events.values()))
    row.notes = f"{len(kills.jobs.jobs)} commands with {events} events in all, {RANDOM} kills at random"
    return row


class Kills:
    def __init__(self, jobs: Jobs, seed: int) -> None:
        self.jobs, self.seed = jobs, seed
        rng = random.Random(seed)
        self.cases = [
            Case(job, mode, number)
            for job in jobs.jobs
            for number, event in enumerate([*jobs.events[job.name], "done"])
            for mode in ("power", *(["kill"] if event != "done" else []), *(["torn"] if event == "write" else []))
        ]
        self.cases += [Case(rng.choice(jobs.jobs), "random", rng.random()) for _ in range(RANDOM)]
        rng.shuffle(self.cases)

    def __call__(self, number: int) -> Verdict:
        case = self.cases[number]
        jobs, job = self.jobs, case.job
        home = jobs.stage.copied(jobs.stage.home(job.home), "home")
        if case.mode == "random":
            self._at_random(case, home, chance(self.seed, number))
        else:
            journal = jobs.stage.folder / "journal"
            kept = journal.parent / (journal.name + ".kept")
            if kept.is_dir():
                for path in kept.iterdir():
                    path.unlink()
            outcome = jobs.run(job, home, Events(home, journal, case.mode, int(case.at)).install)
            done = case.at == len(jobs.events[job.name])  # reported results survive a power cut
            if outcome.code != (0 if done else -signal.SIGKILL):
                return Verdict("crash", f"{job.name} was to be killed at event {case.at}: {outcome}")
            if case.mode == "power":
                cut(journal)
            verdict = jobs.judge(job, home, ended=outcome)
            return verdict._replace(why=f"{case.mode} at {case.at}: {verdict.why}") if verdict.why else verdict
        verdict = jobs.judge(job, home)
        return verdict._replace(why=f"{case.mode} at {case.at}: {verdict.why}") if verdict.why else verdict

    def _at_random(self, case: Case, home: Path, rng: random.Random) -> None:
        jobs, job = self.jobs, case.job
        jobs.text.write_text(job.text)
        arguments = jobs.arguments(job, home)
        if rng.random() < 0.25 and not callable(arguments):
            process = jobs.stage.apart(arguments, home)
            time.sleep(case.at * (jobs.seconds[job.name] + 0.5))
            process.kill()
            process.communicate()
            return
        child, out, err = jobs.stage.begin(arguments, home)
        time.sleep(case.at * jobs.seconds[job.name])
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        jobs.stage.end(child, out, err)
