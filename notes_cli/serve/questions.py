"""One question with the prompt of `notes ask`: its skills, corrections and settings, before it has a sequence."""

from __future__ import annotations

from dataclasses import dataclass

from notes_cli.engine.decision import variants_of
from notes_cli.engine.segment import Segment
from notes_cli.errors import Notice
from notes_cli.runtime.asking import Listener, Request, room_for
from notes_cli.runtime.assembling import cells_meanwhile
from notes_cli.runtime.opening import tell_edited
from notes_cli.runtime.prompt import Parts, Prompt, parts_of
from notes_cli.runtime.settling import Draft, drafted
from notes_cli.runtime.workspace import Workspace
from notes_cli.serve.arranging import Desk, check_bias, turn_of
from notes_cli.serve.parsing import Asked


@dataclass(frozen=True, slots=True)
class Question:
    """A request whose settings are resolved, and the cells that it takes."""

    draft: Draft
    prompt: Prompt
    parts: Parts
    tokens: int  # cells of the prompt, and those that edits of it take meanwhile
    spare: int  # of the answer, at most
    looks: int  # to look ahead in, for a choice
    notices: list[str]


def settle(desk: Desk, asked: Asked, *, dry: bool = False) -> Question:
    """Open the skills of a request and resolve its settings. `dry`: images are not compiled. Raise NotesError."""
    workspace = desk.workspace
    request = turn_of(desk.shelf, asked, desk.names, desk.most, begun=False, dry=dry)
    check_bias(workspace, asked)
    notices = edited_notices(workspace, request)
    listener = Listener(notice=lambda notice: notices.append(str(notice)))
    draft = drafted(workspace, request, listener, dry=dry)
    prompt = draft.prompt
    parts = parts_of(workspace, prompt)
    tokens = parts.count + cells_meanwhile(prompt, parts)
    spare = room_for(workspace, draft.request, draft.settings.think)
    workspace.check_length(tokens + min(spare, 1))
    return Question(draft, prompt, parts, tokens, spare, lookahead(workspace, request), notices)


def edited_notices(workspace: Workspace, request: Request) -> list[str]:
    """A notice for each skill whose text was edited since it was compiled."""
    found: list[Notice] = []
    for one in request.splice:
        if isinstance(one, Segment):
            tell_edited(workspace, one, found.append)
    return list(map(str, found))


def lookahead(workspace: Workspace, request: Request) -> int:
    """Cells in which the longest of the request's choices is decoded to score it; 0 without choices."""
    variants = variants_of(workspace.model, request.choices or ()).values()
    return max((len(option) for options in variants for option in options), default=0)
