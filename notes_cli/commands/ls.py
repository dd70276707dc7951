"""`notes ls` and `notes inspect`: list the compiled skills of the library; show the contents of a segment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from time import time
from typing import TYPE_CHECKING, Any

import click

from notes_cli import config, output
from notes_cli.commands.options import SKILLS, compiled_files, json_option, library
from notes_cli.commands.remedies import worded
from notes_cli.commands.terminal import Command, option
from notes_cli.errors import NotesError
from notes_cli.explanations import TIME, attributes, entry_as_json, storage_type, timestamp
from notes_cli.text.names import human_age, human_time

if TYPE_CHECKING:
    from notes_cli.engine.segment import Segment
    from notes_cli.library.store import Library


Facts = Mapping[str, Any]  # of a file, as in docs/json.md

# Sort keys: name and model; the others begin with the largest, newest, last used or most used.
SORTS: Mapping[str, Callable[[Facts], Any]] = {
    "name": lambda facts: (facts["name"], _model(facts)),
    "size": lambda facts: facts["bytes"],
    "age": lambda facts: facts.get("created", ""),
    "used": lambda facts: facts["used"] or facts.get("created", ""),
    "uses": lambda facts: facts["uses"],
}

_SOURCES = {None: "not known", "-": "standard input"}
# By the values of Stale (runtime/freshness.py).
_STATES = {
    "text": "text changed",
    "gone": "text gone",
    "model": "other model",
    "format": "newer format",
    "damaged": "damaged",
    "unreadable": "unreadable",
}
_MODEL, _FIELDS = 20, 24  # least widths of these columns when they are cut
_GAP = 2
_RIGHT = ("tokens", "size", "uses")


@click.command(cls=Command)
@option("-l --long", "Also how often each was used, when last, and where its text is.", is_flag=True)
@option(
    "--sort BY",
    "name, or the first one is the largest (size), newest (age), latest used (used), most used (uses).",
    type=click.Choice(list(SORTS)),
    default="name",
)
@option("-q --quiet", "Names only, one a line.", is_flag=True)
@option("--learned", "The texts that servers have learned by themselves.", is_flag=True)
@json_option
def ls_command(long: bool, sort: str, quiet: bool, learned: bool, json_: bool) -> None:
    """List compiled skills, and which of them are out of date: because the text has changed or its file is gone, they
    are for another model than the settings name, or were written in another format. No model is loaded;
    `notes compile --stale` looks closer, and compiles them again.

    \b
    Examples:
      notes ls
      notes ls --long --sort used
      notes ls -q | xargs -n 1 notes inspect
    """
    store = library(learned=learned)
    rows = sorted(_files(store), key=SORTS[sort], reverse=sort != "name")
    if quiet:
        for name in dict.fromkeys(facts["name"] for facts in rows):
            output.result(name)
    elif json_:
        output.as_json(rows)
    elif rows:
        _table(rows, long)
        size = output.human_size(sum(facts["bytes"] for facts in rows))
        most = "" if store.max_size is None else f" of {output.human_size(store.max_size)}"
        output.sentence(f"{output.counted(len(rows), 'file')}, {size}{most} in {store.folder}")
        times, saved = (sum(facts["spliced"][key] for facts in rows) for key in ("times", "saved_ms"))
        if times:
            prefill = f": {human_time(saved / 1000)} of prefill saved" if saved else ""
            output.sentence(f"spliced {times:,} time{'s' * (times != 1)}{prefill}")
        for reason, names in _reasons(rows).items():
            output.sentence(f"{', '.join(names)}: {reason}")
    elif learned:
        output.say(f"no server has learned a text yet, in {store.folder}")
    else:
        how = "Compile one: notes compile FILE, or a sample: notes compile store-handbook"
        output.say(f"no compiled skills yet in {store.folder}. {how}")


def _files(store: Library) -> list[Facts]:
    """Return the facts of all files of the library; one that cannot be read has fewer."""
    from notes_cli.library.segment_files import spliced_from, uses_of
    from notes_cli.runtime.freshness import stale_reasons

    entries = store.entries()
    weights = _weights() if entries else None
    files: list[Facts] = []
    for entry in entries:
        stale = stale_reasons(entry, [other for other in entries if other.name == entry.name], weights)
        uses, spliced = uses_of(entry.path), spliced_from(entry.path)
        facts = {
            "bytes": entry.path.stat().st_size if entry.path.exists() else 0,  # 0: a dangling link
            **entry_as_json(entry, worded(entry.problem) if entry.problem else None),
            "uses": uses.count,
            "used": uses.last and datetime.fromtimestamp(uses.last, timezone.utc).strftime(TIME),
            "spliced": {**attributes(spliced, "times", "tokens"), "saved_ms": round(1000 * spliced.seconds)},
            "stale": [reason.kind.value for reason in stale],
            "why": [reason.what for reason in stale],
        }
        files.append(facts)
    return files


def _model(facts: Facts) -> str:
    identity = facts.get("identity")
    return f"{identity['model']} {identity['quantization']}" if identity else ""


def _weights() -> str | None:
    """Return the digest of the model in use, if cached. A setting with an unknown model does not prevent the list."""
    from notes_cli.library.safe_files import known_sha256
    from notes_cli.runtime.naming import chosen_model

    try:
        path = chosen_model()
    except NotesError:
        return None
    return known_sha256(path, config.paths().models / "digests.json") if path.is_file() else None


def _table(rows: Sequence[Facts], long: bool) -> None:
    """Print the table: in a pipe all columns with a line per file, on a terminal the columns that fit."""
    more, last = (("uses", "used"), ("text",)) if long else ((), ())
    names = ("name", "tokens", "size", "model", "compiled", *more, "state", "fields", *last)
    shown = {name: [_cell(facts, name) for facts in rows] for name in names}
    if not output.terminal():
        if not long:  # the reasons of files that cannot be read stay whole
            each = zip(shown["fields"], shown["state"], strict=True)
            shown["fields"] = [cell if state == "unreadable" else _cut(cell, output.COLUMNS) for cell, state in each]
        output.table(list(shown), [list(cells) for cells in zip(*shown.values(), strict=True)], right=_RIGHT)
        return
    models = list(dict.fromkeys(filter(None, shown["model"])))
    room = output.width(0)
    kept = [name for name in ("name", "uses", "used", "state") if name in shown]
    room -= sum(_width(name, shown[name]) + _GAP for name in kept) - _GAP
    # Most important first: a single model is named below the table, several may wrap.
    important = ("tokens", "model", "size") if len(models) > 1 else ("tokens", "size", "model")
    for name in (*important, "compiled", "fields", *last):
        needed, free = _width(name, shown[name]), room - _GAP
        if name == "model" and needed > free and len(models) > 1:
            needed = max(_MODEL, _width(name, " ".join(models).split()))
        if name == "fields" and needed > free >= _FIELDS:
            shown[name], needed = [_cut(cell, free) for cell in shown[name]], free
        if needed <= free:
            kept.append(name)
            room -= needed + _GAP
    columns = [name for name in shown if name in kept]
    lines = [list(cells) for cells in zip(*(shown[name] for name in columns), strict=True)]
    output.table(columns, lines, right=_RIGHT, wraps=("model",))
    if "model" not in kept and len(models) == 1:
        output.sentence(f"compiled for {models[0]}")
    for facts in rows if long and "text" not in kept else ():
        if not facts["problem"]:
            output.sentence(f"text of {facts['name']}: {_source(facts)}")


def _width(name: str, cells: Sequence[str]) -> int:
    return max(map(output.cells, (name, *cells)))


def _cut(fields: str, most: int) -> str:
    """Cut a list of fields to as many whole ones as fit."""
    kept = fields
    while output.cells(kept) > most and ", " in kept.removesuffix(", …"):
        kept = kept.removesuffix(", …").rpartition(", ")[0] + ", …"
    return kept if output.cells(kept) <= most else "…"


def _source(facts: Facts) -> str:
    from notes_cli.library.store import source_text

    return _SOURCES.get(facts["source"]) or source_text(facts["source"])


_CELLS: Mapping[str, Callable[[Facts], str]] = {
    "name": lambda facts: str(facts["name"]),
    "tokens": lambda facts: f"{facts['tokens']:,}" if output.terminal() else str(facts["tokens"]),
    "size": lambda facts: output.human_size(facts["bytes"]),
    "model": _model,
    "compiled": lambda facts: str(facts["created"][:10]),
    "uses": lambda facts: str(facts["uses"]),
    "used": lambda facts: f"{human_age(time() - timestamp(facts['used']))} ago" if facts["used"] else "never",
    "state": lambda facts: ", ".join(_STATES[kind] for kind in facts["stale"]) or "ready",
    "fields": lambda facts: ", ".join(f"{field}={value}" for field, value in facts["fields"].items()),
    "text": _source,
}


def _cell(facts: Facts, name: str) -> str:
    if not facts["problem"] or name in ("name", "state"):
        return _CELLS[name](facts)
    return facts["problem"] if name == "fields" and not output.terminal() else ""


def _reasons(rows: Sequence[Facts]) -> dict[str, list[str]]:
    """Return reasons why files are out of date, with names; in a pipe, unreadable files have theirs in the table."""
    reasons: dict[str, dict[str, None]] = {}
    for facts in rows:
        for why in facts["why"] if not facts["problem"] or output.terminal() else ():
            reasons.setdefault(why, {})[facts["name"]] = None
    return {why: list(names) for why, names in reasons.items()}


@click.command(cls=Command)
@click.argument("name", shell_complete=SKILLS)
@option("--text", "Only the text, as it was compiled.", is_flag=True)
@option("--tokens", "Only the token ids, one a line.", is_flag=True)
@json_option
def inspect_command(name: str, text: bool, tokens: bool, json_: bool) -> None:
    """Show the contents of a compiled skill: text, fields, tokens, identity, sizes. NAME may be a segment file.

    The text is the body of the skill's file. Its front matter, of which name, description and fields are used, and
    files that the text refers to (references/, scripts/, assets/) are left out; each can be compiled on its own.
    Every byte of the file is checked on the way.

    \b
    Examples:
      notes inspect store-handbook
      notes inspect store-handbook --text
    """
    if text + tokens + json_ > 1:
        raise click.UsageError("--text, --tokens and --json exclude each other. Give one of them")
    from notes_cli.library.container import open_segment

    shown = []
    for path in compiled_files(name):
        info = open_segment(path)
        if text:
            output.data(info.text)
        elif tokens:
            output.result("\n".join(str(int(token)) for token in info.tokens))
        prefill = info.prefill and {
            "ms": round(1000 * info.prefill.seconds, 3),
            **attributes(info.prefill, "tokens", "threads"),
        }
        facts: dict[str, Any] = {
            **attributes(info, "name", "description"),
            "path": str(path),
            "source": info.source or None,
            "left_out": _left_out(info),
            "bytes": info.file_size,
            "rows": _describe_entries(info),
            "kv": info.kv,
            "tokens": len(info.tokens),
            "compiled_at": f"position {info.base}, after {len(info.context)} tokens"
            + ("" if info.carry else ", and fits there only" if info.prefix_only else ""),
            "blocks": list(info.blocks),
            "created": f"{info.created} by {info.writer}",
            "prefill": prefill,
            "fields": [
                {"name": s.name, "value": s.value, "characters": [s.start, s.end], "tokens": [s.first, s.last]}
                for s in info.fields
            ],
            "identity": info.identity.as_dict(),
            "text": info.text,
        }
        shown.append(facts)
        if not (text or tokens or json_):
            _print(facts)
    if json_:
        output.as_json(shown)


def _left_out(info: Segment) -> list[str]:
    """Return parts of the skill that are not in its text: front matter, and files that the text refers to."""
    from notes_cli.text.skill import linked_files

    front = ["front matter"] if info.description else []
    return front + (linked_files(info.text, Path(info.source).parent) if info.source not in ("", "-") else [])


def _describe_entries(info: Segment) -> str:
    layers = {
        state: len({rows.layer for rows in info.shapes if (rows.part == "state") is state}) for state in (False, True)
    }
    parts = [f"{output.counted(layers[False], 'layer')}, {storage_type(info)}"] if layers[False] else []
    parts += [f"recurrent state of {output.counted(layers[True], 'layer')}"] if layers[True] else []
    if info.carry:
        size = output.human_size(info.carry.nbytes)
        parts.append(f"{size} to carry it elsewhere, after a seam of {info.carry.seam} tokens")
    return "; ".join(parts)


def _print(facts: Mapping[str, Any]) -> None:
    for key, value in facts.items():
        if key == "fields":
            for span in value:
                first, last = span["tokens"]
                output.result(f"field        {span['name']} = {span['value']} (tokens {first} to {last - 1})")
            continue
        shown = {key: value}
        if key == "identity":
            shown = value
        elif key == "left_out":
            shown = {"left out": output.line(", ".join(value))}
        elif key == "blocks":
            shown = {key: value and f"{len(value)}, from tokens {', '.join(map(str, value))} on"}
        elif key == "prefill" and value:
            threads = output.counted(value["threads"], "thread")
            shown = {key: f"{value['tokens']:,} tokens in {human_time(value['ms'] / 1000)}, on {threads}"}
        for name, text in shown.items():
            if text and name not in ("kv", "text"):  # `rows` has the type with sizes
                output.result(f"{name:<12} {text}")
    output.result(f"\n{facts['text']}")
