"""Seeds that nobody could have chosen: each case is drawn from the commit that froze docs/protocol.md.

That is the one that last changed the page before the first figure. Figures that are kept name it, as a dated addition
changes the page, but must not choose other texts.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import subprocess
from pathlib import Path

PAGE = "docs/protocol.md"
FIGURES = "docs/results/protocol-seed-*.json"
ROOT = Path(__file__).resolve().parents[2]
NAME_IT = f"Name the commit that last changed {PAGE} before the first figure by --commit"


class CommitError(Exception):
    """There is no telling which commit seeds the texts; what to do is said."""


def frozen(root: Path = ROOT) -> str:
    """The full hash of the commit that last changed the protocol before the first figure. Raise CommitError where
    neither figures nor git tell."""
    for path in sorted(root.glob(FIGURES)):
        return str(json.loads(path.read_text(encoding="utf-8"))["about"]["commit"])
    try:
        found = _git(root, "log", "-1", "--format=%H", "--", PAGE)
        changed = _git(root, "status", "--porcelain", "--", PAGE)
    except (OSError, subprocess.CalledProcessError):
        raise CommitError(f"{root} is no checkout that git can read. {NAME_IT}") from None
    if not found:
        raise CommitError(f"no commit of {root} has {PAGE}. {NAME_IT}")
    if changed:
        raise CommitError(f"{PAGE} has changes that are in no commit: take them back, or commit them")
    return found


def named(commit: str) -> str:
    """A commit as it was given. Raise CommitError for what is not a full hash: a shorter one gives other texts."""
    if not re.fullmatch("[0-9a-f]{40}", commit):
        raise CommitError(f"--commit {commit}: it takes the full hash of a commit, 40 digits of 0 to 9 and a to f")
    return commit


def rng_of(commit: str, experiment: str, case: int) -> random.Random:
    """What a case of an experiment is drawn from."""
    return random.Random(hashlib.sha256(f"{commit} {experiment} {case}".encode()).hexdigest())


def _git(root: Path, *arguments: str) -> str:
    asked = ["git", "-C", str(root), *arguments]
    return subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()
