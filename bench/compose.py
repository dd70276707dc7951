"""Measure whether skills compiled apart answer questions that need two of them, as `notes calibrate` does.

    python -m bench.compose [--model FILE | --random] [--pairs N] [--seed S] [--think]

Prints a table in Markdown and the verdict (docs/composing.md has those of the model that ships and of others).
`--random`: a tiny model with random weights, which can answer nothing.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from notes_cli import config
from notes_cli.engine.options import ContextOptions
from notes_cli.measure.battery import PAIRS, SEED, pairs
from notes_cli.measure.composition import measure_pairs
from notes_cli.measure.significance import interval
from notes_cli.runtime.workspace import Workspace

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
import tiny  # type: ignore[import-not-found]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.compose", description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, help="GGUF to measure (default: the one that ships)")
    parser.add_argument("--pairs", type=int, default=PAIRS, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=SEED, help="of the texts (default: %(default)s)")
    parser.add_argument("--random", action="store_true", help="a tiny model with random weights instead")
    parser.add_argument("--think", action="store_true", help="decide after a chain of thought")
    given = parser.parse_args()
    with TemporaryDirectory() as folder:
        model = given.model or config.shipped_model()
        if given.random:
            model = tiny.write_model(Path(folder) / "random.gguf", "llama")
        with Workspace(model, ContextOptions(n_ctx=2048, n_threads=1)) as workspace:
            found, measured = measure_pairs(workspace, pairs(given.pairs, given.seed), think=given.think)
            about = f"{workspace.model.name} {workspace.model.quantization}"
    how = "after a chain of thought" if given.think else "directly"
    print(f"{about}, {given.pairs} pairs, seed {given.seed}, {how}\n")
    if found is None:
        print("The rows of this model cannot be moved: of several skills only the first is reused.")
        return
    print("| way | decoded | one skill needed: right | as read together | two needed: right | as read together |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for way in dict.fromkeys(one.name for one in measured):
        rows = {one.way: one for one in measured if one.name == way}
        cells = [way, f"{rows['two'].decoded:.0f}"]
        for needs in ("one", "two"):
            one = rows.get(needs)
            low, high = interval(one.right, one.cases) if one else (0, 0)
            cells += [f"{one.right} of {one.cases} ({low:.2f} to {high:.2f})", str(one.same)] if one else ["", ""]
        print(f"| {' | '.join(cells)} |")
    print(f"\n{found.verdict}: {found.why}")


if __name__ == "__main__":
    main()
