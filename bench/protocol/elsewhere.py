"""What other benches have stored of rows of the paper's table, read when the page is written, never typed in.

Where cases are stored and no spread is, the spread is computed here; where neither is, that is said.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.experiments.intervals import RESAMPLES, Part, ratio
from bench.experiments.table import Table
from notes_cli.engine.architectures import ARCHITECTURES
from notes_cli.measure.proof import interval
from training.ablations.subjects import SIZES

UNKNOWN = "no spread stored"


@dataclass(frozen=True)
class Told:
    """A figure. `of`: what it is of; `low` and `high`: where it is likely to be, as its source says. What is in words
    says all of that itself."""

    what: str
    value: float | str
    of: str = ""
    low: float | None = None
    high: float | None = None
    bound: bool = False  # it is that at least

    def __str__(self) -> str:
        if isinstance(self.value, str):
            return f"{self.what}: {self.value}"
        between = UNKNOWN if self.low is None or self.high is None else f"{_short(self.low)} to {_short(self.high)}"
        least, between = ("at least ", "some were cut off") if self.bound else ("", between)
        return f"{self.what}: {least}{_short(self.value)} ({between}), {self.of}"


@dataclass(frozen=True)
class Source:
    """What one command has measured of one subject, the file under docs/ that has it, and the page that tells more.
    `spread`: what brackets are."""

    by: str
    file: str
    page: str
    subject: str
    read: Callable[[Path], Iterator[Told]]
    spread: str = ""

    def figures(self, docs: Path) -> list[Told] | None:
        """None where nothing is stored."""
        path = docs / self.file
        return list(self.read(path)) if path.is_file() else None


def _short(value: float) -> str:
    """Three digits that count, of a share three after the point."""
    return f"{value:.3f}" if 0.001 <= abs(value) <= 1 or not value else f"{value:.3g}"


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _counted(what: str, count: int, of: int, unit: str) -> Told:
    return Told(what, count / of, f"{of} {unit}", *interval(count, of))


# bench/race

WORKS = {"alone": "at the start of the prompt", "moved": "after another system text"}


def _sooner(cells: Sequence[str], path: Path) -> Iterator[Told]:
    """How many times longer the first token takes if the same program decodes all of a skill."""
    found = _json(path)
    for cell in cells:
        work, _, size = cell.partition("/")[2].partition("-")
        ours, full = (_firsts(found, f"{cell}/{peer}") for peer in ("notes", "notes-recompute"))
        times, least, most = median(full) / median(ours), min(full) / max(ours), max(full) / min(ours)
        what = f"{size} tokens {WORKS[work]}: all decoded, times ours"
        yield Told(what, times, f"{len(ours)} and {len(full)} runs", least, most)


def _conversation(model: str, path: Path) -> Iterator[Told]:
    """How many times longer than in a session all first tokens of a conversation take, whose field changes by turns."""
    found = _json(path)
    ours = _firsts(found, f"{model}/turns-1k/notes-session")
    for peer, what in (("completion", "`llama-completion`, all decoded"), ("server", "llama-server, running")):
        theirs = _firsts(found, f"{model}/turns-1k/{peer}")
        rows = [{"case": turn, "a": a, "b": b} for turn, (a, b) in enumerate(zip(theirs, ours, strict=True))]
        times = ratio(Part(Table(rows), "a"), Part(Table(rows), "b"))
        yield Told(f"first tokens of {what}, times ours", times.value, f"{len(ours)} turns", times.low, times.high)


def _firsts(found: Any, cell: str) -> list[float]:
    return [float(run["first"]) for run in found[cell]["runs"]]


# bench/models.py


def _calibrated(model: str, path: Path) -> Iterator[Told]:
    """How often each method decides as a recompute of the corrected text."""
    (found,) = (one for one in _json(path) if one["model"] == model)
    for name in ("stale", "field", "erratum", "field+erratum", "suffix"):
        for one in found["measured"]:
            if (one["what"], one["name"]) == ("method", name):
                yield _counted(f"`{name}`, {one['way']}: as recomputed", one["same"], one["cases"], "decisions")
    uses = " / ".join(dict.fromkeys(found["uses"].values()))
    yield Told("finding", f"{found['finding']}; `notes` uses {uses}")


# bench/ablations.py


def _sized(name: str, path: Path) -> Iterator[Told]:
    """How often the field's rows alone decide, and of how many policies the model is right at all."""
    seeds = _json(path).get(name, {})
    if not seeds:
        yield Told("not measured", "no rows of it are stored")
    for seed, one in seeds.items():
        of = "" if len(seeds) == 1 else f", training seed {seed}"
        for check in one["verdict"]["checks"]:
            if (what := check["what"]) in SIZED:
                yield Told(f"{SIZED[what]}{of}", check["value"], f"{check['n']} policies", check["low"], check["high"])


