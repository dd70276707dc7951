"""Compare decisions by a spliced image and by an image encoded again, on held-out pictures and questions.

    python -m bench.images [--questions N] [--out FILE]

Every question is asked twice: with its image compiled and spliced, and with all of it decoded, the image looked at
again. It is the same decision where both greedy answers are the same text; beside it, how far the logits of the first
token of the answer are from those of decoding. The image is moved by text, by much text, by other images, and corrected
afterwards; controls must be visibly worse, where something has moved: alone, nothing has. Then how long it takes to the
first token. The pictures are those that the tiny vision model has not been trained with (training/eye/pictures.py).
"""

from __future__ import annotations

import argparse
import io
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

from bench.battery import interval
from bench.marked import grid
from notes_cli.config import Paths, shipped_model
from notes_cli.engine.context import Context
from notes_cli.engine.limits import ContextOptions
from notes_cli.engine.sampler import Sampler, SamplerOptions
from notes_cli.engine.segment import LayerRows, Segment
from notes_cli.images import read_picture
from notes_cli.runtime.assemble import assemble
from notes_cli.runtime.compile import compile_skill
from notes_cli.runtime.prompt import Prompt
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.erratum import known_fields, read_errata
from notes_cli.text.skill import image_skill
from training.eye import pictures

MODEL, PROJECTOR = (shipped_model().with_name(f"notes-eye-{name}.gguf") for name in ("q8_0", "mmproj-f16"))
WAYS = ("alone", "text", "far", "images", "erratum")
SENTENCES = {"text": (2, 6), "far": (30, 50), "erratum": (2, 6)}  # how many, before the image
ALIKE = ("spliced", "time axis alone", "not rotated", "another image's rows")


@dataclass(frozen=True)
class Case:
    """A question about one of some pictures, or about the one that is corrected."""

    shown: tuple[pictures.Picture, ...]
    files: tuple[bytes, ...]
    question: str
    answer: str
    system: str = ""
    erratum: str = ""


def _file(picture: pictures.Picture, rng: random.Random) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pictures.draw(picture, rng)).save(buffer, "PNG")
    return buffer.getvalue()


def cases(way: str, count: int, seed: int) -> list[Case]:
    """Yield held-out pictures with questions: alone, after text, after much text, after or before other images,
    corrected."""
    rng = random.Random(f"{way} {seed}")
    found = []
    for _ in range(count):
        several = rng.choice((2, 3)) if way == "images" else 1
        shown = [pictures.make(rng, rng.choice(("picture", "receipt")), True) for _ in range(several)]
        if way == "erratum":
            shown = [pictures.make(rng, "receipt", True)]
        which = rng.randrange(several)
        asked = rng.choice(pictures.questions(shown[which], pictures.labels(shown)[which]))
        erratum, answer = "", asked.answer
        if way == "erratum":
            erratum, answers = pictures.erratum(rng, shown, 0)
            answer = next((new for begin, new in answers.items() if asked.question.startswith(begin)), answer)
        system = " ".join(rng.choice(pictures.FILLERS) for _ in range(rng.randint(*SENTENCES.get(way, (0, 0)))))
        files = tuple(_file(one, rng) for one in shown)
        found.append(Case(tuple(shown), files, asked.question, answer, system, erratum))
    return found


@dataclass(frozen=True)
class Answer:
    """An answer, and the logits of its first token, (vocabulary,), less their mean."""

    answer: str
    logits: NDArray[np.float64]

    def distance(self, other: Answer) -> float:
        """One minus the cosine of both logits."""
        lengths = np.linalg.norm(self.logits) * np.linalg.norm(other.logits)
        return float(1 - self.logits @ other.logits / lengths)


def compiled(workspace: Workspace, data: bytes, name: str) -> Segment:
    return compile_skill(workspace, image_skill(read_picture(data, name), name))


def prompt_of(case: Case, segments: Sequence[Segment]) -> Prompt:
    errata = read_errata([case.erratum] if case.erratum else [], known_fields(*segments))
    return Prompt(case.question, segments, errata, case.system or None)


def ask(workspace: Workspace, case: Case, segments: Sequence[Segment], **how: bool) -> Answer:
    """`how`: without `splice`, or without `rotate`."""
    with (
        assemble(workspace, prompt_of(case, segments), seam=1, room=8, **how) as sequence,
        Sampler(SamplerOptions(temperature=0.0)) as sampler,
    ):
        logits = sequence.logits().astype(np.float64)
        return Answer(workspace.model.text(list(sequence.generate(sampler, 6))), logits - logits.mean())


