"""`notes models`: the models on this machine that have a name, and what can be done with each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from notes_cli import output

if TYPE_CHECKING:
    from pathlib import Path

    from notes_cli.engine.architectures import Skills
    from notes_cli.engine.header import Header
    from notes_cli.library.model_stores import Named
    from notes_cli.library.models import Models


@dataclass(frozen=True, slots=True)
class _Row:
    """A model, what its head says, or why it cannot be used."""

    model: Named
    header: Header | None
    skills: Skills | None
    problem: str | None
    default: bool


@click.command()
@click.option("-q", "--quiet", is_flag=True, help="Only names, of models that can be used.")
@click.option("--json", "json_", is_flag=True, help="A JSON array (docs/json.md).")
def command(quiet: bool, json_: bool) -> None:
    """List the models on this machine that -m takes by name: those that ship, smollm2 if it is there, those of Ollama,
    the Hugging Face cache, llama.cpp and LM Studio, the file that NOTES_MODEL names, and those under `models:` in
    config.yaml. A star marks the one that is used without -m. Nothing is loaded, fetched or written.

    A skill can be spliced into any prompt, only restored at its start, or is refused: told from the model's file.

    \b
    Examples:
      notes models
      notes ask "Why?" -m qwen3:0.6b
    """
    from notes_cli.commands.remedies import advice, worded
    from notes_cli.config import SHIPPED_TINY
    from notes_cli.errors import Help, NotesError
    from notes_cli.runtime.naming import chosen_model, models

    known, default = models(), None
    try:
        default = chosen_model()
    except NotesError as error:
        known.trouble.append(f"the default model: {worded(error)}")
    rows = _rows(known, default)
    if quiet:
        for row in rows:
            if row.problem is None:
                output.result(row.model.name)
    elif json_:
        output.as_json([_facts(row) for row in rows])
    else:
        _table(rows)
        if any(row.default and row.model.name == SHIPPED_TINY for row in rows):
            output.say(f"smollm2, a small real model, is not there. {advice(Help.GET_SMOLLM2())}")
    for trouble in known.trouble:
        output.say(trouble)


def _rows(known: Models, default: Path | None) -> list[_Row]:
    """All of them. A file that has several names is read once; what turns out to be no model is left out."""
    from notes_cli.engine.architectures import skills_of
    from notes_cli.engine.header import read_header
    from notes_cli.errors import ModelError
    from notes_cli.library.models import file_key

    read: dict[object, tuple[Header | None, str | None]] = {}
    rows = []
    for model in known.all:
        header, problem = None, model.problem or None
        if problem is None:
            key = file_key(model.path) or model.path
            if key not in read:
                try:
                    read[key] = read_header(model.path), None
                except ModelError as error:
                    read[key] = None, error.what.removeprefix(f"{model.path}: ")
            header, problem = read[key]
        if header is None or header.model:
            chosen = default is not None and file_key(model.path) == file_key(default)
            rows.append(_Row(model, header, skills_of(header) if header else None, problem, chosen))
    return rows


def _facts(row: _Row) -> dict[str, object]:
    model, header, skills = row.model, row.header, row.skills
    facts: dict[str, object] = {
        "name": model.name,
        "store": model.store,
        "path": str(model.path),
        "problem": row.problem,
        "default": row.default,
    }
    if header is None or skills is None:
        return facts
    return {
        **facts,
        "bytes": header.size,
        "quantization": header.quantization or None,
        "context": header.context,
        "architecture": header.architecture,
        "skills": skills.how,
        "why": skills.why or None,
    }


def _table(rows: list[_Row]) -> None:
    """A line for each, below them why some cannot be used, or not everywhere."""
    from notes_cli.library.models import file_key

    cells: list[tuple[str, ...]] = []
    reasons: dict[str, list[str]] = {}
    for row in rows:
        name, header, skills = f"{row.model.name}{' *' * row.default}", row.header, row.skills
        if header is None or skills is None:
            cells.append((name, "", "", "", "", "unusable"))
            reason = row.problem or ""
        else:
            context = "" if header.context is None else f"{header.context:,}"
            size = output.human_size(header.size)
            cells.append((name, size, header.quantization, context, header.architecture, skills.how))
            reason = skills.why
        if reason:
            reasons.setdefault(reason, []).append(row.model.name)
    output.table(("name", "size", "weights", "context", "architecture", "skills"), cells, right=("size", "context"))
    sizes = {file_key(row.model.path): row.header.size for row in rows if row.header}
    count = "1 file" if len(sizes) == 1 else f"{len(sizes)} files"
    star = "; * is used without -m" if any(row.default for row in rows) else ""
    output.result(f"{count}, {output.human_size(sum(sizes.values()))}{star}")
    for reason, names in reasons.items():
        output.result(f"{', '.join(names)}: {reason}")