SIZED = {
    "after a chain of thought: field's rows fresh": "after a chain of thought",
    "field's rows fresh": "without one",
    "right, reasoned": "right at all, after a chain of thought",
}


# bench/zoo.py, whose page is written by it alone. What an architecture is, is what llama.cpp's graphs make of it.


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


MLA = _names("deepseek2 deepseek32 dots3note glm-dsa hy_v4 minicpm3 mistral4")
M_ROPE = _names("paddleocr qwen2vl qwen3tts qwen3vl qwen3vlmoe")
WINDOWS = _names(
    "afmoe cohere2 cohere2moe exaone-moe exaone4 gemma2 gemma3 gemma3n gemma4 gpt-oss granite_swa laguna llama4 maple "
    "mellum mimo2 muse-glimmer olmo2 phi3 plamo3 smallthinker spark2_5 step35"
)
RECURRENT = _names("arwkv7 mamba mamba2 rwkv6 rwkv6qwen2 rwkv7")  # no layer of attention
HYBRIDS = tuple(
    name for name, skills in ARCHITECTURES.items() if "recurrent layers" in skills.why and name not in RECURRENT
)
_OF_A_KIND = {name: kind for kind in (MLA, M_ROPE, WINDOWS, RECURRENT, HYBRIDS) for name in kind}


def experts(model: str) -> bool:
    """Whether it is a mixture of experts with ordinary attention: the others are in rows of their own."""
    return model.endswith("-moe") and model.rpartition("-")[0] not in _OF_A_KIND


def ordinary(model: str) -> bool:
    return model.endswith("-dense") and model.rpartition("-")[0] not in _OF_A_KIND


def _kinds(names: Sequence[str]) -> Callable[[str], bool]:
    return lambda model: model.rpartition("-")[0] in names


def _zoo(which: Callable[[str], bool], operations: Sequence[str], path: Path) -> Iterator[Told]:
    """How many models do exactly what decoding does, in all contexts with an f16 cache, and the largest error."""
    head, *rows = _table(path, "## Models")
    cells = [dict(zip(head, row, strict=True)) for row in rows if which(row[0])]
    for operation in operations:
        words = Counter(row["state" if operation == "carried" else operation] for row in cells)
        told = f"{words['exact'] + words['exact*']} of {len(cells)} models"
        told += f", {words['exact*']} of them by the amplification rule" if words["exact*"] else ""
        told += "".join(f", {count} {word}" for word, count in words.items() if not word.startswith("exact"))
        yield Told(f"{operation}, exact", told)
    ruled = {True: "", False: " but for the amplification rule"}
    for every, name in ruled.items():
        errors = [float(row["logits"]) for row in cells if row["logits"] and (every or "exact*" not in row.values())]
        if every or len(errors) < sum(bool(row["logits"]) for row in cells):
            yield Told(f"largest squared error of logits, normalised{name}", max(errors), f"{len(errors)} models")


def _unrotated(path: Path) -> Iterator[Told]:
    """The control: comparisons that call rows wrong which were not rotated."""
    _, *rows = _table(path, "## Controls")
    found = [row for row in rows if row[0] == "no rotation"]
    caught, blind, missed = (sum(int(row[at].partition(":")[0]) for row in found) for at in (2, 3, 4))
    told = f"{caught} of {caught + blind + missed} comparisons, of models of all kinds"
    yield Told("not rotated (control), called wrong", told)


def _both(*readers: Callable[[Path], Iterator[Told]]) -> Callable[[Path], Iterator[Told]]:
    return lambda path: (told for read in readers for told in read(path))