def time_alone(context: Context, segment: Segment, moved: int) -> Segment:
    """The segment as if only the time axis were rotated when it moves so far: the control for rows and columns."""
    sections = (4, 6, 6)
    axis = np.repeat([0, 1, 2], sections)
    layers = []
    for index, rows in enumerate(segment.layers):
        turn = context.frequencies(index) * moved * (axis[: len(context.frequencies(index))] > 0)
        k = rows.k.astype(np.float64).reshape(len(rows.k), -1, 2, len(turn))
        cos, sin = np.cos(-turn), np.sin(-turn)
        a, b = k[:, :, 0], k[:, :, 1]
        back = np.stack([a * cos - b * sin, b * cos + a * sin], 2).reshape(rows.k.shape)
        layers.append(LayerRows(rows.layer, back.astype(np.float16), rows.v, rows.part))
    return replace(segment, layers=tuple(layers))


def measure(workspace: Workspace, way: str, count: int, seed: int) -> dict[str, float | int]:
    """How often each way of asking decides as decoding everything does, how far its logits are from those (the
    median), and how often that is right."""
    answers: dict[str, list[Answer]] = {}
    right = {"decoded": 0, "spliced": 0}
    context = workspace.context
    unlike = {kind: pictures.make(random.Random(99), kind, True) for kind in pictures.SIZES}
    others = {kind: compiled(workspace, _file(one, random.Random(1)), kind) for kind, one in unlike.items()}
    for case in cases(way, count, seed):
        segments = [compiled(workspace, data, f"image-{index}") for index, data in enumerate(case.files)]
        with assemble(workspace, prompt_of(case, segments), seam=1, dry=True) as plan:
            moved = {piece.name: piece.moved for piece in plan.pieces if piece.how == "spliced"}
        turned = [time_alone(context, one, moved[one.name]) for one in segments]
        pairs = zip(segments, case.shown, strict=True)
        swapped = [replace(others[picture.kind], name=one.name) for one, picture in pairs]
        found = {
            "decoded": ask(workspace, case, segments, splice=False),
            "spliced": ask(workspace, case, segments),
            "not rotated": ask(workspace, case, segments, rotate=False),
            "time axis alone": ask(workspace, case, turned),
            "another image's rows": ask(workspace, case, swapped),
        }
        for name, one in found.items():
            answers.setdefault(name, []).append(one)
        for name in right:
            right[name] += found[name].answer.strip() == case.answer
    compared = {name: list(zip(answers[name], answers["decoded"], strict=True)) for name in ALIKE}
    return {
        "questions": count,
        **{f"same, {name}": sum(a.answer == b.answer for a, b in some) for name, some in compared.items()},
        **{f"distance, {name}": float(np.median([a.distance(b) for a, b in some])) for name, some in compared.items()},
        **{f"right, {name}": number for name, number in right.items()},
    }


def timed(workspace: Workspace, repeats: int) -> dict[str, float]:
    """Seconds to the first token, the median: with a compiled image, and with one that is looked at."""
    (case,) = cases("text", 1, 5)
    segments = [compiled(workspace, case.files[0], "image")]
    taken: dict[str, list[float]] = {"spliced": [], "looked at": []}
    for _ in range(repeats):
        for name, splice in (("spliced", True), ("looked at", False)):
            started = time.perf_counter()
            with assemble(workspace, prompt_of(case, segments), splice=splice, seam=1) as sequence:
                sequence.logits()
            taken[name].append(time.perf_counter() - started)
    return {name: median(found) for name, found in taken.items()}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.images", description=__doc__.split("\n")[0])
    parser.add_argument("--questions", type=int, default=200, help="of each kind (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="write the numbers here, as JSON")
    given = parser.parse_args()
    with TemporaryDirectory() as folder:
        paths, options = Paths.under(Path(folder)), ContextOptions(n_ctx=2048, n_threads=1)
        with Workspace(MODEL, options, paths=paths, projector=PROJECTOR) as workspace:
            found = {way: measure(workspace, way, given.questions, 1) for way in WAYS}
            seconds = timed(workspace, 200)
    columns = [*(f"same, {name}" for name in ALIKE), "right, decoded", "right, spliced"]
    shares = [[f"{one[name] / given.questions:.3f}" for name in columns] for one in found.values()]
    distances = [[f"{one['distance, ' + name]:.1e}" for name in ALIKE] for one in found.values()]
    heads = (f"{given.questions} questions each", *columns), ("distance of the logits, median", *ALIKE)
    for head, cells in zip(heads, (shares, distances), strict=True):
        print(grid(" | ".join(head), [" | ".join((way, *row)) for way, row in zip(found, cells, strict=True)]), "\n")
    for name in ALIKE:
        same, asked = sum(int(one[f"same, {name}"]) for one in found.values()), len(found) * given.questions
        low, high = interval(same, asked)
        print(f"{name} decides as decoded: {same} of {asked}, {low:.3f} to {high:.3f}")
    print(f"first token: {1000 * seconds['spliced']:.2f} ms spliced, {1000 * seconds['looked at']:.2f} ms looked at")
    if given.out:
        given.out.write_text(json.dumps({"decisions": found, "seconds": seconds}, indent=1) + "\n")


if __name__ == "__main__":
    main()
