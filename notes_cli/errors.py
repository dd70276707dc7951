"""The errors of notes: each message says in one line what, which value and what to do.

The command line prints it and exits 1.
"""

from shlex import quote


class NotesError(Exception):
    """Base of everything that notes raises on purpose."""


class SkillError(NotesError):
    """A skill text that cannot be read: missing, empty, broken front matter, a field that is not there."""


class SegmentError(NotesError):
    """A compiled segment that must not be used: damaged, of another format, or of another model."""


class DamagedError(SegmentError):
    """Bytes that are no sound segment. Not: a file that the system did not let us read now."""


class TakenError(SegmentError):
    """A name, or a file, that holds a skill whose text came from elsewhere; it would be lost."""


class UnwritableError(SegmentError):
    """A segment that cannot be written: the disk is full, or the folder not ours to write in."""


class SessionError(NotesError):
    """A session that is not there, in use, damaged, or of another model."""


class ModelError(NotesError):
    """A model that cannot be loaded or asked."""


class EngineError(NotesError):
    """The engine refused or failed; the notebook is as it was before the call."""


class UnsupportedError(EngineError):
    """This model or context cannot do the operation; the message holds the reason."""


class OutdatedError(NotesError):
    """A profile that an older notes wrote, by a rule that is not followed any more."""


class OutputError(NotesError):
    """What was found cannot be printed."""


class UnreadError(OutputError):
    """Whoever read what is printed has gone: `notes ls | head -1`. Nobody is told."""


class AgainError(NotesError):
    """A skill that was compiled in a way that does not serve. The command says `options`, and which model."""

    def __init__(self, why: str, name: str, options: str) -> None:
        super().__init__(f"{why}. Run: notes compile --from {quote(name)} {options}")
        self.why, self.name, self.options = why, name, options


def reason(error: OSError) -> str:
    """What the system says of an error; some say it in another place, or nothing."""
    return error.strerror or str(error) or type(error).__name__
