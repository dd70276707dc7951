"""Several processes at once, on the same names."""

from __future__ import annotations

import random
from collections import Counter

from bench.faults.frame import ACCEPTED, Budget, Row, Verdict, chance, tried
from bench.faults.kills import Jobs, all_jobs
from bench.faults.stage import ANSWER, TEXT, Outcome, look, temporary
from notes_cli.sessions.folder import Sessions

TITLE = (
    "2 to 6 processes at once on the same names: compile of one text, ask in one session and in a new one, edit, fork, "
    "undo, export over one file, import under one name, rm."
)
FAILS = (
    "a traceback, an answer other than one clear line, a turn or an edit with status 0 that is not in the ledger once "
    "or one with another status that is, two forks or imports of one name, a session or a segment that does not open "
    "or go on afterwards, temporary files that are still there."
)
CASES, SHARE = 300, 2


def run(budget: Budget, seed: int) -> Row:
    return tried(Concurrency(all_jobs(), seed), budget, say="concurrency")


class Concurrency:
    def __init__(self, jobs: Jobs, seed: int) -> None:
        self.jobs, self.stage, self.seed = jobs, jobs.stage, seed

    def __call__(self, number: int) -> Verdict:
        rng = chance(self.seed, number)
        home = self.stage.copied(self.stage.home("begun"), "home")
        self.jobs.text.write_text(TEXT.replace("06-15", f"06-{rng.randrange(16, 28)}"))
        commands = [self._command(rng, which, str(home)) for which in range(rng.randint(2, 6))]
        begun = [self.stage.begin(command, home, tag=str(which)) for which, command in enumerate(commands)]
        outcomes = [self.stage.end(*one) for one in begun]
        why = self._wrong(list(zip(commands, outcomes, strict=True)), home)
        self.jobs.text.write_text(TEXT)
        return why if why else ACCEPTED

    def _command(self, rng: random.Random, which: int, home: str) -> list[str]:
        model, ask = self.stage.options(), [*self.stage.options(), *ANSWER]
        text = str(self.jobs.text)
        return rng.choice(
            (
                ["compile", text, *model],
                ["compile", text, "--force", *model],
                ["ask", f"Number {which}?", "--session", "mine", *ask],
                ["ask", f"Number {which}?", "--session", "mine", *ask],
                ["ask", f"Number {which}?", "--splice", "returns", "--session", "new", *ask],
                ["ask", f"Number {which}?", "--splice", "support", *ask],
                ["edit", "mine", "--field", f"date=2026-08-0{which + 1}", "--method", "erratum", *model],
                ["edit", "other", "--field", f"tier=gold-{which}", "--method", "suffix", *model],
                ["session", "fork", "mine", "fork"],
                ["session", "fork", "other", "fork"],
                ["session", "export", "mine", f"{home}/out/one.notes.tar", "-f"],
                ["session", "import", f"{home}/out/old.notes.tar", "--name", "came"],
                ["session", "ls", "--json"],
                ["session", "show", "mine"],
                ["ls", "--json"],
                ["rm", "support"],
            )
        )

    def _wrong(self, done: list[tuple[list[str], Outcome]], home: object) -> Verdict | None:
        home = self.stage.home("home")
        told = "; ".join(f"{' '.join(command[:4])} -> {outcome.code}" for command, outcome in done)
        for command, outcome in done:
            if outcome.untidy:
                return Verdict("crash", f"{' '.join(command[:4])}: {outcome.untidy} ({told})")
        found = look(home)
        if found.problems:
            return Verdict("loss", f"{found.problems[0]} ({told})")
        left = temporary(found.files)
        if left:
            return Verdict("wrong", f"{left[0]} is left ({told})")
        sessions = Sessions(home / "sessions")
        kept = {name: sessions.find(name).state.live for name in sessions.names()}
        for command, outcome in done:
            if command[0] == "ask" and "--session" in command:
                name = command[command.index("--session") + 1]
                times = sum(line.get("question") == command[1] for line in kept.get(name, ()))
                if times != (outcome.code == 0):
                    return Verdict("loss", f"{command[1]} is there {times} times ({told})")
            if command[0] == "edit":
                value = command[3].partition("=")[2]
                times = sum(line.get("value") == value for line in kept[command[1]])
                if times != (outcome.code == 0):
                    return Verdict("loss", f"{command[3]} is there {times} times ({told})")
        once = Counter(command[1] for command, outcome in done if command[0] == "session" and outcome.code == 0)
        if once["fork"] > 1 or once["import"] > 1:
            return Verdict("wrong", f"a name was given twice ({told})")
        for name in kept:
            last = self.stage.run(["ask", "Last?", "--session", name, *self.stage.options(), *ANSWER], home)
            if last.code:
                return Verdict("loss", f"{name} does not go on: {last.err.strip()[-200:]} ({told})")
        again = self.stage.run(["compile", str(self.jobs.text), "--force", *self.stage.options()], home)
        return Verdict("loss", f"compile afterwards: {again.err.strip()[-200:]} ({told})") if again.code else None
