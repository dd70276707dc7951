"""The table of docs/models.md: what `notes calibrate` finds of the models that nobody has to download.

    python -m bench.models

They are the one that ships, the reversed model, and random weights in the shape of the first. The counts are kept in
docs/results/models.json, too.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.experiments.calibration import profile_of
from bench.experiments.keeping import ROOT
from bench.marked import put_between
from bench.protocol.measures.weights import write_random
from bench.reversed_model import REVERSED, REVERSED_NAME
from notes_cli.config import shipped_model
from notes_cli.engine.options import ContextOptions
from notes_cli.library.profiles import Profile
from notes_cli.measure.finding import ROW, finding, grid, row
from notes_cli.runtime.workspace import Workspace

PAGE = ROOT / "docs" / "models.md"
KEPT = ROOT / "docs" / "results" / "models.json"
BEGIN, END = "<!-- written by python -m bench.models -->\n", "<!-- end -->\n"
SEED = 1


def main() -> int:
    with TemporaryDirectory() as folder:
        random = write_random(shipped_model(), Path(folder, "random.gguf"), SEED)
        models = {"notes-tiny": shipped_model(), REVERSED_NAME: REVERSED, "random weights": random}
        profiles = [_measured(path, name) for name, path in models.items()]
    put_between(PAGE, BEGIN, END, f"{grid(ROW, [row(one) for one in profiles])}\n")
    KEPT.write_text(json.dumps([_kept(one) for one in profiles], indent=1) + "\n", encoding="utf-8")
    return 0


def _kept(profile: Profile) -> dict[str, Any]:
    """What was counted, without times: they are those of a machine that does other things, too."""
    found = finding(profile)
    return {
        "model": profile.identity.model,
        "weights": profile.identity.weights,
        "cache": profile.cache,
        "uses": profile.methods,
        "finding": found.kind if found else "",
        "measured": [{name: value for name, value in asdict(one).items() if name != "ms"} for one in profile.measured],
    }


def _measured(path: Path, name: str) -> Profile:
    """The profile of one of them, by the name that it has here."""
    sys.stderr.write(f"{name}\n")
    with Workspace(path, ContextOptions(n_ctx=4096, n_threads=1)) as workspace:
        found = profile_of(workspace)
    return replace(found, identity=replace(found.identity, model=name))


if __name__ == "__main__":
    sys.exit(main())
