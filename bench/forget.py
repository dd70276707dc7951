"""What is left of what was cut out of a session: its logits and decisions against those of a session that never had it.

    python -m bench.forget [--model FILE] [--cases N] [--write docs/results/forget.csv]

A session of 20 rounds: each has what a tool has returned (a policy of training/world.py, which training never saw) in
a user's message, with a question, and the answer. Ten of the rounds, drawn by chance, are forgotten; then the question
of each of the ten that are left is asked again. Three ways: `cut`, `suffix`, and nothing forgotten (`kept`), each
against a session that never had the ten. Printed are means over all questions, and the largest difference of a logit.
"""

from __future__ import annotations

import argparse
import csv
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from notes_cli import config
from notes_cli.engine.decision import decide
from notes_cli.engine.options import ContextOptions
from notes_cli.errors import NotesError
from notes_cli.measure.compare import cosine, divergence
from notes_cli.runtime.assembling import assemble
from notes_cli.runtime.prompt import Prompt
from notes_cli.runtime.workspace import Workspace
from notes_cli.sessions.folder import Sessions
from notes_cli.sessions.session import Session
from training import world

ROUNDS, GONE = 20, 10
WAYS = ("kept", "cut", "suffix")
SEED = 16


class Round(NamedTuple):
    """What comes, the choices and the right one."""

    message: str
    question: str
    choices: tuple[str, ...]
    answer: str


class Asked(NamedTuple):
    """One question at the end of a session."""

    logits: NDArray[np.float32]
    choice: str


def rounds(seed: int) -> list[Round]:
    """Of policies of their own, each with a question that it answers."""
    found = []
    for case in world.held_out(ROUNDS, seed):
        text = case.skills[case.target].text
        found.append(Round(f"{text}\n\n{case.question}", case.question, case.choices, case.answer))
    return found


def begun(workspace: Workspace, folder: Path, name: str, talk: Sequence[Round]) -> None:
    """A session of these rounds, each with the right answer."""
    with Sessions(folder).locked(name, new=True) as stored, Session(workspace, stored) as session:
        for one in talk:
            if session.empty:
                prompt = Prompt(one.message, system="You are a helpful assistant.")
                session.begin(prompt, assemble(workspace, prompt))
            else:
                session.follow(one.message)
            session.keep(one.answer)


def asked(workspace: Workspace, folder: Path, name: str, talk: Sequence[Round]) -> Iterator[Asked]:
    """Each question at the end of the session, which stays as it is."""
    for one in talk:
        with Sessions(folder).locked(name) as stored, Session(workspace, stored) as session:
            notebook = session.follow(one.question)
            yield Asked(notebook.logits(), decide(notebook, one.choices).choice)


def measured(workspace: Workspace, number: int) -> Iterator[dict[str, Any]]:
    """One case: a row for each way and question."""
    talk = rounds(SEED + number)
    gone = sorted(random.Random(SEED + number).sample(range(ROUNDS), GONE))
    left = [one for at, one in enumerate(talk) if at not in gone]
    with TemporaryDirectory() as scratch:
        folder = Path(scratch) / "sessions"
        begun(workspace, folder, "never", left)
        begun(workspace, folder, "kept", talk)
        names = [str(at + 1) for at in gone]
        for way in ("cut", "suffix"):
            Sessions(folder).fork("kept", way)
            with Sessions(folder).locked(way) as stored, Session(workspace, stored) as session:
                session.forget(names, way)
                never = Sessions(folder).find("never").state
                if stored.state.tokens != never.tokens:
                    raise RuntimeError(f"{way} leaves other tokens than never having had them")
        wanted = [*asked(workspace, folder, "never", left)]
        for way in WAYS:
            for at, (one, ours, theirs) in enumerate(
                zip(left, asked(workspace, folder, way, left), wanted, strict=True), 1
            ):
                yield {
                    "case": number,
                    "way": way,
                    "question": at,
                    "difference": float(np.abs(ours.logits - theirs.logits).max()),
                    "kl": divergence(ours.logits, theirs.logits),
                    "cosine": cosine(ours.logits, theirs.logits),
                    "same": ours.choice == theirs.choice,
                    "right": ours.choice == one.answer,
                    "never right": theirs.choice == one.answer,
                }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown."""
    head = (
        "way",
        "largest logit difference",
        "mean of them",
        "KL, mean",
        "cosine, mean",
        "decisions as never had",
        "right",
    )
    lines = [f"| {' | '.join(head)} |", "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"]
    for way in WAYS:
        part = [row for row in rows if row["way"] == way]
        far = [row["difference"] for row in part]
        means = (fmean(row[key] for row in part) for key in ("kl", "cosine"))
        same, right = (sum(row[key] for row in part) for key in ("same", "right"))
        kl, near = means
        lines.append(
            f"| {way} | {max(far):.2g} | {fmean(far):.2g} | {kl:.1e} | {near:.6f} | {same} of {len(part)} | {right} |"
        )
    never = sum(row["never right"] for row in rows if row["way"] == WAYS[0])
    return "\n".join([*lines, f"| never had |  |  |  |  |  | {never} |"])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="GGUF to measure (default: the one that ships)")
    parser.add_argument("--cases", type=int, default=10, help="sessions (default: 10)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--write", type=Path, help="a CSV file for every observation")
    given = parser.parse_args(arguments)
    if given.cases < 1:
        parser.error(f"--cases {given.cases}: there must be one at least")
    model = given.model or config.shipped_model()
    rows: list[dict[str, Any]] = []
    try:
        with Workspace(model, ContextOptions(n_ctx=4096, n_threads=given.threads)) as workspace:
            for number in range(1, given.cases + 1):
                rows += measured(workspace, number)
            name = workspace.model.name
    except NotesError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    if given.write:
        with given.write.open("w", encoding="utf-8", newline="") as out:
            writer = csv.DictWriter(out, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    print(f"{name}: {given.cases} sessions of {ROUNDS} rounds, {GONE} forgotten, {ROUNDS - GONE} questions each\n")
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
