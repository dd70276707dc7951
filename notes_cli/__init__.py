"""notes: compile a skill once, splice it into any prompt, correct it with one line.

    import notes_cli as notes

    with notes.open() as model:
        handbook = model.compile("skills/store-handbook")
        answer = model.ask("Which carrier do we use?", splice=[handbook], errata={"Carrier": "Kestrel Freight"})
        print(answer)

`open` returns a Model. Its methods: `compile`, `segment` and `import_segment` for skills, `ask`, `stream` and
`ask_many` for questions (`aask` and `astream` for asyncio), `session` for conversations on disk, `verify` and `bench`
to measure. `help(notes.Model.ask)` lists the options of a question. Errors are NotesErrors. Submodules are imported on
first use of a name.
"""

from __future__ import annotations

TYPE_CHECKING = False  # importing typing takes as long as starting Python

__version__ = "0.1.0"

if TYPE_CHECKING:
    from notes_cli.api import Model, Session, open
    from notes_cli.config import Paths
    from notes_cli.editing.methods import Method
    from notes_cli.engine.limits import ContextOptions
    from notes_cli.engine.sampler import SamplerOptions
    from notes_cli.engine.segment import Segment
    from notes_cli.errors import (
        CompilingError,
        ContextLengthError,
        DamagedError,
        EngineError,
        GrammarError,
        HeldSessionError,
        ImageError,
        ModelError,
        NewerError,
        NotesError,
        Notice,
        SegmentError,
        SessionError,
        SkillError,
        TakenError,
        UnsupportedError,
        UnwritableError,
    )
    from notes_cli.measure.speed import Benching, Speed
    from notes_cli.measure.verify import EditReport, Report, SessionReport
    from notes_cli.runtime.generate import Decision
    from notes_cli.runtime.recompile import Compiled, Imported
    from notes_cli.runtime.request import Answer, Callbacks, Prefilled, Request, Text
    from notes_cli.sessions.edits import Removed
    from notes_cli.sessions.state import Entry
    from notes_cli.text.messages import ToolCall
    from notes_cli.text.skill import Skill, load_skill

_MODULES = {
    "api": ("Model", "Session", "open"),
    "config": ("Paths",),
    "editing.methods": ("Method",),
    "runtime.generate": ("Decision",),
    "engine.limits": ("ContextOptions",),
    "engine.sampler": ("SamplerOptions",),
    "engine.segment": ("Segment",),
    "errors": (
        *("CompilingError", "ContextLengthError", "DamagedError", "EngineError", "GrammarError", "HeldSessionError"),
        *("ImageError", "ModelError", "NewerError", "NotesError", "Notice", "SegmentError"),
        *("SessionError", "SkillError", "TakenError", "UnsupportedError", "UnwritableError"),
    ),
    "measure.speed": ("Benching", "Speed"),
    "measure.verify": ("EditReport", "Report", "SessionReport"),
    "runtime.recompile": ("Compiled", "Imported"),
    "runtime.request": ("Answer", "Callbacks", "Prefilled", "Request", "Text"),
    "sessions.edits": ("Removed",),
    "sessions.state": ("Entry",),
    "text.messages": ("ToolCall",),
    "text.skill": ("Skill", "load_skill"),
}
__all__ = [
    "Answer",
    "Benching",
    "Callbacks",
    "Compiled",
    "CompilingError",
    "ContextLengthError",
    "ContextOptions",
    "DamagedError",
    "Decision",
    "EditReport",
    "EngineError",
    "Entry",
    "GrammarError",
    "HeldSessionError",
    "ImageError",
    "Imported",
    "Method",
    "Model",
    "ModelError",
    "NewerError",
    "NotesError",
    "Notice",
    "Paths",
    "Prefilled",
    "Removed",
    "Report",
    "Request",
    "SamplerOptions",
    "Segment",
    "SegmentError",
    "Session",
    "SessionError",
    "SessionReport",
    "Skill",
    "SkillError",
    "Speed",
    "TakenError",
    "Text",
    "ToolCall",
    "UnsupportedError",
    "UnwritableError",
    "load_skill",
    "open",
]


def __getattr__(name: str) -> object:
    for module, names in _MODULES.items():
        if name in names:
            import importlib

            return getattr(importlib.import_module(f"notes_cli.{module}"), name)
    raise AttributeError(f"module 'notes_cli' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the public names, for help and completion."""
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
