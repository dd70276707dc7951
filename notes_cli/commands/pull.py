"""`notes pull`: a model from Hugging Face into its cache, where `-m` finds it by name."""

from __future__ import annotations

import click

from notes_cli import output


@click.command()
@click.argument("name", metavar="USER/REPO[:QUANTIZATION]")
@click.option("--dry-run", is_flag=True, help="Show what would be downloaded.")
@click.option("-q", "--quiet", is_flag=True, help="Print the path alone, and no progress.")
@click.option("--json", "json_", is_flag=True, help="One JSON object (docs/json.md).")
def command(name: str, dry_run: bool, quiet: bool, json_: bool) -> None:
    """Download a GGUF model from Hugging Face into its cache, which llama.cpp and others share, and print the file's
    path. From then on -m takes it by the same name.

    No other command downloads anything, and with NOTES_OFFLINE=1 (or HF_HUB_OFFLINE=1) this one refuses to. These
    variables do not stop --rpc, --server and notes serve, which connect or listen where they are told to. A download
    that was interrupted goes on where it ended. Without a quantization Q4_K_M is meant, where there are several.

    \b
    Examples:
      notes pull ggml-org/Qwen3-0.6B-GGUF
      notes pull unsloth/Qwen3-4B-GGUF:Q8_0 --dry-run
      notes ask "Why?" -m "$(notes pull -q ggml-org/Qwen3-0.6B-GGUF)"
    """
    from notes_cli.library.pulling import choose, fetch

    quiet = quiet or json_
    choice = choose(name)
    size = output.human_size(choice.size)
    if not quiet:
        many = "" if len(choice.files) == 1 else f" in {len(choice.files)} files"
        output.say(f"{choice.name}: {size}{many}")
    path = None if dry_run else fetch(choice, show=not quiet and output.watched())
    if json_:
        facts = {"name": choice.name, "files": list(choice.files), "bytes": choice.size}
        output.as_json({"version": 1, **facts, "path": None if path is None else str(path)})
    elif path is not None:
        output.data(str(path))
        if not quiet:
            output.say(f"Ask it with: -m {choice.name}")
    else:
        for file in choice.files:
            output.data(file)
