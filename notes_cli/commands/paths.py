"""`notes paths`: where the files of this user are, for people and scripts."""

from __future__ import annotations

from pathlib import Path

import click

from notes_cli import output

PLACES = {
    "config": "settings",
    "library": "compiled skills",
    "sessions": "conversations",
    "profiles": "what notes calibrate measured",
    "models": "models that notes pull smollm2 downloaded, and what is remembered of others",
    "servers": "your running servers, for notes ask --server",
    "skills": "samples that came with notes: notes compile returns",
    "prompts": "wordings of errata and of reasoning",
}


@click.command()
@click.argument("place", type=click.Choice(list(PLACES)), required=False, metavar="[PLACE]")
@click.option("--json", "json_", is_flag=True, help="One JSON object (docs/json.md).")
def command(place: str | None, json_: bool) -> None:
    """Show where config.yaml is, and what notes keeps. With the name of a PLACE its path alone.

    NOTES_HOME=FOLDER puts all of it into one folder; without it the cache, state and config folders of this system are
    used (on Linux those of XDG_CACHE_HOME, XDG_STATE_HOME and XDG_CONFIG_HOME).

    \b
    Examples:
      notes paths
      "$EDITOR" "$(notes paths config)"
      du -sh "$(notes paths library)"
    """
    found = _places()
    if json_:
        output.as_json({"version": 1, **{name: str(path) for name, path in found.items()}})
    elif place:
        output.data(str(found[place]))
    else:
        unwritten = {} if found["config"].exists() else {"config": "settings; not there until you write it: notes init"}
        rows = [(name, str(path), {**PLACES, **unwritten}[name]) for name, path in found.items()]
        output.table(("place", "path", "what is there"), rows)


def _places() -> dict[str, Path]:
    from notes_cli import config

    own = config.paths()
    kept = {name: getattr(own, name) for name in ("config", "library", "sessions", "profiles", "models", "servers")}
    return {**kept, **{name: config.resource(name) for name in ("skills", "prompts")}}
