"""The page of `notes serve` in a real browser: each job it has, done as a user does it, and pictures of it.

    python -m bench.page [--write docs/page] [--browser /usr/bin/chromium]

A server on the model that ships (SmolLM2 for the pictures), a headless Chromium driven by Playwright. Each check is a
line; the exit status is 1 if any fails.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

from bench.page.checks import CHECKS, TEXTS, Check
from bench.page.pictures import MODEL, pictures
from bench.page.user import ROOT, SMALLEST, Server, looking
from notes_cli.config import SHIPPED_TINY


def run(browser: Browser, home: Path, checks: Sequence[Check]) -> int:
    """Some checks, each with a server of its own: nothing is kept from one to the next. How many fail."""
    failed = 0
    for check in checks:
        problem = tried(browser, home, check)
        print(f"FAILED  {check.what}\n        {problem}" if problem else f"ok      {check.what}", flush=True)
        failed += bool(problem)
    print(f"{failed} of {len(checks)} fail" if failed else f"all {len(checks)} pass")
    return failed


def tried(browser: Browser, home: Path, check: Check) -> str:
    """Return the error of a check, "" on success."""
    with (
        tempfile.TemporaryDirectory() as own,
        Server(Path(shutil.copytree(home, f"{own}/home")), check.key) as server,
        looking(browser, server, check.scheme, SMALLEST if check.small else None) as user,
    ):
        try:
            check.job(user)
        except Exception as error:
            return " ".join(str(error).split())[:400] or type(error).__name__
        found = user.wrong or user.foreign
        return f"the browser: {found}" if found else ""


def prepared(folder: Path, model: str, *texts: Path) -> Path:
    """A home in which these texts are compiled."""
    environment = {**os.environ, "NOTES_HOME": str(folder), "NOTES_MODEL": model}
    command = [sys.executable, "-m", "notes_cli", "compile", *map(str, texts)]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--browser", default=os.environ.get("CHROMIUM") or shutil.which("chromium"), help="Chromium")
    parser.add_argument("--only", default="", metavar="WORD", help="checks whose name has it")
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="also take pictures")
    given = parser.parse_args()
    checks = [check for check in CHECKS if given.only in check.what]
    with tempfile.TemporaryDirectory() as temporary, sync_playwright() as playwright:
        folder = Path(temporary)
        for name, text in TEXTS.items():
            (folder / f"{name}.txt").write_text(text, encoding="utf-8")
        browser = playwright.chromium.launch(executable_path=given.browser, args=["--no-sandbox"])
        skills = [ROOT / "tests" / "skills" / "returns", ROOT / "tests" / "skills" / "support"]
        failed = run(browser, prepared(folder / "home", SHIPPED_TINY, *skills, *sorted(folder.glob("*.txt"))), checks)
        if given.write and not failed:
            shown = [ROOT / "skills" / "store-handbook", ROOT / "skills" / "style-guide"]
            pictures(browser, prepared(folder / "pictures", MODEL, *shown), given.write)
        browser.close()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
