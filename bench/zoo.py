"""Every architecture that llama.cpp has, as a tiny random model: does a splice give what decoding there gives?

    python -m bench.zoo [--models build/zoo/models] [--arch REGEX] [--write docs/architectures.md]

`make zoo` writes the models first, with llama.cpp's own test-llama-archs. Tokens are compiled at position 0 and
spliced at 40; rows and logits are compared with those of decoding the same tokens at 40 with stock calls. Each model
runs in a process of its own, so a crash is a verdict, too. Exits 1 if anything is wrong or crashes.

The installed library refuses architectures that nobody has measured. To measure one, set NOTES_LIBRARY to the folder of
the library that `make zoo` builds beside the models, which refuses none. A tiny model does not exercise everything:
SmolLM3 leaves every fourth layer unrotated, and has two here. Read the graph of an architecture before you believe its
`exact`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COLUMNS = [
    f"{kv} fa {flash} {scaling}"
    for kv, flash, scaling in product(("f32", "f16"), ("off", "on"), ("plain", "yarn", "linear"))
]
# Rows of an f32 cache differ by up to this much when stock llama.cpp decodes them at two positions with flash attention
# on, whose CPU kernel works in f16 (docs/LOG.md).
BOUND = {"f32 fa off": 1e-6, "f32 fa on": 1e-5, "f16 fa off": 1e-5, "f16 fa on": 1e-5}
WRONG = 1e-3  # an error above this is no rounding; what lies between is amplified rounding, and is called noisy
TARGET, TOKENS, QUESTION = 40, 24, 4


@dataclass(frozen=True)
class Verdict:
    """exact, noisy, wrong, refused or crash, and why or by how much."""

    word: str
    why: str = ""
    logits: float = 0.0
    rows: float = 0.0
    control: float = 0.0


def measure(path: Path) -> dict[str, Verdict]:
    """Verdicts of one model, by column. Runs in the worker process."""
    import numpy as np

    from notes_cli.engine.context import Context, ContextOptions
    from notes_cli.engine.model import Model
    from notes_cli.errors import NotesError

    sys.path.append(str(ROOT / "tests" / "engine"))
    from reference import decode, nmse

    model = Model(path)
    random = np.random.default_rng(0)
    skill, question = (random.integers(0, model.n_vocab, n).astype(np.int32) for n in (TOKENS, QUESTION))

    def one(kv: str, flash: str, scaling: str) -> Verdict:
        options = ContextOptions(
            n_ctx=256, n_batch=64, n_ubatch=64, n_threads=1, type_k=kv, type_v=kv, flash_attention=flash,  # type: ignore[arg-type]
            rope_scaling=None if scaling == "plain" else scaling, rope_freq_scale=0.0 if scaling == "plain" else 0.25,
        )  # fmt: skip
        with Context(model, options) as ours, Context(model, options) as stock:
            reason = ours.supports("splice")
            if reason:
                return Verdict("refused", reason)
            decode(stock, skill, TARGET)
            wanted_rows = stock.read(0, TARGET, TOKENS, base=TARGET, dtype=kv)
            wanted = decode(stock, question, TARGET + TOKENS)
            ours.append({0: skill})
            rows = ours.read(0, 0, TOKENS, base=0, dtype=kv)

            def spliced(rotate: bool) -> float:
                ours.clear()
                ours.splice(0, TARGET, skill, rows, 0, rotate=rotate)
                ours.append({0: question})
                return nmse(ours.logits(), wanted)

            control, logits = spliced(rotate=False), spliced(rotate=True)
            found_rows = ours.read(0, TARGET, TOKENS, base=TARGET, dtype=kv)
            error = max(nmse(a.k, b.k) for a, b in zip(found_rows, wanted_rows, strict=True))
            bound, worst = BOUND[f"{kv} fa {flash}"], max(logits, error)
            word = "exact" if worst < bound else "noisy" if worst < WRONG else "wrong"
            return Verdict(word, "", logits, error, control)

    verdicts = {}
    for column in COLUMNS:
        kv, _, flash, scaling = column.split()
        try:
            verdicts[column] = one(kv, flash, scaling)
        except NotesError as error:
            verdicts[column] = Verdict("refused", str(error))
    return verdicts


def judge(path: Path) -> dict[str, Verdict]:
    """Verdicts of one model, measured in a process of its own."""
    command = [sys.executable, "-m", "bench.zoo", "--one", str(path)]
    environment = os.environ.copy()
    if "NOTES_LIBRARY" in environment:
        environment["LLAMA_CPP_LIB_PATH"] = environment["NOTES_LIBRARY"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    if done.returncode:
        return dict.fromkeys(COLUMNS, Verdict("crash", f"status {done.returncode}: {done.stderr[-200:]}"))
    return {column: Verdict(**verdict) for column, verdict in json.loads(done.stdout.splitlines()[-1]).items()}


def row(name: str, verdicts: dict[str, Verdict]) -> str:
    """One line of the table: a word for all columns if they agree, else the columns that differ."""
    words = {verdict.word for verdict in verdicts.values()}
    worst = max(verdicts.values(), key=lambda verdict: max(verdict.logits, verdict.rows))
    if words == {"refused"}:
        return f"| {name} | refused | {next(iter(verdicts.values())).why} |"
    odd = [f"{column}: {verdict.word}" for column, verdict in verdicts.items() if verdict.word != "exact"]
    word = next(word for word in ("crash", "wrong", "noisy", "exact", "refused") if word in words)
    error = f"logits {worst.logits:.0e}, rows {worst.rows:.0e}, unrotated {worst.control:.0e}"
    return f"| {name} | {word} | {error}{'; ' + ', '.join(odd) if odd else ''} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=ROOT / "build" / "zoo" / "models")
    parser.add_argument("--arch", default="", help="only models whose name matches")
    parser.add_argument("--write", type=Path, help="write the table into this Markdown file, too")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps({column: asdict(verdict) for column, verdict in measure(given.one).items()}))
        return 0

    lines, counts = [], dict.fromkeys(("exact", "noisy", "refused", "wrong", "crash"), 0)
    for path in sorted(given.models.glob("*.gguf")):
        if re.search(given.arch, path.stem):
            verdicts = judge(path)
            line = row(path.stem, verdicts)
            counts[line.split(" | ")[1]] += 1
            lines.append(line)
            print(line, flush=True)
    summary = ", ".join(f"{count} {word}" for word, count in counts.items())
    print(f"{len(lines)} models: {summary}")
    if given.write:
        text = [
            "# Architectures",
            "",
            "Written by `make zoo` (bench/zoo.py); do not edit. CPU, one thread, one stream. A model is `exact` if "
            f"all of {', '.join(COLUMNS)} are; `noisy` is rounding, amplified.",
            "",
            f"{summary}.",
            "",
            "| model | splice | error at worst, or why |",
            "| --- | --- | --- |",
            *lines,
        ]
        given.write.write_text("\n".join(text) + "\n", encoding="utf-8")
    return 1 if counts["wrong"] or counts["crash"] or not lines else 0


if __name__ == "__main__":
    sys.exit(main())
