"""What commands have in common that measure for hours and go on where they were stopped."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import ParamSpec

Given = ParamSpec("Given")


def check(parser: argparse.ArgumentParser, cases: int | None, write: Path | None = None) -> None:
    """Refuse a number of cases and a folder that cannot be, before anything is measured."""
    if cases is not None and cases < 1:
        parser.error(f"--cases {cases}: there must be one at least")
    if write and not write.is_dir():
        parser.error(f"--write {write}: there is no such folder")


def goes_on(*errors: type[Exception]) -> Callable[[Callable[Given, int]], Callable[Given, int]]:
    """A command that gives an exit status: each of these errors is one line and status 1, Ctrl-C one line and 130."""

    def decorated(main: Callable[Given, int]) -> Callable[Given, int]:
        @wraps(main)
        def run(*args: Given.args, **kwargs: Given.kwargs) -> int:
            try:
                return main(*args, **kwargs)
            except errors as error:
                sys.stderr.write(f"{error}\n")
                return 1
            except KeyboardInterrupt:
                sys.stderr.write("stopped; the same command goes on from here\n")
                return 130

        return run

    return decorated
