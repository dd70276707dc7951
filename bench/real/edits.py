"""Measure the method `auto`, and fields that are corrected twice in a session, with SmolLM2 or any GGUF.

    python -m bench.real.edits auto [--model model.gguf] [--edits 200]   # 20 minutes on two quiet cores
    python -m bench.real.edits again [--edits 60]                        # A, then B, then A again: 10 minutes
    python -m bench.real.edits distances [--edits 37]                    # fields far from the end: 30 minutes

`auto`: each correction of tasks.yaml with its questions, alone and after a system text. Counted is what it chooses,
whether the answer that it gives leaves that of field+erratum by more than the margin, and the tokens that it decodes.

`distances`: the fields of each skill listed at the beginning of a text or after 2,000 tokens, with 500 or 4,000 after
them; around them is the prose of the skills. One correction of each field, and the question about its value.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice, product
from pathlib import Path

import numpy as np

import notes_cli as notes
from bench.real.measure import SYSTEM, marks, questions_of
from bench.real.run import ANSWER, answers
from bench.real.tasks import ROOT, SKILLS, Correction, Tasks, contains, load_tasks
from bench.results import Result, Results
from notes_cli.config import Paths
from notes_cli.editing.methods import AUTO, FIELD, FIELD_ERRATUM, Method
from notes_cli.engine.segment import Segment
from notes_cli.engine.sequence import KVSequence, run
from notes_cli.runtime.answering import MARGIN, TOKENS, Probabilities, choose_per_edit, prepare
from notes_cli.runtime.assemble import assemble_task
from notes_cli.runtime.compile import compile_skill
from notes_cli.runtime.generate import log_softmax
from notes_cli.runtime.prompt import Prompt
from notes_cli.runtime.request import Request
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.skill import load_skill, parse_skill

WHERE = {  # tokens of prose before and after the fields
    f"{place}, {distance:,} before the end": (before, distance)
    for place, before in (("early", 0), ("late", 2000))
    for distance in (500, 4000)
}
DISTANT = ("nothing", "erratum", "field+erratum")
FIELD_LINE = re.compile(r"- [^.:]+: ")


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the method auto, and repeated corrections.")
    parser.add_argument("part", choices=["auto", "again", "distances"])
    parser.add_argument("--model", default="smollm2", help="a GGUF file, or a name that `notes models` lists")
    parser.add_argument("--edits", type=int, help="at most so many")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as home, notes.open(given.model, paths=Paths.under(Path(home))) as model:
        found = {"auto": auto, "again": again, "distances": distances}[given.part](model, given.edits)
        print(json.dumps(found, indent=1))


def _corrections(model: notes.Model) -> Iterator[tuple[Segment, Correction]]:
    tasks = load_tasks()
    segments = [model.compile(SKILLS / one.skill) for one in tasks]
    for corrections in zip(*(one.corrections for one in tasks), strict=True):
        yield from zip(segments, corrections, strict=True)


def auto(model: notes.Model, edits: int | None) -> dict[str, float]:
    """Compare the method `auto` with field+erratum, over questions about corrected texts."""
    cases = (
        Request(ask, [segment], errata=[f"{correction.field}={correction.value}"], system=system)
        for system in (None, SYSTEM)
        for segment, correction in _corrections(model)
        for ask in questions_of(correction)
    )
    counted: Counter[str] = Counter()
    for request in islice(cases, edits or 200):
        chosen, tokens, tried = _answered(model, request, AUTO)
        counted.update(asked=1, tried=tried)
        if chosen != str(FIELD):  # its answer is that of field+erratum
            continue
        counted["field"] += 1
        _, reference, _ = _answered(model, request, FIELD_ERRATUM)
        pairs = zip(tokens, reference, strict=False)
        place = next((at for at, (one, other) in enumerate(pairs) if one[0] != other[0]), None)
        if place is not None:
            likely = reference[place][1]
            gap = float(likely.max() - likely[tokens[place][0]])
            counted["other_text" if place < TOKENS else "other_text_later"] += 1
            counted["beyond_margin"] += place < TOKENS and gap > MARGIN
        print(counted, flush=True, file=sys.stderr)
    return {**counted, "tried_each": counted["tried"] / counted["asked"]}


def _answered(
    model: notes.Model, request: Request, method: notes.Method
) -> tuple[str, list[tuple[int, Probabilities]], int]:
    """Return the method used, the greedy answer with the probabilities at each token, and the tokens decoded to
    choose."""
    options = {field: getattr(request, field) for field in ("splice", "errata", "system")}
    question = prepare(model.workspace, Request(request.question, method=method, **options))
    model.workspace.make_room(question.tokens, ANSWER)
    task = assemble_task(model.workspace, question.prompt, question.parts, **question.draft.how)
    sequence, draft = run(task), question.draft
    if method == AUTO and draft.settings.method == FIELD_ERRATUM:
        sequence, draft = choose_per_edit(model.workspace, draft, sequence)
    with sequence:
        return str(draft.settings.method), [*_greedy(sequence)], draft.settings.tried


def _greedy(sequence: KVSequence) -> Iterator[tuple[int, Probabilities]]:
    for _ in range(ANSWER):
        likely = np.exp(log_softmax(sequence.logits()))
        token = int(likely.argmax())
        yield token, likely
        if token in sequence.context.model.end_tokens:
            return
        sequence.append([token], "answer")


def again(model: notes.Model, edits: int | None) -> dict[str, int]:
    """Correct a field in a session, then back to its first value, and ask for it each time."""
    counted: Counter[str] = Counter()
    for number, (segment, correction) in enumerate(islice(_corrections(model), edits or 60)):
        first = next(span.value for span in segment.fields if span.name == correction.field)
        with model.session(f"s{number}") as session:
            how = {"max_tokens": ANSWER, "temperature": 0.0}
            answers = [str(session.ask(correction.ask, splice=[segment], **how))]
            for value in (correction.value, first):
                answers.append(str(session.ask(correction.ask, errata=[f"{correction.field}={value}"], **how)))
        model.sessions.remove(f"s{number}")
        right = [
            contains(answer, now) and not contains(answer, other)
            for answer, now, other in zip(
                answers,
                (correction.old, correction.new, correction.old),
                (correction.new, correction.old, correction.new),
                strict=True,
            )
        ]
        counted.update(asked=1, first=right[0], corrected=right[1], again=right[2])
        counted.update(again_of_first=right[0] and right[2])
        print(number, correction.field, [answer[:70] for answer in answers], right, flush=True)
    return dict(counted)


def distances(model: notes.Model, edits: int | None) -> dict[str, dict[str, int]]:
    """Correct fields at two places and distances from the end of a text by each method of DISTANT, and ask for them."""
    workspace, tasks = model.workspace, load_tasks()
    path = ROOT / "build" / "real" / f"distances-{model.name.replace(' ', '-')}.jsonl"
    results = Results(path, model.name, workspace.weights)
    counted: dict[str, Counter[str]] = {}
    for where, number in product(WHERE, range(len(tasks))):
        before, after = WHERE[where]
        skill = parse_skill(_listed(model, tasks, number, before, after), source="", default="listed")
        segment: Segment | None = None
        for correction in islice({one.field: one for one in tasks[number].corrections}.values(), edits):
            key = f"{where}/{tasks[number].skill}/{correction.field}"
            if key not in results.found:
                segment = segment or compile_skill(workspace, skill)
                results.add(key, _distant(workspace, segment, correction))
            for method, (new, old) in results.found[key].items():
                counted.setdefault(f"{where}, {method}", Counter(asked=0)).update(asked=1, new=new, old=old)
        print(f"{time.strftime('%H:%M:%S')} {where} {tasks[number].skill}", file=sys.stderr, flush=True)
    return {name: dict(one) for name, one in counted.items()}


def _listed(model: notes.Model, tasks: Sequence[Tasks], number: int, before: int, after: int) -> str:
    """The fields of a skill in a list, with about so many tokens of prose before and after it."""
    texts = [load_skill(SKILLS / one.skill).text for one in (*tasks[number:], *tasks[:number])]
    fields = [line for line in texts[0].splitlines() if FIELD_LINE.match(line)]
    paragraphs = ["\n".join(lines) for text in texts for lines in _prose(text)]
    sizes = list(accumulate(len(model.workspace.model.tokenize(f"{one}\n\n")) for one in paragraphs))
    last = next(at for at, size in enumerate(sizes, 1) if size >= after)
    first = next((at for at, size in enumerate(sizes) if sizes[-1] - size <= before), 0) if before else len(sizes)
    return "\n\n".join([*paragraphs[first:], "\n".join(fields), *paragraphs[:last]])


def _prose(text: str) -> Iterator[list[str]]:
    for paragraph in text.split("\n\n"):
        if lines := [line for line in paragraph.splitlines() if not FIELD_LINE.match(line)]:
            yield lines


def _distant(workspace: Workspace, segment: Segment, correction: Correction) -> Result:
    """Return, by method, whether the answer has the new value, and the old one."""
    found: Result = {}
    for name in DISTANT:
        values = {} if name == "nothing" else {correction.field: correction.value}
        method = Method(FIELD.name if name == "nothing" else name)
        [outcome] = answers(workspace, [Prompt(correction.ask, [segment], fields=values, method=method)])
        found[name] = marks(correction, outcome.text)
    return found


if __name__ == "__main__":
    main()
