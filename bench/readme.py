"""Run README's Python examples as a user does, in a new folder, and check them with mypy --strict.

    python bench/readme.py --python build/wheel/venv/bin/python

Nothing of the checkout is imported: `notes_cli` is what the interpreter that is named has installed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def examples() -> list[str]:
    """The blocks of Python in README."""
    return re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)


def promised(example: str) -> list[str]:
    """Return the output in an example's comments after `print`."""
    return re.findall(r"^ *print\(.*\)  # (.*)$", example, re.M)


def run(python: Path | str, example: str, folder: Path, path: Path | str | None = None) -> list[str]:
    """Run an example in a folder with skills and pictures; return the lines. Raises CalledProcessError."""
    (folder / "example.py").write_text(example, encoding="utf-8")
    if not (folder / "skills").exists():
        (folder / "skills").symlink_to(ROOT / "skills")
        (folder / "photos").symlink_to(ROOT / "docs" / "images")
    environment = _environment(path) | {"NOTES_HOME": str(folder / "home")}
    done = subprocess.run([str(python), "example.py"], cwd=folder, env=environment, capture_output=True, text=True)
    sys.stderr.write(done.stderr if done.returncode else "")
    done.check_returncode()
    return done.stdout.splitlines()


def check(python: Path | str, example: str, folder: Path, path: Path | str | None = None) -> list[str]:
    """Return the errors of mypy --strict for an example, with types of the installed package (`py.typed`)."""
    (folder / "example.py").write_text(example, encoding="utf-8")
    command = [str(python), "-m", "mypy", "--strict", "--no-error-summary", "example.py"]
    done = subprocess.run(command, cwd=folder, env=_environment(path), capture_output=True, text=True)
    return [*done.stdout.splitlines(), *done.stderr.splitlines()]


def _environment(path: Path | str | None) -> dict[str, str]:
    """That of this process without the checkout; `path`: a PYTHONPATH."""
    kept = {name: value for name, value in os.environ.items() if name not in ("MYPYPATH", "PYTHONPATH", "NOTES_MODEL")}
    return kept | ({"PYTHONPATH": str(path)} if path else {})


def main() -> int:
    parser = argparse.ArgumentParser(description="Run and check the Python examples of README.")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has notes installed")
    python = Path(parser.parse_args().python).absolute()
    failed = 0
    for number, example in enumerate(examples(), 1):
        with tempfile.TemporaryDirectory() as folder:
            wrong, found = check(python, example, Path(folder)), run(python, example, Path(folder))
        for line in wrong:
            print(f"example {number}: {line}")
        if found != promised(example):
            print(f"example {number} prints {found}, README says {promised(example)}")
        failed += bool(wrong) or found != promised(example)
    print(f"{len(examples()) - failed} of {len(examples())} examples print what README says and pass mypy --strict")
    return 1 if failed or not examples() else 0


if __name__ == "__main__":
    sys.exit(main())
