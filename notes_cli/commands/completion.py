"""`notes completion`: completes commands, options, skills, models, fields and sessions in a shell."""

from __future__ import annotations

import os
from pathlib import Path

import click
from click.shell_completion import BashComplete, add_completion_class, split_arg_string

from notes_cli import output

SHELLS = ("bash", "zsh", "fish")
MARK = "# completion of notes"

# bash breaks words at : and =, which names of models and FIELD=VALUE have. So the whole line is handed over, and what
# precedes the last of them in a word, which is there already, is left out of what comes back. What a shell would take
# apart is quoted, unless a quote has been opened: then bash replaces all after it.
BASH = """\
_notes_complete() {
    local line=${COMP_LINE:0:COMP_POINT} kind word there
    local last=${line//\\\\ /$'\\1'}
    last=${last##*[[:blank:]]}
    there=${last%"${last##*[:=]}"}
    there=${there//$'\\1'/ }
    COMPREPLY=()
    while IFS=, read -r kind word; do
        case $kind in
            file) compopt -o default 2>/dev/null ;;
            dir) compopt -o dirnames 2>/dev/null ;;
            plain)
                [[ $word != *= ]] || compopt -o nospace 2>/dev/null
                if [[ ${COMP_WORDS[COMP_CWORD]} != [\\'\\"]* ]]; then
                    word=${word#"$there"}
                    [[ $word != *[[:blank:]\\'\\"\\\\\\$\\`\\;\\&\\|\\<\\>\\(\\)\\*\\?\\!]* ]] ||
                        printf -v word %q "$word"
                fi
                COMPREPLY+=("$word") ;;
        esac
    done < <(_NOTES_COMPLETE=bash_complete COMP_WORDS=$line COMP_CWORD=-1 "$1" 2>/dev/null)
}
complete -o nosort -F _notes_complete notes
"""


@click.command()
@click.argument("shell", type=click.Choice(SHELLS), required=False, metavar="[bash|zsh|fish]")
@click.option("--install", is_flag=True, help="Write the script for this user, and have the shell read it.")
@click.option("-q", "--quiet", is_flag=True, help="Print the path alone.")
def command(shell: str | None, install: bool, quiet: bool) -> None:
    """Print the script by which a shell completes what you type after `notes`: commands and options, compiled skills,
    models by name, fields of the skills in the line, sessions. Without a name it is your shell's.

    --install writes it to a file, prints its path, and adds a line to ~/.bashrc or ~/.zshrc, once. fish finds it by
    itself. It is there in the shells that you start from then on.

    \b
    Examples:
      notes completion --install
      source <(notes completion bash)        in this shell alone
    """
    shell = shell or _own()
    if not install:
        output.data(source(shell), end="")
        return
    path, start = places(shell)
    _write(path, source(shell))
    output.data(str(path))
    told = f"shells that you start from now on complete notes; this one after: source {path}"
    if start is not None:
        _append(start, line(path))
        told += f". To undo it remove the line in {start} that ends with {MARK!r}"
    if not quiet:
        output.say(told)


def _own() -> str:
    """The shell of this user. Raise UsageError for one that we have nothing for."""
    name = Path(os.environ.get("SHELL", "")).name
    if name not in SHELLS:
        raise click.UsageError(f"name your shell: {', '.join(SHELLS)}. The variable SHELL is {name or 'nothing'!r}")
    return name


def source(shell: str) -> str:
    """The script."""
    from click.shell_completion import get_completion_class

    if shell == "bash":
        return BASH
    found = get_completion_class(shell)
    assert found is not None
    root = click.get_current_context().find_root().command
    return found(root, {}, "notes", "_NOTES_COMPLETE").source()


def places(shell: str) -> tuple[Path, Path | None]:
    """The file of the script, and the one that the shell reads when it starts, None if it finds the script itself."""
    from notes_cli.config import home_folder

    home = home_folder()
    data = Path(os.environ.get("XDG_DATA_HOME") or home / ".local" / "share")
    if shell == "fish":
        return Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config") / "fish" / "completions" / "notes.fish", None
    start = home / ".bashrc" if shell == "bash" else Path(os.environ.get("ZDOTDIR") or home) / ".zshrc"
    return data / "notes" / f"completion.{shell}", start


def line(path: Path) -> str:
    """What a shell that starts has to do. zsh's own completion must have begun by then."""
    from shlex import quote

    begin = "(( $+functions[compdef] )) || { autoload -Uz compinit && compinit; }; " if path.suffix == ".zsh" else ""
    return f"[ ! -r {quote(str(path))} ] || {{ {begin}source {quote(str(path))}; }} {MARK}\n"


def _write(path: Path, text: str) -> None:
    from notes_cli.errors import NotesError, reason

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise NotesError(f"cannot write {path}: {reason(error)}") from error


def _append(start: Path, text: str) -> None:
    """Add a line to a file of the user's, which stays as it is otherwise. Once."""
    from notes_cli.errors import NotesError, reason

    try:
        there = start.read_bytes() if start.exists() else b""
        if MARK.encode() not in there:
            with start.open("ab") as file:
                file.write((b"\n" if there and not there.endswith(b"\n") else b"") + text.encode())
    except OSError as error:
        raise NotesError(f"cannot write {start}: {reason(error)}") from error


class BashLine(BashComplete):
    """The words of the line up to the cursor, however bash would break them."""

    def get_completion_args(self) -> tuple[list[str], str]:
        line = os.environ["COMP_WORDS"]
        words = split_arg_string(line)[1:]
        open_ = bool(words) and not line[-1:].isspace()
        return (words[:-1], words[-1]) if open_ else (words, "")


def register() -> None:
    """Take it in place of click's own."""
    add_completion_class(BashLine, "bash")
