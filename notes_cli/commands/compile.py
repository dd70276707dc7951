"""`notes compile`: text in, path of the compiled segment out."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from notes_cli import output
from notes_cli.commands.options import model_options, open_workspace

if TYPE_CHECKING:
    from notes_cli.text.skill import Skill
    from notes_cli.work.compiling import Compiled

MOST_BLOCKS = 64


class Blocks(click.ParamType):  # type: ignore[type-arg]  # generic in newer click only
    """A number of blocks, or `headings`."""

    name = "blocks"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "headings":
            return value
        number = int(value) if str(value).isdecimal() else 0
        if not 2 <= number <= MOST_BLOCKS:
            self.fail(f"{value} is neither a whole number from 2 to {MOST_BLOCKS} nor the word headings", param, ctx)
        return number


@click.command()
@click.argument("source", type=click.Path(), required=False)
@click.option(
    "--from", "segment", metavar="SEGMENT", help="Instead of SOURCE: the text of a compiled skill, by name or file."
)
@click.option("--name", metavar="NAME", help="Name in the library.  [default: front matter, folder or file name]")
@click.option(
    "-o", "--output", "target", type=click.Path(path_type=Path), help="Write the segment here, not into the library."
)
@click.option(
    "-f", "--force", is_flag=True, help="Compile even if nothing has changed, or in place of what came from elsewhere."
)
@click.option(
    "--influence", is_flag=True, help="Also measure which tokens each field's value changes: for selective edits."
)
@click.option(
    "--blocks", type=Blocks(), metavar="S", help="Compile S parts, or one a heading (headings), on their own."
)
@click.option("-q", "--quiet", is_flag=True, help="Only the path, no progress.")
@click.option("--json", "json_", is_flag=True, help="One JSON object (docs/json.md).")
@model_options
def command(
    source: str | None,
    segment: str | None,
    name: str | None,
    target: Path | None,
    force: bool,
    influence: bool,
    blocks: Any,
    quiet: bool,
    json_: bool,
    **model: Any,
) -> None:
    """Prefill a skill once and keep its K/V on disk.

    SOURCE is a text, a SKILL.md with front matter, a folder that holds one, or - for standard input. Its fields are
    `key: value` lines, {{placeholders}}, or named in the front matter. The path of the segment goes to stdout. A
    skill that has not changed is not compiled again.

    A name belongs to where its text came from: the text of another file takes another --name, or the place of what is
    there with --force.

    In blocks, a part has not seen those before it, but a change is a prefill of the parts that it is in: of the text
    here, of a field with `notes ask --field NAME=VALUE --method block`.

    Rows are kept in f16, which serves a K/V cache of any type but f32: that one needs a segment of its own.

    \b
    Examples:
      notes compile skill.txt
      notes compile skills/returns
      cat policy.md | notes compile - --name policy
      notes compile manual.md --blocks headings
      notes compile --from returns -m other.gguf     its text, for another model
    """
    from notes_cli import config
    from notes_cli.library.store import Library
    from notes_cli.text.skill import load_skill
    from notes_cli.work.compiling import again, allowed, block_warnings, compile_to_library

    if (source is None) == (segment is None):
        raise click.UsageError("name a text to compile, or a compiled skill with --from")
    if segment is not None:
        card = Library(config.paths().library).latest(segment)
        skill, blocks = again(card, name), blocks or len(card.blocks) or None
    else:
        assert source is not None
        if source == "-" and sys.stdin is not None and sys.stdin.isatty():
            output.say("reading the skill from the terminal; end it with Ctrl-D on a line of its own")
        skill = load_skill(source, name=name, stdin=None if sys.stdin is None else sys.stdin.buffer)
    warnings = list(skill.warnings)
    for warning in skill.warnings:
        output.say(f"warning: {warning}")
    quiet |= json_
    with open_workspace(quiet=quiet, **model) as workspace:
        for warning in block_warnings(workspace, skill, blocks) if blocks else ():
            warnings.append(warning)
            output.say(f"warning: {warning}")
        with output.progress(f"compiling {skill.name}", hidden=quiet) as update:
            measure = (
                (lambda done, of: output.say(f"measured the influence of {done} of {of} fields")) if influence else None
            )
            compiled = compile_to_library(
                *(workspace, skill),
                force=force,
                progress=update,
                output=target,
                measure=measure,
                blocks=blocks or 1,
                say=output.say,
            )
        if not quiet:
            fields = ", ".join(skill.values) or "no fields"
            done = "; ".join(compiled.reasons) if compiled.reasons else "up to date"
            if compiled.blocks > 1:
                fresh = f"; {compiled.fresh} of {compiled.blocks} blocks compiled"
                done += fresh if compiled.reasons else ", in blocks"
            where = f". {allowed(workspace, compiled.tokens)}" if compiled.reasons else ""
            output.say(f"{skill.name}: {compiled.tokens} tokens, {fields} ({done}){where}")
        if json_:
            output.as_json({"version": 1, "compiled": [_facts(skill, compiled, warnings)]})
        else:
            output.data(str(compiled.path))


def _facts(skill: Skill, compiled: Compiled, warnings: Sequence[str]) -> dict[str, Any]:
    return {
        "name": skill.name,
        "path": str(compiled.path),
        "tokens": compiled.tokens,
        "fields": skill.values,
        "up_to_date": not compiled.reasons,
        "reasons": list(compiled.reasons),
        "blocks": compiled.blocks,
        "fresh": compiled.fresh,
        "warnings": list(warnings),
    }
