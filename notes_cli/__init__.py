"""notes: compile a skill once, splice it into any prompt, correct it with one line.

The Python API behind the command line. Importing the package loads nothing; naming one of these does:

    from notes_cli import Model, Skill, Notebook
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing's, which takes as long to load as all of Python

__version__ = "0.1.0"

if TYPE_CHECKING:
    from notes_cli.engine.context import Context, ContextOptions
    from notes_cli.engine.model import Model
    from notes_cli.engine.notebook import Notebook
    from notes_cli.engine.sampler import Sampler, SamplerOptions
    from notes_cli.engine.segment import Segment
    from notes_cli.errors import NotesError
    from notes_cli.library.container import open_segment, write_segment
    from notes_cli.runtime.assembling import Prompt, assemble
    from notes_cli.runtime.compiling import compile_skill
    from notes_cli.runtime.workspace import Workspace
    from notes_cli.text.skill import Skill, load_skill

_HOMES = {
    "Context": "engine.context",
    "ContextOptions": "engine.context",
    "Model": "engine.model",
    "Notebook": "engine.notebook",
    "NotesError": "errors",
    "Prompt": "runtime.assembling",
    "Sampler": "engine.sampler",
    "SamplerOptions": "engine.sampler",
    "Segment": "engine.segment",
    "Skill": "text.skill",
    "Workspace": "runtime.workspace",
    "compile_skill": "runtime.compiling",
    "assemble": "runtime.assembling",
    "load_skill": "text.skill",
    "open_segment": "library.container",
    "write_segment": "library.container",
}
__all__ = [
    "Context",
    "ContextOptions",
    "Model",
    "Notebook",
    "NotesError",
    "Prompt",
    "Sampler",
    "SamplerOptions",
    "Segment",
    "Skill",
    "Workspace",
    "assemble",
    "compile_skill",
    "load_skill",
    "open_segment",
    "write_segment",
]


def __getattr__(name: str) -> object:
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(f"notes_cli.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'notes_cli' has no attribute {name!r}")
