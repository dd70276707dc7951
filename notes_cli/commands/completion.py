"""`notes completion`: shell completion of commands, options, skills, models, fields and sessions."""

from __future__ import annotations

import os
from pathlib import Path

import click
from click.shell_completion import BashComplete, add_completion_class, split_arg_string

from notes_cli import output

SHELLS = ("bash", "zsh", "fish")
MARK = "# completion of notes"

# bash splits words at : and =, which model names and FIELD=VALUE contain. So the script passes the whole line, and
# removes the part of a word up to the last of them from the completions. Special characters are quoted, unless a quote
# is open, after which bash replaces everything.
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
    shell = shell or _current_shell()
    if not install:
        output.data(source(shell), end="")
        return
    path, startup = places(shell)
    _write(path, source(shell))
    output.data(str(path))
    message = f"shells that you start from now on complete notes; this one after: source {path}"
    if startup is not None:
        _append(startup, line(path))
        message += f". To undo it remove the line in {startup} that ends with {MARK!r}"
    if not quiet:
        output.say(message)


def _current_shell() -> str:
    """Return the user's shell. Raises UsageError for an unsupported one."""
    name = Path(os.environ.get("SHELL", "")).name
    if name not in SHELLS:
        raise click.UsageError(f"name your shell: {', '.join(SHELLS)}. The variable SHELL is {name or 'nothing'!r}")
    return name


def source(shell: str) -> str:
    """Return the completion script of a shell."""
    from click.shell_completion import get_completion_class

    if shell == "bash":
        return BASH
    completion = get_completion_class(shell)
    assert completion is not None
    root = click.get_current_context().find_root().command
    return completion(root, {}, "notes", "_NOTES_COMPLETE").source()


def places(shell: str) -> tuple[Path, Path | None]:
    """Return the path of the script, and of the shell's startup file, None if the shell finds the script itself."""
    from notes_cli.config import home_folder

    home = home_folder()
    data = Path(os.environ.get("XDG_DATA_HOME") or home / ".local" / "share")
    if shell == "fish":
        return Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config") / "fish" / "completions" / "notes.fish", None
    startup = home / ".bashrc" if shell == "bash" else Path(os.environ.get("ZDOTDIR") or home) / ".zshrc"
    return data / "notes" / f"completion.{shell}", startup


def line(path: Path) -> str:
    """Return the line for a startup file, which first initializes zsh's completion if needed."""
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


def _append(path: Path, text: str) -> None:
    """Append a line to a user's file, once."""
    from notes_cli.errors import NotesError, reason

    try:
        content = path.read_bytes() if path.exists() else b""
        if MARK.encode() not in content:
            with path.open("ab") as file:
                file.write((b"\n" if content and not content.endswith(b"\n") else b"") + text.encode())
    except OSError as error:
        raise NotesError(f"cannot write {path}: {reason(error)}") from error


class BashLine(BashComplete):
    """Splits the line up to the cursor into words itself, not as bash does."""

    def get_completion_args(self) -> tuple[list[str], str]:
        line = os.environ["COMP_WORDS"]
        words = split_arg_string(line)[1:]
        open_ = bool(words) and not line[-1:].isspace()
        return (words[:-1], words[-1]) if open_ else (words, "")


def register() -> None:
    """Use BashLine in place of click's class."""
    add_completion_class(BashLine, "bash")