def _table(path: Path, heading: str) -> list[list[str]]:
    """The cells of the first table after a heading of a page that a program has written, the head first."""
    _, _, rest = path.read_text(encoding="utf-8").partition(f"{heading}\n")
    lines = rest[rest.index("\n|") + 1 :].partition("\n\n")[0].splitlines()
    cells = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines if line.startswith("|")]
    return [cells[0], *cells[2:]]


def _windows(path: Path) -> Iterator[Told]:
    """bench/windows.py: scripts in which anything differs from a forward pass in float64."""
    found = dict(row[:2] for row in _table(path, "## Sliding windows"))
    scripts = int(found["scripts"].partition(":")[0].replace(",", ""))
    differ = int(found["scripts with a difference"].replace(",", ""))
    yield _counted("scripts with a difference", differ, scripts, "scripts")


# bench/images.py, bench/carried.py

PLACES = {
    "alone": "alone",
    "text": "after a text",
    "far": "after much text",
    "skill": "after a skill",
    "images": "among other images",
    "erratum": "with an erratum",
}


def _images(path: Path) -> Iterator[Told]:
    """Decisions as those of looking again."""
    for way, one in _json(path)["decisions"].items():
        yield _counted(f"{PLACES[way]}, spliced: as looked at", one["same, spliced"], one["questions"], "questions")
    far = _json(path)["decisions"]["far"]
    for control in ("time axis alone", "not rotated"):
        what = f"{PLACES['far']}, {control} (control): as looked at"
        yield _counted(what, far[f"same, {control}"], far["questions"], "questions")


def _carried(situations: Sequence[str], path: Path) -> Iterator[Told]:
    """Decisions as those of decoding all, and with the skill left out, the control."""
    for situation in situations:
        for way in ("carried", "left out"):
            one = _json(path)[situation]["all"][way]
            yield _counted(f"{PLACES[situation]}, {way}: as decoded", one["same"], one["questions"], "questions")


# bench/serving


def _served(model: str, path: Path) -> Iterator[Told]:
    """Ours, where a field of the policy is corrected by an erratum, beside llama-server, where its text is edited."""
    found = {(one["system"], one["rate"]): one for one in _json(path) if one["model"] == model}
    for system, what in (("ours", "prompt reused, ours"), ("edited", "prompt reused, llama-server")):
        one = found[system, None]
        yield Told(f"{what}, all at once", one["reused"], f"{one['sent']} requests")
    ours, theirs = (found[system, None] for system in ("ours", "edited"))
    answers = f"{ours['answered']} and {theirs['answered']} answers"
    if theirs["answers"]:
        yield Told("answers a second, all at once, times llama-server's", ours["answers"] / theirs["answers"], answers)
    else:
        yield Told("answers a second, all at once", f"{ours['answers']:.3g} against none in time; {answers}")
    for rate in (2, 4, 8, 16, None):
        ours, theirs = (found[system, rate] for system in ("ours", "edited"))
        when = "all at once" if rate is None else f"load {rate}"
        times = theirs["p90"]["seconds"] / ours["p90"]["seconds"]
        low, high = _p90s(ours["first_tokens"], theirs["first_tokens"])
        of = f"{ours['sent']} and {theirs['sent']} requests"
        what, bound = f"p90 of llama-server's first token, times ours, {when}", theirs["p90"]["at_least"]
        yield Told(what, times, of, low, high, bound)


def _p90s(ours: Sequence[str], theirs: Sequence[str]) -> tuple[float, float]:
    """The interval of the ratio of two p90s, requests resampled. Of what was cut off it is of what is known."""
    rng = np.random.default_rng(0)

    def drawn(waits: Sequence[str]) -> NDArray[np.float64]:
        seconds = np.array([float(wait.lstrip(">")) for wait in waits])
        at = math.ceil(0.9 * len(seconds)) - 1  # as bench/serving/figures.py has it
        return np.asarray(np.sort(rng.choice(seconds, (RESAMPLES, len(seconds))))[:, at])

    low, high = np.percentile(drawn(theirs) / drawn(ours), (2.5, 97.5))
    return float(low), float(high)


