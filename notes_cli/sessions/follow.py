"""Renders the turns of a session to tokens, and finds the patches by which the sequence follows a changed conversation.

A turn is rendered as it was when it was asked, so that a conversation equals one that grew by turns: the first with the
system message, a later one after the answer before it. Turns that an operation leaves are not rendered again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import SequenceMatcher

import numpy as np

from notes_cli.editing.methods import Change
from notes_cli.engine.positions import Image, Patch, position_map
from notes_cli.engine.segment import Tokens
from notes_cli.errors import EngineError
from notes_cli.runtime.prompt import results_turn
from notes_cli.runtime.workspace import Workspace
from notes_cli.sessions.state import Entry, Part, State, Turn
from notes_cli.text.messages import Conversation
from notes_cli.text.prompt import build, next_turn


def render(workspace: Workspace, turn: Turn, skills: Mapping[str, Tokens], *, first: bool) -> list[Part]:
    """Render a turn. `skills`: the tokens of each that it has. `first`: no turn is before it. Raises ModelError if the
    chat template has no place for a message."""
    template = workspace.template if turn.reasoning == "none" else workspace.thinking_template
    template = template.earlier if turn.reasoning == "removed" else template
    if turn.results:
        chunks = results_turn(workspace, template, turn.results)
    else:
        chunks = build(template, Conversation(turn.messages)) if first else next_turn(template, turn.messages)
    names = {"erratum": (part.key for part in turn.errata), "result": (name for name, _ in turn.results)}
    parts = []
    for number, chunk in enumerate(chunks):
        ids = skills[chunk.name] if chunk.kind == "splice" else workspace.tokenize(chunk)
        if first and number == 0:
            opening = workspace.with_bos(ids[:0] if chunk.kind == "splice" else ids)
            if chunk.kind == "splice" and len(opening):
                parts.append(Part(tuple(map(int, opening)), "text"))
            ids = ids if chunk.kind == "splice" else opening
        name = next(names[chunk.kind], "") if chunk.kind in names else chunk.name
        parts.append(Part(tuple(map(int, ids)), chunk.kind, name))
    return [*parts, *turn.answer]


def parts_of(state: State, turns: Iterable[int]) -> list[Part]:
    """Return the parts of some turns, from 0, as they are in the sequence."""
    parts: list[Part] = []
    for entry in (entry for turn in turns for entry in state.turn_pieces(turn + 1)):
        tokens = tuple(state.tokens[entry.position : entry.end])
        if entry.kind == "splice" and parts and (parts[-1].kind, parts[-1].name) == ("splice", entry.name):
            parts[-1] = replace(parts[-1], tokens=(*parts[-1].tokens, *tokens))
        else:
            marks = (entry.reason, entry.detail) if entry.kind == "answer" else ()
            parts.append(Part(tokens, entry.kind, entry.name, *marks))
    return parts


def follow(
    workspace: Workspace, before: State, after: State, kept: Sequence[int], changes: Mapping[str, Change]
) -> tuple[list[Patch], State]:
    """Return the patches of the sequence by which it follows a changed conversation, and the state with tokens, pieces
    and positions after them; its new rows have no file yet. `kept`: for each turn of `after` its number in `before`,
    from 0. `changes`: of skills that have other values. Raises EngineError for a patch within an image."""
    skills = {one.name: np.array(before.tokens[slice(*before.span(one.name))], np.int32) for one in before.skills}
    skills |= {name: changed.tokens for name, changed in changes.items()}
    patches, layout, done = list[Patch](), list[list[Part]](), 0
    for number, (turn, old) in enumerate(zip(after.conversation, kept, strict=True)):
        same = turn == before.conversation[old] and (number == 0) == (old == 0) and not changes.keys() & {*turn.skills}
        parts = parts_of(before, [old]) if same else render(workspace, turn, skills, first=number == 0)
        layout.append(parts)
        patches += _difference(parts_of(before, range(done, old + 1)), parts, _start(before, done), changes)
        done = old + 1
    if _start(before, done) < len(before.tokens):
        patches.append(Patch(_start(before, done), len(before.tokens), ()))
    patches = _applicable(patches, before.tokens, before.images)
    moved = after.patched(patches)
    if moved.tokens != [token for parts in layout for part in parts for token in part.tokens]:
        raise EngineError("the changed tokens of the session are not those of its conversation")  # never wrong silently
    pieces = tuple(_pieces(workspace, before, moved, layout, patches))
    return patches, replace(moved, pieces=pieces)


def _start(state: State, turn: int) -> int:
    return next((entry.position for entry in state.pieces if entry.turn > turn), len(state.tokens))


def _difference(old: Sequence[Part], new: Sequence[Part], start: int, changes: Mapping[str, Change]) -> Iterator[Patch]:
    """Yield the patches between two lists of parts, whose first token is at `start`."""
    at = [start]
    for part in old:
        at.append(at[-1] + len(part.tokens))
    matcher = SequenceMatcher(None, [part.key for part in old], [part.key for part in new], autojunk=False)
    for tag, first, last, new_first, new_last in matcher.get_opcodes():
        if tag != "equal":
            yield from _replaced(old[first:last], new[new_first:new_last], at[first])
            continue
        for part, place in zip(old[first:last], at[first:last], strict=True):
            if part.kind == "splice" and part.name in changes:
                yield from (patch.offset(place) for patch in changes[part.name].patches)


def _replaced(old: Sequence[Part], new: Sequence[Part], start: int) -> Iterator[Patch]:
    """Yield the patch of what differs between two lists of parts without an equal one."""
    a, b = (
        [(part.name if part.kind == "splice" else "", token) for part in parts for token in part.tokens]
        for parts in (old, new)
    )
    size = min(len(a), len(b))
    head = next((place for place in range(size) if a[place] != b[place]), size)
    tail = next((place for place in range(size - head) if a[-1 - place] != b[-1 - place]), size - head)
    if len(a) > head + tail or len(b) > head + tail:
        yield Patch(start + head, start + len(a) - tail, tuple(token for _, token in b[head : len(b) - tail]))


def _applicable(patches: Iterable[Patch], tokens: Sequence[int], images: Sequence[Image]) -> list[Patch]:
    """Merge adjacent patches, and extend one that only inserts by a token beside it: each must replace some."""
    merged: list[Patch] = []
    for patch in patches:
        if patch.first == patch.last and not (merged and merged[-1].last == patch.first):
            inside = any(image.first < patch.first <= image.last for image in images)
            if patch.first and not inside:
                patch = Patch(patch.first - 1, patch.last, (tokens[patch.first - 1], *patch.tokens))
            else:
                patch = Patch(patch.first, patch.last + 1, (*patch.tokens, tokens[patch.last]))
        if merged and merged[-1].last >= patch.first:
            patch = Patch(merged[-1].first, patch.last, (*merged.pop().tokens, *patch.tokens))
        merged.append(patch)
    return merged


def _pieces(
    workspace: Workspace, before: State, after: State, layout: Sequence[Sequence[Part]], patches: Sequence[Patch]
) -> Iterator[Entry]:
    """Yield a piece for each part of each turn, with the origin of its K/V from the pieces that its tokens were in."""
    shift = position_map(patches)
    old = [(shift(entry.position), shift(entry.end), entry) for entry in before.pieces]
    old = [(start, end, entry) for start, end, entry in old if start < end]
    end, number = 0, 0
    for turn, parts in enumerate(layout, 1):
        for part in parts:
            start, end = end, end + len(part.tokens)
            spans: list[tuple[int, int, Entry]] = []
            while number < len(old) and old[number][0] < end:
                first, last, entry = old[number]
                entry = replace(entry, kind=part.kind, name=part.name, turn=turn)
                if "answer" in (part.kind, old[number][2].kind):
                    entry = replace(entry, reason=part.reason, detail=part.detail)
                first, last = max(first, start), min(last, end)
                if spans and made(spans[-1][2]) == made(entry):
                    first, _, entry = spans.pop()
                spans.append((first, last, entry))
                if old[number][1] > end:
                    break
                number += 1
            for first, last, entry in spans:
                if before.tokens[entry.position : entry.end] != after.tokens[first:last]:
                    entry = replace(entry, text=text_of(workspace, after, first, last))
                yield replace(entry, position=first, tokens=last - first)


def made(entry: Entry) -> Entry:
    """Return how the K/V of an entry was made."""
    return replace(entry, position=0, tokens=0, text="")


def text_of(workspace: Workspace, state: State, first: int, last: int) -> str:
    """Return the text of tokens [first, last), without the rows of images."""
    inside = {row for image in state.images for row in range(image.first, image.last)}
    visible = [state.tokens[place] for place in range(first, last) if place not in inside]
    return workspace.model.text(visible, special=True)
