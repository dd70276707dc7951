"""Does the way in which a prompt is asked change its logits? Counts prompts of which all ways give the same bits.

    python -m bench.ways MODEL SKILL FIELD [--asked 200]

Each prompt is asked by an erratum, by a field's new value, in a batch of its own and as a session's first turn, each in
the same process. What a server does is compared in tests/serve/test_ways.py.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import notes_cli as notes
from notes_cli.engine.notebook import Notebook

QUESTIONS = ["What does it say?", "Who is asked first, and why is that so?", "What changes, and from when on?"]
SYSTEMS = [None, "Answer in one word."]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("skill", type=Path)
    parser.add_argument("field")
    parser.add_argument("--asked", type=int, default=200)
    given = parser.parse_args()
    seen: dict[tuple[int, ...], dict[str, bytes]] = {}
    way = ""
    ask = Notebook.ask

    def asked(notebook: Notebook) -> object:
        logits = ask(notebook)
        if logits is not None and notebook.count("spliced"):
            seen.setdefault(tuple(notebook.tokens.tolist()), {}).setdefault(way, logits.tobytes())
        return logits

    Notebook.ask = asked  # type: ignore[method-assign,assignment]
    with tempfile.TemporaryDirectory() as home, notes.open(given.model, paths=notes.Paths.under(Path(home))) as model:
        model.compile(given.skill, name="skill")
        for number in range(given.asked):
            value, method = f"Pine {number}", notes.Method("erratum")
            question, system = QUESTIONS[number % len(QUESTIONS)], SYSTEMS[number % len(SYSTEMS)]
            how = {"splice": ["skill"], "system": system, "max_tokens": 1}
            by_erratum = notes.Request(question, errata=[f"{given.field}={value}"], method=method, **how)  # type: ignore[arg-type]
            by_field = notes.Request(question, fields={given.field: value}, method=method, **how)  # type: ignore[arg-type]
            way = "erratum"
            model.ask(by_erratum)
            way = "field"
            model.ask(by_field)
            way = "batch"
            list(model.ask_many([by_erratum]))
            way = "session"
            with model.session(f"s{number}") as session:
                session.ask(by_field)
    every = [bits for bits in seen.values() if len(bits) == 4]  # prompts, and those with a token of the answer
    same = sum(len(set(bits.values())) == 1 for bits in every)
    print(f"{given.asked} requests: {same} of {len(every)} sets of logits are the same in all four ways")
    return int(same < len(every) or len(every) < given.asked)


if __name__ == "__main__":
    raise SystemExit(main())
