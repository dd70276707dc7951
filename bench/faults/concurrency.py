"""Several processes at once, on the same names."""

from __future__ import annotations

import random
import shlex
from collections import Counter

from bench.faults.frame import ACCEPTED, Kind, chance, check
from bench.faults.jobs import JOBS, Jobs, all_jobs
from bench.faults.stage import TEXT, contents
from notes_cli.sessions.folder import Sessions

COMMANDS = (
    "compile returns.txt",
    "compile returns.txt --force",
    "ask 'Number {n}?' --session mine",
    "ask 'Number {n}?' --session mine",
    "ask 'Number {n}?' --splice returns --session new",
    "ask 'Number {n}?' --splice support",
    "edit mine --field date=2026-08-0{n} --method erratum",
    "edit other --field tier=gold-{n} --method suffix",
    "session fork mine fork",
    "session fork other fork",
    "session export mine HOME/out/one.notes.tar -f",
    "session import HOME/out/old.notes.tar --name came",
    "session ls --json",
    "session show mine",
    "ls --json",
    "rm support",
)


class Concurrency(Kind):
    """2 to 6 commands at once."""

    cases, share = 300, 2

    def __init__(self, seed: int, jobs: Jobs | None = None) -> None:
        super().__init__(seed)
        self.jobs = jobs or all_jobs()

    def judge(self, number: int) -> str:
        rng, stage = chance(self.seed, number), self.jobs.stage
        home = self.jobs.copied(JOBS[-1])
        text = stage.folder / "returns.txt"
        text.write_text(TEXT.replace("06-15", f"06-{rng.randrange(16, 28)}"))
        commands = [self.command(rng, which) for which in range(1, rng.randint(2, 6) + 1)]
        children = [stage.begin(command, home, tag=which) for which, command in enumerate(commands)]
        outcomes = [stage.end(child, which) for which, child in enumerate(children)]
        together = "; ".join(f"{command} -> {one.code}" for command, one in zip(commands, outcomes, strict=True))
        for command, outcome in zip(commands, outcomes, strict=True):
            outcome.check_tidy(f"{command} ({together})")
        found = contents(home)
        check(not found.problems, f"{found.problems} ({together})", "loss")
        check(not found.temporary, f"{found.temporary} is left ({together})")
        sessions = Sessions(home / "sessions")
        kept = {name: sessions.find(name).state.live for name in sessions.names()}
        once = Counter[str]()
        for words, outcome in zip(map(shlex.split, commands), outcomes, strict=True):
            done, key, value, name = outcome.code == 0, "", "", words[1]
            once[f"{words[0]} {words[1]}"] += done
            if words[0] == "ask" and "--session" in words:
                key, value, name = "question", words[1], words[words.index("--session") + 1]
            elif words[0] == "edit":
                key, value = "value", words[3].partition("=")[2]
            if key:
                times = sum(line.get(key) == value for line in kept.get(name, ()))
                check(times == done, f"{value} is there {times} times ({together})", "loss")
        check(max(once["session fork"], once["session import"]) <= 1, f"a name was given twice ({together})")
        for command in (*(f"ask Last? --session {name}" for name in kept), "compile returns.txt --force"):
            last = stage.run(command, home)
            check(last.code == 0, f"{command}: {last.err.strip()[-200:]} ({together})", "loss")
        text.write_text(TEXT)
        return ACCEPTED

    def command(self, rng: random.Random, which: int) -> str:
        return rng.choice(COMMANDS).format(n=which)