_RUNS = "the least and the most that its runs allow"
_EXACT = "exact 95% intervals"
_POLICIES = "95% intervals, policies resampled"
_TURNS = "95% intervals, turns resampled"
_REQUESTS = (
    "95% intervals, requests of one run resampled; a load of 10 is what llama-server answers a second if nothing is "
    "edited"
)
_QWEN3 = "random weights in the shape of Qwen3-0.6B"
_SHIPPED = "the model that ships"
_HYBRID = "the small hybrid (one layer of attention, three that are recurrent)"
_RACE = ("make race", "results/race.json", "race.md")


def _zoo_of(kind: str, which: Callable[[Path], Iterator[Told]]) -> Source:
    subject = f"tiny random models of llama.cpp's zoo: {kind}"
    return Source("make zoo", "architectures.md", "architectures.md", subject, which)


_MOVED, _STATE = ("splice", "restore", "rewrite"), ("splice", "restore", "carried")
SOURCES = {
    "first token": (
        Source(*_RACE, _QWEN3, partial(_sooner, ("random/moved-1k", "random/moved-4k")), _RUNS),
        Source(
            *(*_RACE, f"{_QWEN3}, 4 of its 28 layers"),
            partial(_sooner, ("shallow/moved-16k", "shallow/alone-16k", "shallow/alone-32k")),
            _RUNS,
        ),
        Source(*_RACE, _SHIPPED, partial(_sooner, ("shipped/moved-1k",)), _RUNS),
    ),
    "agent": (
        Source(*_RACE, _QWEN3, partial(_conversation, "random"), _TURNS),
        Source(*_RACE, _SHIPPED, partial(_conversation, "shipped"), _TURNS),
    ),
    "methods": tuple(
        Source("make models", "results/models.json", "models.md", subject, partial(_calibrated, name), _EXACT)
        for name, subject in (
            ("notes-tiny", _SHIPPED),
            ("notes-reversed", "the reversed model"),
            ("random weights", "random weights in the shape of the model that ships"),
        )
    ),
    "scale": tuple(
        Source(
            *("python -m bench.ablations", "results/ablations.json", "results-ablations.md"),
            *(f"a small reader of tables, {subject.what}", partial(_sized, name), _POLICIES),
        )
        for name, subject in SIZES.items()
    ),
    "ordinary": (
        _zoo_of("ordinary attention, dense", _both(partial(_zoo, ordinary, _MOVED), _unrotated)),
        _zoo_of("ordinary attention, mixtures of experts", partial(_zoo, experts, _MOVED)),
    ),
    "mla": (_zoo_of("MLA", partial(_zoo, _kinds(MLA), _MOVED)),),
    "images": (
        Source(
            *("make images", "results/images.json", "images.md", "notes-eye, the small model that sees"),
            _images,
            _EXACT,
        ),
        _zoo_of("M-RoPE, on texts", partial(_zoo, _kinds(M_ROPE), _MOVED)),
    ),
    "windows": (
        _zoo_of("sliding or chunked windows", partial(_zoo, _kinds(WINDOWS), _MOVED)),
        Source(
            *("python -m bench.windows", "reliability.md", "reliability.md"),
            "random models with and without a window",
            _windows,
            _EXACT,
        ),
        _zoo_of("hybrids", partial(_zoo, _kinds(HYBRIDS), _STATE)),
        Source(
            *("python -m bench.carried", "results/carried.json", "recurrent.md"),
            _HYBRID,
            partial(_carried, ("text", "skill", "erratum")),
            _EXACT,
        ),
    ),
    "recurrent": (
        _zoo_of("no layer of attention", partial(_zoo, _kinds(RECURRENT), _STATE)),
        Source(
            *("python -m bench.carried", "results/carried.json", "recurrent.md"),
            f"{_HYBRID}: no model without attention was trained",
            partial(_carried, ("erratum",)),
            _EXACT,
        ),
    ),
    "serving": tuple(
        Source("make serving", "results/serving.json", "serving.md", subject, partial(_served, name), _REQUESTS)
        for name, subject in (("shipped", "the reversed model"), ("random", _QWEN3))
    ),
}
