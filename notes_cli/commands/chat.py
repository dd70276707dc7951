"""`notes chat`: a conversation in the terminal, which is a session on disk, with one load of the model."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from notes_cli import output
from notes_cli.commands.options import SESSIONS, Number, answers_of, model_options, named, open_model, without_memory
from notes_cli.commands.remedies import print_notice, worded
from notes_cli.commands.request import ANSWER, AnswerPrinter, question_options, read_constraints
from notes_cli.commands.terminal import Command, ended_by_ctrl_c, standard_input
from notes_cli.errors import NotesError

if TYPE_CHECKING:
    from notes_cli.api import Model, Session

PROMPT, MORE = "> ", ". "
QUESTION = ("splice", "memory", "errata", "system", *ANSWER)  # options of each
HELP = """/erratum FIELD=VALUE  correct a field, or anything in words; it comes with the next question
/splice NAME          splice a skill with the next question
/skills               the skills of this conversation, and the compiled ones
/show                 the conversation
/undo                 take back the last turn
/exit                 end; so do Ctrl-D and Ctrl-C. The conversation stays: notes chat NAME
Ctrl-C in an answer ends the answer. A line that ends with \\ goes on in the next one."""


@click.command(cls=Command)
@click.argument("name", required=False, shell_complete=SESSIONS)
@question_options(
    *QUESTION,
    max_tokens={"help": "At most so many tokens of an answer.", "type": Number(1), "default": 1024},
    choices={"rare": True},
    json_schema={"rare": True},
)
@model_options
def command(name: str | None, **given: Any) -> None:
    """Talk with a model. The conversation is the session NAME, which begins or goes on; without NAME it gets one.

    Type /help for commands, such as /erratum and /undo. With input from a pipe or a file, as in the last example, the
    exit status is 1 if a line failed.

    \b
    Examples:
      notes chat
      notes chat talk --splice store-handbook
      notes chat --splice store-handbook < questions.txt
    """
    name = name or datetime.now().strftime("chat-%Y%m%d-%H%M%S")
    options = {key: given.pop(key) for key in QUESTION}
    options |= {"choices": answers_of(options["choices"]), **read_constraints(options)}
    options["seed"] = time.time_ns() & 0xFFFFFFFF if options["seed"] is None else options["seed"]
    opened = open_model(session=name, begins=True, **given)
    with opened as model, model.session(name, say=print_notice) as session:
        turns = f", {output.counted(session.turns, 'turn')} so far" if session.turns else ""
        output.say(f"session {name} with {model.name}{turns}; /help")
        chat = Chat(model, session, options)
        for line in _lines():
            if not chat.handle(line):
                break
        chat.end()
        if chat.failed and not _interactive():
            raise NotesError(f"{chat.failed} of the lines failed", "The messages above say why")


class Chat:
    """A session, and the skills and corrections that come with its next question."""

    def __init__(self, model: Model, session: Session, options: dict[str, Any]) -> None:
        self._model, self._session = model, session
        self.failed = 0  # lines
        self._typed: list[str] = []  # corrections and skills that wait for the next question
        for option in ("splice", "errata", "system"):  # from a file or a variable they are for the first turn
            if not session.empty and not named(option):
                options[option] = None
        skills = options.pop("splice") or ()
        if options["memory"]:
            skills = without_memory(skills, options["memory"])
        self._splice = [name for name in skills if name not in self._used]
        self._errata, self._system = [*(options.pop("errata") or ())], options.pop("system")
        if self._system is not None and not session.empty:
            raise NotesError(f"session {session.name} has begun: its system text belongs to its first turn")
        self._options = options

    @property
    def _used(self) -> set[str]:
        return {entry.name for entry in self._session.entries if entry.kind == "splice"}

    def handle(self, line: str) -> bool:
        """Answer a question, or run a command. Returns False at the end. Errors are printed."""
        try:
            if line.startswith("/"):
                return self._run(*line[1:].split(maxsplit=1))
            self._ask(line)
        except NotesError as error:
            self.failed += 1
            output.error(worded(error))
        return True

    def end(self) -> None:
        """Name the corrections and skills that no question followed, which are lost."""
        if self._typed:
            self.failed += len(self._typed)
            output.say(f"left out, because no question followed: {output.line(', '.join(self._typed))}")

    def _run(self, command: str = "", argument: str = "") -> bool:
        argument = argument.strip()
        if command == "erratum":
            if not argument:
                raise NotesError("/erratum needs a correction", "Write /erratum FIELD=VALUE, or a sentence")
            self._errata.append(argument)
            self._announce(argument)
        elif command == "splice":
            self._model.segment(argument)  # it exists and fits
            self._splice.append(argument)
            self._announce(argument)
        elif command == "skills":
            used = self._used | {*self._splice}
            compiled = {entry.info.name for entry in self._model.workspace.library.entries() if entry.info}
            for name in sorted(used | compiled):
                output.result(f"{'*' if name in used else ' '} {name}")
        elif command == "show":
            from notes_cli.commands.session import print_conversation

            if self._session.empty:
                raise NotesError("there is no turn yet")
            print_conversation(self._model.sessions.find(self._session.name).state)
        elif command == "undo":
            undone = self._session.undo()
            output.say(f"took back: {output.line(undone['what'] or undone['op'], 60)}")
        elif command == "help":
            output.result(HELP)
        elif command not in ("exit", "quit"):
            names = "/erratum, /splice, /skills, /show, /undo, /help"
            raise NotesError(f"there is no command /{command}", f"There are {names}")
        return command not in ("exit", "quit")

    def _ask(self, question: str) -> None:
        first = {"system": self._system} if self._session.empty else {}
        with AnswerPrinter(self._options) as printer, ended_by_ctrl_c(wanted=_interactive()) as ended:
            callbacks = replace(printer.callbacks(self._model.workspace), ended=ended)
            errata, splice = self._errata, self._splice
            self._errata, self._splice, self._typed = [], [], []
            try:
                self._session.ask(question, splice=splice, errata=errata, callbacks=callbacks, **first, **self._options)
            except NotesError:  # perhaps because of them
                if left_out := ", ".join([*splice, *errata]):
                    output.say(f"left out from now on: {output.line(left_out)}")
                raise

    def _announce(self, typed: str) -> None:
        self._typed.append(typed)
        output.say(f"with the next question: {output.line(typed)}")


def _interactive() -> bool:
    return sys.stdin is not None and sys.stdin.isatty() and output.terminal()


def _lines() -> Iterator[str]:
    """Yield lines of standard input, without blank ones; on a terminal with a prompt, history and editing."""
    interactive = _interactive()
    parts: list[str] = []
    while True:
        try:
            if interactive:
                line = output.read_line(MORE if parts else PROMPT)
            else:
                raw = standard_input(hint=False).readline()
                if not (raw or parts):
                    return
                line = raw.decode(errors="replace").rstrip("\r\n")
        except EOFError:
            output.say("")
            return
        parts.append(line.removesuffix("\\"))
        if not line.endswith("\\"):
            text, parts = "\n".join(parts).strip(), []
            if text:
                yield text
