"""`notes session` and `notes edit`: show, change, exchange and remove the sessions on disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from textwrap import wrap
from time import time
from typing import TYPE_CHECKING, Any

import click

from notes_cli import output
from notes_cli.commands.options import (
    FILE_OR_PIPE,
    SESSIONS,
    json_option,
    library,
    model_settings,
    named,
    open_model,
    own_sessions,
)
from notes_cli.commands.remedies import print_callbacks, print_notice, worded
from notes_cli.commands.request import question_options
from notes_cli.commands.terminal import Command, Group, option, standard_input
from notes_cli.engine.pieces import Reason
from notes_cli.errors import NotesError, SessionError, reason
from notes_cli.explanations import attributes, edit_why, entry_why, erratum_as_json, timestamp
from notes_cli.output import counted
from notes_cli.text.names import human_age, typed

if TYPE_CHECKING:
    from notes_cli.library.global_errata import GlobalErratum
    from notes_cli.sessions.edits import Removed
    from notes_cli.sessions.folder import SessionFolder
    from notes_cli.sessions.state import Entry, State

SHORT = 50  # characters of a text in a table, or of a skill's text
_OPS = {
    "turn": "turn",
    "edit": "edit",
    "correct": "correction",
    "compact": "compaction",
    "forget": "cut",
    "snapshot": "damaged snapshot",
}


@click.group(cls=Group, options_metavar="", subcommand_metavar="COMMAND ...")
def session_command() -> None:
    """List, show, fork, undo, compact, export, import and remove sessions, and forget parts of them. `notes ask
    --session NAME` starts one, or continues it.

    \b
    Examples:
      notes session ls
      notes session show mine
      notes session fork mine other
      notes session export mine mine.notes.tar
      notes session import mine.notes.tar --name copied
    """


@session_command.command("ls")
@option("-q --quiet", "Names only, one a line.", is_flag=True)
@json_option
def ls(quiet: bool, json_: bool) -> None:
    """List sessions."""
    sessions = own_sessions()
    names = sessions.names()
    if quiet:
        for name in names:
            output.result(name)
        return
    found = []
    for name in names:
        facts: dict[str, Any] = {"name": name, "path": str(sessions.folder / name), "problem": None}
        try:
            facts |= _facts(sessions.find(name))
        except NotesError as error:
            facts["problem"] = worded(error)
        found.append(facts)
    if json_:
        output.as_json(found)
        return
    if not names:
        output.say(f'no sessions yet in {sessions.folder}. Begin one: notes ask "QUESTION" --session NAME')
        return
    columns, now, rows = ("name", "tokens", "turns", "size", "age", "model"), time(), list[tuple[str, ...]]()
    for facts in found:
        figures, model = ("", "", "", ""), facts["problem"]
        if model is None:
            size, age = output.human_size(facts["bytes"]), human_age(now - timestamp(facts["changed"]))
            figures, model = (str(facts["tokens"]), str(facts["turns"]), size, age), _model(facts)
        rows.append((facts["name"], *figures, model))
    output.table(columns, rows, right=columns[1:5])


@session_command.command("show")
@click.argument("name", shell_complete=SESSIONS)
@option("--pieces", "A table of the pieces of the prompt, as they are in the KV cache.", is_flag=True)
@json_option
def show(name: str, pieces: bool, json_: bool) -> None:
    """Show a session turn by turn: questions, answers, what tools returned, corrections and edits."""
    stored = own_sessions().find(name)
    state = stored.state
    facts = {"name": stored.name, "path": str(stored.folder), **_facts(stored)}
    if json_:
        keys = ("kind", "name", "text", "position", "tokens", "how", "turn")
        entries = [
            {**attributes(entry, *keys), "reason": entry.reason, "why": entry_why(entry)} for entry in state.entries
        ]
        facts |= {"memory": asdict(state.memory) if state.memory else None, "pending": list(state.pending.values())}
        output.as_json({"version": 1, **facts, "pieces": entries})
        return
    if pieces:
        rows = [
            (
                *(str(entry.turn), str(entry.position), str(entry.tokens)),
                *map(
                    output.line, (entry.kind, entry.name, entry.how, output.line(entry.text, SHORT), entry_why(entry))
                ),
            )
            for entry in state.entries
        ]
        columns = ("turn", "position", "tokens", "piece", "name", "how", "text", "why")
        output.table(columns, rows, right=columns[:3])
    else:
        print_conversation(state)
    if state.memory:
        output.result(output.line(f"memory {state.memory.name}, from {state.memory.reference}"))
    for field, value in state.fields.items():
        output.result(output.line(f"field {field} = {value}"))
    for correction in state.pending.values():
        output.result(output.line(f"correction before the next question: {correction}"))
    output.result(
        f"{counted(facts['turns'], 'turn')}, {counted(facts['tokens'], 'token')}, {output.human_size(facts['bytes'])}, "
        f"{_model(facts)}"
    )
    if state.states:
        kept = ", ".join(map(str, state.states))
        output.result(f"changes are decoded again from the last recurrent state before them, kept after tokens {kept}")


@session_command.command("rm")
@click.argument("names", shell_complete=SESSIONS, nargs=-1, required=True, metavar="NAME...")
@option("-y --yes", "Do not ask.", is_flag=True)
@json_option
def rm(names: tuple[str, ...], yes: bool, json_: bool) -> int:
    """Remove sessions. It asks first: a conversation cannot be repeated.

    \b
    Examples:
      notes session rm other copied -y
    """
    from notes_cli.library.safe_files import raise_file_limit

    sessions = own_sessions()
    names = tuple(sessions.known(*names))
    question = f"Remove {counted(len(names), 'session')}: {', '.join(names)}?"
    if not yes and not output.confirmed(question, ". Repeat with -y to remove without asking", "nothing was removed"):
        return 1
    raise_file_limit()  # all are locked at once
    removed = list(map(str, sessions.remove(*names)))
    output.document({"removed": removed}, "\n".join(removed), json_)
    return 0


@session_command.command("fork")
@click.argument("name", shell_complete=SESSIONS)
@click.argument("new")
@json_option
def fork(name: str, new: str, json_: bool) -> None:
    """Begin the session NEW as a copy of NAME as it is now. From there each goes its own way."""
    name, new = typed(name), typed(new)
    folder = str(own_sessions().fork(name, new))
    output.document({"name": new, "path": folder, "forked": name}, folder, json_)


@session_command.command("undo")
@click.argument("name", shell_complete=SESSIONS)
@json_option
def undo(name: str, json_: bool) -> None:
    """Take back the last turn, edit, compaction or cut of a session."""
    with own_sessions().locked(name, say=print_notice) as stored:
        undone = stored.undo()
    what = f": {output.line(undone['what'], SHORT)}" if undone["what"] else ""
    output.document({"name": name, **undone}, f"undid the {_OPS[undone['op']]}{what}", json_)


@session_command.command("compact")
@click.argument("name", shell_complete=SESSIONS)
@json_option
@model_settings()
def compact(name: str, json_: bool, **model: Any) -> None:
    """Take out the errata that later ones of the same field supersede.

    What comes after the first of them is decoded again, so that the session is as if they had never been there. An undo
    puts them back.
    """
    with open_model(session=name, **model) as opened, opened.session(name, new=False, say=print_notice) as session:
        outcome = session.compact()
    errata = f"{counted(len(outcome.names), 'erratum', 'errata')} ({', '.join(dict.fromkeys(outcome.names))})"
    line = (
        f"took out {errata}: {counted(outcome.tokens, 'token')} are left, {outcome.removed} fewer; "
        f"{outcome.decoded} of them were decoded again"
        if outcome.names
        else f"{outcome.decoded} tokens after errata that were cut out were decoded again"
        if outcome.decoded
        else f"nothing to take out: no erratum in session {name} is superseded by another"
    )
    facts = {"name": name, "fields": outcome.names, **attributes(outcome, "removed", "decoded", "tokens")}
    output.document(facts, line, json_)


@session_command.command("forget")
@click.argument("name")
@click.argument("parts", nargs=-1, metavar="PART...")
@option(
    "--method",
    "cut: move what follows, as it is (with recurrent layers: decode it again). suffix: decode it again, and keep "
    "nothing of the removed text.",
    type=click.Choice(["cut", "suffix"]),
    default="cut",
)
@option("--dry-run", "Only say what would be done.", is_flag=True)
@option("-y --yes", "Do not ask. It asks where there is no undo: --method suffix.", is_flag=True)
@json_option
@model_settings()
def forget(name: str, parts: tuple[str, ...], method: str, dry_run: bool, yes: bool, json_: bool, **model: Any) -> int:
    """Take parts out of a session: a turn (3), turns (3-5), a chain of thought (thought:3), what tools have returned
    (tool:3). `notes session show` has the numbers of the turns.

    What is left has the tokens of a session that never had them. By `cut` what follows is moved and not computed again:
    its rows were computed with what is gone and may carry notes of it, which `notes verify --session` measures. The
    removed text is still in the files, and an undo brings it back. By `suffix` all that follows is decoded again, and
    the removed text is nowhere in the session any more, nor is what came before it in its history; forks and exports
    keep theirs. Without PART, suffix is for what was cut before.

    The system message and the skills in it stay where turn 1 is forgotten. A correction that came with a removed turn
    and still holds is repeated before the next question.

    \b
    Examples:
      notes session forget mine 2-3 --dry-run
      notes session forget mine 3
      notes session forget mine 2 --method suffix -y
    """
    if method != "cut" and not (yes or dry_run):
        question = f"Forget {' '.join(parts) or 'what was cut before'} of session {name}, and its history, for good?"
        if not output.confirmed(question, ", and no undo. Repeat with -y to forget for good", "nothing was forgotten"):
            return 1
    with open_model(session=name, **model) as opened, opened.session(name, new=False, say=print_notice) as session:
        outcome = session.forget(*parts, method=method, dry=dry_run)
    keys = ("removed", "moved", "decoded", "remembering", "repeated", "skills", "tokens")
    facts = {"name": name, "method": method, "dry_run": dry_run, "forgotten": outcome.names}
    lines = "\n".join(_describe_forgotten(outcome, name, method, dry_run))
    output.document({**facts, **attributes(outcome, *keys)}, lines, json_)
    return 0


def _describe_forgotten(outcome: Removed, name: str, method: str, dry: bool) -> Iterator[str]:
    parts = ", ".join(outcome.names) or "what was cut before"
    yield (
        f"{'would forget' if dry else 'forgot'} {parts}: {counted(outcome.removed, 'token')} fewer, {outcome.tokens} "
        f"are left; {outcome.moved} moved, {outcome.decoded} decoded"
    )
    if outcome.skills:
        yield f"gone with it: {', '.join(outcome.skills)}"
    if outcome.repeated:
        yield f"corrections repeated before the next question: {', '.join(outcome.repeated)}"
    if outcome.remembering:
        yield (
            f"{counted(outcome.remembering, 'token')} after it {'were' if outcome.remembering > 1 else 'was'} computed "
            f"with it and may carry notes of it. To measure that: notes verify --session {name}. To decode them again: "
            f"notes session forget {name} --method suffix"
        )
    if method == "cut":
        yield f"the removed text stays in the session's files: notes session undo {name} brings it back"
    else:
        yield "the session's files have nothing of the removed text, and there is no undo; forks and exports keep it"


@session_command.command("export")
@click.argument("name", shell_complete=SESSIONS)
@click.argument("file", required=False, type=FILE_OR_PIPE)
@option("-f --force", "Write over a file that is there.", is_flag=True)
@json_option
def export(name: str, file: Path | None, force: bool, json_: bool) -> None:
    """Write a session into one file.

    FILE holds its snapshots and K/V rows: whoever has it can read all that was said. `-` is standard output; without
    FILE it is NAME.notes.tar, in the current folder.
    """
    from notes_cli.library.safe_files import replacing
    from notes_cli.sessions.archive import SUFFIX, save

    piped = str(file) == "-"
    path = file or Path(name + SUFFIX)
    if piped and (json_ or output.terminal()):
        raise click.UsageError("a session is not text: name a file, or pipe it on, without --json")
    with own_sessions().locked(name, reading=True, say=print_notice) as stored:
        if piped:
            save(stored, output.binary())
            return
        if path.exists() and not force:
            raise SessionError(f"{path} is there already. Choose another file, or write over it with -f")
        if not path.absolute().parent.is_dir():
            raise SessionError(f"there is no folder {path.parent}")
        try:
            with replacing(path) as temporary, temporary.open("wb") as out:
                count = save(stored, out)
        except OSError as error:
            raise SessionError(f"cannot write {path}: {reason(error)}. Nothing was changed") from error
    facts = {"name": name, "path": str(path), "files": count, "bytes": path.stat().st_size}
    output.document(facts, str(path), json_)


@session_command.command("import")
@click.argument("file", type=FILE_OR_PIPE)
@option("--name NAME", "What the session is to be called.  [default: as the file]")
@json_option
def import_(file: Path, name: str | None, json_: bool) -> None:
    """Make a session of an exported file.

    FILE is what `notes session export` has written; `-` is standard input. All of it is checked first. The session
    goes on with the model, RoPE and cache types that it was begun with.
    """
    from notes_cli.sessions.archive import load, name_of

    piped = str(file) == "-"
    if piped and name is None:
        raise click.UsageError("standard input has no name. Give the session one: --name NAME")
    if piped and standard_input(hint=False).isatty():
        raise click.UsageError("a session is not text: name a file, or pipe it in")
    name = name or name_of(file)
    with nullcontext(standard_input()) if piped else file.open("rb") as source:
        stored = load(own_sessions(), source, "standard input" if piped else str(file), name)
    output.document({"name": name, "path": str(stored.folder), **_facts(stored)}, str(stored.folder), json_)


def _facts(stored: SessionFolder) -> dict[str, Any]:
    state, header = stored.state, stored.header
    assert header is not None
    return {
        "model": header.model,
        "identity": header.identity.as_dict(),
        "cache": header.cache,
        "states": list(state.states),
        "tokens": len(state.tokens),
        **attributes(state, "turns", "edits", "fields"),
        "bytes": stored.nbytes,
        **attributes(stored, "created", "changed"),
    }


def _model(facts: dict[str, Any]) -> str:
    return output.line(f"{facts['identity']['model']} {facts['identity']['quantization']}")


INDENT = 12  # columns before a text, for its label


def print_conversation(state: State) -> None:
    width = output.width(0)
    for number in range(state.turns + 1):
        parts = [*parts_of_turn(state, number)]
        if parts and number:
            output.styled([(f"turn {number}", "bold")])
        for label, text in parts:
            first, *rest = _lines(label, text, width)
            output.styled([(first[:INDENT], "dim"), (first[INDENT:], "")])
            for line in rest:
                output.result(line)
        if parts:
            output.result("")


def parts_of_turn(state: State, number: int) -> Iterator[tuple[str, str]]:
    """Yield label, such as "user", and text of the parts of a turn, then of the edits after it; turn 0 has the edits
    before turn 1."""
    from notes_cli.sessions.state import TRACE  # loads numpy, as help does not

    entries = [entry for entry in state.entries if entry.turn == number]
    if number == 1 and state.system:
        yield "system", state.system
    if any(entry.kind == "result" for entry in entries):
        yield "tool", state.questions[number - 1]
    pieces_of_turn = (entry for entry in entries if entry.kind not in ("edit", TRACE))

    def merge_key(entry: Entry) -> tuple[str, str]:
        if entry.reason is Reason.THOUGHT_END:
            return "", ""
        return "thought" if entry.thought else entry.kind, entry.name

    for (kind, name), group in groupby(pieces_of_turn, merge_key):
        pieces = [*group]
        if kind == "splice":
            tokens = sum(piece.tokens for piece in pieces)
            spliced = sum(piece.tokens for piece in pieces if piece.how == "spliced")
            summary = f"{name}, {counted(tokens, 'token')}, {spliced} of them spliced"
            text = next((skill.text for skill in state.skills if skill.name == name), "")
            yield "skill", f"{summary}: {output.line(text, SHORT)}" if text else summary
        elif kind == "erratum":
            yield from (("correction", piece.text.strip()) for piece in pieces)
        elif kind in ("answer", "thought"):
            label = "assistant" if kind == "answer" else "thought"
            yield label, "".join(piece.text for piece in pieces).strip()
        elif kind == "question":
            yield "user", state.questions[number - 1]
    for entry in entries:
        if entry.kind == "edit":
            yield "edit", f"{entry.text} ({entry.how}): {entry_why(entry)}".removesuffix(": ")
        elif entry.kind == TRACE:
            yield "forgotten", f"{entry.text}: {entry_why(entry)}"


def _lines(label: str, text: str, width: int) -> list[str]:
    """Return a part as indented lines, with its label before the first."""
    lines = output.clean(text).splitlines() or [""]
    if width > 2 * INDENT:
        whole, lines = lines, []
        for line in whole:
            blanks = line[: len(line) - len(line.lstrip())]
            size = max(INDENT, width - INDENT - len(blanks))
            words = wrap(line.strip(), size, break_long_words=False, break_on_hyphens=False)
            lines += [blanks + part for part in words] or [""]
    before = [label.ljust(INDENT), *[" " * INDENT] * len(lines)]
    return [f"{head}{line}".rstrip() for head, line in zip(before, lines, strict=False)]


@click.command(cls=Command)
@click.argument("name", shell_complete=SESSIONS, required=False)
@option("--all", "Correct all sessions that have the field, and later ones.", name="everybody", is_flag=True)
@question_options(
    "fields",
    "method",
    fields={"help": "The new value. Repeatable."},
    method={
        "help": "erratum, field, field+erratum, or suffix: decode everything after it again.  [default: config.yaml's "
        "for the model, else field+erratum]",
        "rare": False,
    },
)
@json_option
@model_settings()
def edit_command(
    name: str | None, everybody: bool, fields: tuple[str, ...], method: str | None, json_: bool, **model: Any
) -> int:
    """Give fields of the session NAME other values. Each is an edit of its own, which undo takes back.

    An erratum precedes the next question; the other methods change the cache now. Where field was not
    enough, give the same value once more, by erratum or suffix.

    With --all every session that has the skill gets the correction with its next question, and so does every
    conversation of a server over this library and every later question with the skill, for as long as its text stays
    the same. Without --field these
    errata are listed. The value of the text takes one back.

    \b
    Examples:
      notes edit mine --field "Carrier=Kestrel Freight"
      notes edit mine --field "Delivery time=3 days" --method suffix
      notes edit mine --field store-handbook.Warranty="1 year"  # *.Warranty: all
      notes edit --all --field "Carrier=Kestrel Freight"
      notes edit --all                      # which corrections hold
    """
    from notes_cli.text.fields import parse_values

    if everybody == (name is not None):
        raise click.UsageError("name a session, or all of them with --all")
    if not fields:
        if name is not None or named("method"):
            raise click.UsageError("give the new value: --field NAME=VALUE")
        return _list_errata(json_)
    values = parse_values(fields)
    if name is None:
        if named("method"):
            raise click.UsageError("--all corrects by errata: --method is for one session")
        return _correct_all(values, json_, model)
    edits = []
    with open_model(session=name, **model) as opened, opened.session(name, new=False, say=print_notice) as session:
        for edit in session.edits(values, method, callbacks=print_callbacks()):
            edits.append(edit)
            if not json_:
                output.result(f"{edit.text}: {edit_why(edit)} ({edit.detail or edit.how})")
    if json_:
        documents = [
            {
                "field": edit.name,
                "value": edit.text.removeprefix(f"{edit.name}="),
                "method": edit.how,
                "chosen": edit.detail,
                "why": edit_why(edit),
                "rows": edit.rewritten,
            }
            for edit in edits
        ]
        output.as_json({"version": 1, "session": name, "edits": documents})
    return 0


def _correct_all(values: Mapping[str, str], json_: bool, model: Mapping[str, Any]) -> int:
    """Add global errata, and edit all sessions; return 1 if a session could not be edited."""
    from notes_cli.library.global_errata import GlobalErrata
    from notes_cli.sessions.session import add_errata, correct_sessions

    errata = GlobalErrata(library().folder)
    with open_model(**model) as opened:
        added = add_errata(opened.workspace, errata, values)
        outcomes = dict(correct_sessions(opened.workspace, errata))
    skipped = {name: worded(outcome) for name, outcome in outcomes.items() if isinstance(outcome, NotesError)}
    edited = [name for name, outcome in outcomes.items() if outcome and name not in skipped]
    if json_:
        output.as_json({**_errata_as_json(added), "sessions": edited, "skipped": skipped})
    else:
        for erratum in added:
            output.result(f"{erratum.skill}.{erratum.field}={erratum.value}: an erratum before the next question")
        output.result(f"{counted(len(edited), 'session')} edited")
        for name, why in skipped.items():
            output.warn(f"session {name} was not edited: {why}")
    return 1 if skipped else 0


def _list_errata(json_: bool) -> int:
    """List current global errata, also of skills that are not compiled at present."""
    from notes_cli.library.global_errata import ENDED, GlobalErrata

    store = library()
    errata = [erratum for erratum in GlobalErrata(store.folder).all() if erratum.was != ENDED]
    latest = {(erratum.skill, erratum.field): erratum for erratum in errata}
    current = []
    for erratum in latest.values():
        infos = [entry.info for entry in store.entries(erratum.skill) if entry.info is not None]
        values = {span.value for info in infos for span in info.fields if span.name == erratum.field}
        if erratum.value != erratum.was and (erratum.was in values or not infos):
            current.append((erratum, f"instead of {erratum.was}" + ("" if infos else ", when it is compiled again")))
    if json_:
        output.as_json({**_errata_as_json([erratum for erratum, _ in current]), "sessions": [], "skipped": {}})
        return 0
    for erratum, replaced in current:
        output.result(f"{erratum.skill}.{erratum.field}={erratum.value}, {replaced}")
    if not current:
        output.say("there is no correction for all sessions")
    return 0


def _errata_as_json(errata: Sequence[GlobalErratum]) -> dict[str, Any]:
    return {"version": 1, "errata": list(map(erratum_as_json, errata))}
