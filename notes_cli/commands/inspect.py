"""`notes inspect`: what a compiled segment says of itself, and whether it is sound."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

import click

from notes_cli import output
from notes_cli.commands.options import SkillName, library
from notes_cli.explaining import kept_as

if TYPE_CHECKING:
    from notes_cli.library.info import SegmentInfo


@click.command()
@click.argument("name", type=SkillName())
@click.option("--text", is_flag=True, help="Only the text, as it was compiled.")
@click.option("--tokens", is_flag=True, help="Only the token ids, one a line.")
@click.option("--json", "json_", is_flag=True, help="An array, one object a file (docs/json.md).")
def command(name: str, text: bool, tokens: bool, json_: bool) -> None:
    """Show what is in a compiled skill: text, fields, tokens, identity, sizes. NAME may be a segment file.

    The text is the body of the skill's file. Its front matter, of which name, description and fields are used, and
    files that the text refers to (references/, scripts/, assets/) are left out; each can be compiled on its own.
    Every byte of the file is checked on the way.

    \b
    Examples:
      notes inspect returns
      notes inspect returns --text
    """
    if text + tokens + json_ > 1:
        raise click.UsageError("--text, --tokens and --json exclude each other. Give one of them")
    from notes_cli.errors import SegmentError
    from notes_cli.library.container import open_segment, peek

    store = library()
    target = store.resolve(name)
    if target.kind == "text":
        raise SegmentError(f"{name} is a text, not a compiled segment. Compile it: notes compile {quote(name)}")
    files = [entry.path for entry in store.entries(target.name)] if target.path is None else [target.path]
    shown = []
    for path in files:
        open_segment(path)  # checks every byte
        info = peek(path)
        if text:
            output.data(info.text)
        elif tokens:
            output.result("\n".join(str(int(token)) for token in info.tokens))
        facts: dict[str, object] = {
            "name": info.name,
            "description": info.description,
            "path": str(path),
            "source": info.source or None,
            "left_out": _left_out(info),
            "bytes": info.nbytes,
            "rows": _rows(info),
            "kv": info.kv,
            "tokens": len(info.tokens),
            "compiled_at": f"position {info.base}, after {len(info.context)} tokens"
            + ("" if info.carried else ", and fits there only" if info.pinned else ""),
            "blocks": list(info.blocks),
            "created": f"{info.created} by {info.writer}",
            "prefill": _prefill(info),
            "fields": [
                {"name": s.name, "value": s.value, "characters": [s.start, s.end], "tokens": [s.first, s.last]}
                for s in info.fields
            ],
            "identity": info.identity.as_dict(),
        }
        shown.append({**facts, "text": info.text})
        if not (text or tokens or json_):
            _print(facts, info.text)
    if json_:
        output.as_json(shown)


def _left_out(info: SegmentInfo) -> list[str]:
    """What belongs to the skill and is not in its text: front matter, and files that the text refers to."""
    from notes_cli.text.skill import linked_files

    front = ["front matter"] if info.description else []
    return front + (linked_files(info.text, Path(info.source).parent) if info.source not in ("", "-") else [])


def _prefill(info: SegmentInfo) -> dict[str, float] | None:
    """How long the compile took, where that is known."""
    if info.prefill is None:
        return None
    return {
        "ms": round(1000 * info.prefill.seconds, 3),
        "tokens": info.prefill.tokens,
        "threads": info.prefill.threads,
    }


def _rows(info: SegmentInfo) -> str:
    rows = [f"{_layers(info.layers)}, {kept_as(info)}"] if info.layers else []
    states = [f"recurrent state of {_layers(info.states)}"] if info.states else []
    carried = [f"{output.human_size(info.carried)} to carry it elsewhere, after a seam of {info.seam} tokens"]
    return "; ".join(rows + states + (carried if info.carried else []))


def _layers(count: int) -> str:
    return "1 layer" if count == 1 else f"{count} layers"


def _print(facts: dict[str, object], text: str) -> None:
    from notes_cli.text.sizes import human_time

    for key, value in facts.items():
        if key == "fields":
            assert isinstance(value, list)
            for span in value:
                first, last = span["tokens"]
                output.result(f"field        {span['name']} = {span['value']} (tokens {first} to {last - 1})")
        elif key == "identity":
            assert isinstance(value, dict)
            for part, content in value.items():
                if content:
                    output.result(f"{part:<12} {content}")
        elif key == "prefill":
            if isinstance(value, dict):
                threads = f"{value['threads']} thread{'s' * (value['threads'] != 1)}"
                took = human_time(value["ms"] / 1000)
                output.result(f"{key:<12} {value['tokens']:,} tokens in {took}, on {threads}")
        elif key == "blocks":
            assert isinstance(value, list)
            if value:
                output.result(f"{key:<12} {len(value)}, from tokens {', '.join(map(str, value))} on")
        elif key == "left_out":
            assert isinstance(value, list)
            if value:
                output.result(f"{'left out':<12} {output.line(', '.join(value))}")
        elif key != "kv" and value not in ("", None):  # which `rows` tells with bytes
            output.result(f"{key:<12} {value}")
    output.result(f"\n{text}")
