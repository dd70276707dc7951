"""Options that may be given once: a part of what is asked, of which the last alone would be heard without a word."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

SHORT = 40  # characters of a value in a message


class Once(click.Option):
    """An option of one value that refuses a second one. Click itself takes the last, as for settings it should."""

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        parser.add_option(obj=self, opts=self.opts, dest=self.name, action="append", nargs=self.nargs)

    def consume_value(self, ctx: click.Context, opts: Mapping[str, Any]) -> tuple[Any, Any]:
        given = opts.get(str(self.name))
        if isinstance(given, list):
            if len(given) > 1 and not ctx.resilient_parsing:  # a shell that completes the line is told nothing
                flag = next(flag for flag in self.opts if flag.startswith("--"))
                first, second = (repr(str(value)[:SHORT]) for value in given[:2])
                raise click.UsageError(f"there are two values of {flag}, {first} and {second}. Leave one out", ctx)
            opts = {**opts, str(self.name): given[0]}
        return super().consume_value(ctx, opts)
