"""A session at work: a notebook that is put back from disk, goes on by turns and edits, and keeps each of them.

Rows come back as they were read (rows.py), so going on equals never having stopped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from notes_cli.editing.change import Change, change
from notes_cli.editing.methods import Method, prepare
from notes_cli.engine.notebook import Notebook
from notes_cli.engine.patches import Patch, Range, align, disturbed, patched
from notes_cli.engine.pieces import Piece, Reason
from notes_cli.engine.segment import Segment
from notes_cli.errors import NotesError, SessionError, SkillError, UnsupportedError
from notes_cli.runtime.assembling import Prompt, changes_of, known_fields, place_segment
from notes_cli.runtime.settings import DEFAULT_SEAM, NEAR, defaults
from notes_cli.runtime.workspace import Workspace
from notes_cli.sessions.folder import SessionFolder
from notes_cli.sessions.lines import Line
from notes_cli.sessions.origin import Origin, as_line
from notes_cli.sessions.rows import Rows
from notes_cli.sessions.state import Entry, SkillText, State
from notes_cli.text.erratum import Erratum, read_errata, word
from notes_cli.text.fields import clean_value
from notes_cli.text.keys import listed
from notes_cli.text.messages import BETWEEN, user_message
from notes_cli.text.prompt import next_turn
from notes_cli.text.references import Known, Reference

EDITS = ("erratum", "field", "field+erratum", "selective", "blend", "suffix")  # what makes sense inside a notebook
INSTEAD = "Use erratum or suffix"
# Edits in place that may move rows: each rounds the keys to the cache's type once more (docs/LOG.md has what that comes
# to). f32 takes any number.
MOVES = {"f16": 64, "bf16": 8, "q8_0": 4}
FEW_MOVES = 2  # of any other type


@dataclass(frozen=True, slots=True)
class Edited:
    """An edit that was made."""

    field: str
    value: str
    method: str
    chosen: str  # why by this method; empty if it was named
    origin: Origin  # what was done

    @property
    def rows(self) -> int:
        """How many were computed."""
        return self.origin.rewritten


@dataclass(frozen=True, slots=True)
class Compacted:
    """What a compaction took out; nothing, if no erratum was superseded."""

    fields: tuple[str, ...] = ()  # of each erratum that was taken out
    removed: int = 0  # tokens that were taken out
    decoded: int = 0  # tokens that were decoded anew


class Session:
    """A session in a workspace, whose one context is its alone, for as long as its lock is held.

    Raise SessionError if it is another model's.
    """

    def __init__(self, workspace: Workspace, stored: SessionFolder) -> None:
        self.workspace = workspace
        self.stored = stored
        self._rows = Rows(workspace, stored)
        self._notebook: Notebook | None = None
        self._question = ""  # of the turn at hand, as are its skills and what is said of fields
        self._skills: list[SkillText] = []
        self._said: dict[str, str] = {}
        for operation in ("read", "restore"):
            reason = workspace.context.supports(operation)
            if reason:
                raise UnsupportedError(f"a session cannot be kept for {workspace.model.name}: {reason}")
        self._rows.check()

    @property
    def state(self) -> State:
        return self.stored.state

    @property
    def empty(self) -> bool:
        """Whether the next turn is the first one."""
        return not self.state.live

    # Turns.

    def begin(self, prompt: Prompt, notebook: Notebook) -> None:
        """The first turn's prompt has been laid into this notebook."""
        changes = changes_of(self.workspace, prompt) if prompt.method.touches else {}
        self._notebook, self._question = notebook, prompt.question
        errata = [*prompt.said, *prompt.errata]
        names = iter([erratum.key for erratum in errata])
        notebook.pieces = [
            replace(piece, name=next(names)) if piece.kind == "erratum" else piece for piece in notebook.pieces
        ]
        self._skills = [_spliced(segment, changes.get(segment.name), notebook) for segment in prompt.segments]
        self._said = _fields_of(errata)

    def follow(
        self,
        question: str,
        errata: Sequence[str] = (),
        wording: str | None = None,
        room: int = 0,
        think: bool = False,
        *,
        segments: Sequence[Segment] = (),
        seam: int = DEFAULT_SEAM,
        strict: bool = False,
    ) -> Notebook:
        """Lay the next turn behind what is there, the errata of edits before those given.

        `think`: it ends where a chain of thought begins. `segments`: skills that stand in this turn's user message.
        Raise SessionError for one that the session has already; `strict`: UnsupportedError for one that cannot be
        spliced.
        """
        skills = {segment.name: segment for segment in segments}
        self._check_new(segments)
        known = known_fields(*self.state.skills, *segments)
        given = read_errata(errata, known)
        self._question, self._said = question, _fields_of(given)
        waiting = {key: said for key, said in self._waiting(known, wording).items() if key not in self._said}
        names = iter([*waiting, *(part.key for part in given)])
        said = [*waiting.values(), *(word(part, wording) for part in given)]
        template = self.workspace.thinking_template if think else self.workspace.template
        chunks = next_turn(template, [user_message(question, skills=list(skills), errata=said)])
        tokens = [
            skills[chunk.name].tokens if chunk.kind == "splice" else self.workspace.tokenize(chunk) for chunk in chunks
        ]
        self.workspace.make_room(len(self.state.tokens) + sum(map(len, tokens)), room)
        for segment in segments:  # again: a larger context may rotate otherwise (LongRoPE)
            self.workspace.check(segment)
        notebook = self.notebook
        for chunk, ids in zip(chunks, tokens, strict=True):
            if chunk.kind == "splice":
                place_segment(notebook, skills[chunk.name], seam, strict=strict)
            else:
                notebook.append(ids, chunk.kind, next(names) if chunk.kind == "erratum" else chunk.name)
        self._skills = [_spliced(segment, None, notebook) for segment in segments]
        return notebook

    def _waiting(self, known: Known, wording: str | None) -> dict[str, str]:
        """The errata that are still to be said, by the key of their field. One whose field other skills of this turn
        have, too, says from now on whose it is."""
        waiting = {}
        for key, said in self.state.pending.items():
            for one in self.state.known.find(key)[:1]:
                now = known.key(one.skill, one.field)
                if now != key:
                    key, said = now, word(Erratum(one.field, self.state.values[key], "", one.skill), wording)
            waiting[key] = said
        return waiting

    def targets(self, name: str, value: str) -> list[str]:
        """The keys of the fields that an edit is for: one, or for `*.field` those of all skills whose value is another.

        Raise SkillError where there is none, and for a name without a skill that several skills have.
        """
        keys = [one.key for one in self.state.known.resolve(name, f"no skill of session {self.stored.name} has")]
        others = [key for key in keys if self.state.fields[key] != clean_value(key, value)]
        return others or keys

    def _check_new(self, segments: Sequence[Segment]) -> None:
        seen = {skill.name for skill in self.state.skills}
        for segment in segments:
            if segment.name in seen:
                name = self.stored.name
                raise SessionError(f"{segment.name} stands in session {name} already. A field of it: notes edit {name}")
            seen.add(segment.name)

    def keep(self, answer: str = "") -> None:
        """The turn at hand is complete: write it down. `answer`: one that was chosen, not written."""
        notebook, start = self._notebook, len(self.state.tokens)
        assert notebook is not None
        if answer:
            notebook.append(self.workspace.model.tokenize(answer), "answer", reason=Reason.CHOSEN)
        notebook.flush()
        pieces = [self._told(piece, notebook) for piece in notebook.pieces if piece.position >= start]
        skills = [asdict(skill) for skill in self._skills]
        line = {"op": "turn", "question": self._question, "pieces": pieces, "skills": skills, "said": self._said}
        self._rows.commit(line, [(start, len(notebook))], self._notebook)

    def _told(self, piece: Piece, notebook: Notebook) -> Line:
        ids = [int(token) for token in notebook.tokens[piece.position : piece.position + piece.tokens]]
        text = b"".join(self.workspace.model.piece(token, special=True) for token in ids).decode(errors="replace")
        return {
            "kind": piece.kind,
            "name": piece.name,
            "text": text,
            "position": piece.position,
            "how": piece.how,
            **as_line(Origin.of(piece)),
            "tokens": ids,
        }

    # Edits.

    def check(self, name: str, value: str, method: Method | None = None) -> str:
        """The value as it will be written. Raise NotesError where an edit cannot be."""
        key = self._reference(name).key
        value = clean_value(key, value)
        if self.state.fields[key] == value:
            raise SkillError(f"{key} is {value} already. Nothing was changed")
        if method and method.name not in EDITS:
            raise NotesError(f"the edit method {method.name} is not for a session. Choose among {', '.join(EDITS)}")
        return value

    def edit(self, name: str, value: str, method: Method | None = None) -> Edited:
        """Give a field another value, by the method that this model's profile has if none is named.

        Raise NotesError where that cannot be.
        """
        value, name = self.check(name, value, method), self._reference(name).key
        if method is not None:
            return self._edit(name, value, method, "")
        method, chosen = self._choose(name, value)
        try:
            return self._edit(name, value, method, chosen)
        except UnsupportedError as error:  # on this model, or in this place
            return self._edit(name, value, Method("erratum"), f"{chosen}; erratum instead: {error.what}")

    def _reference(self, name: str) -> Reference:
        """The one field that the name is for. Raise SkillError where that is none, or several."""
        found = self.state.known.resolve(name, f"no skill of session {self.stored.name} has")
        if len(found) > 1:
            raise SkillError(f"{name} stands for {listed([one.key for one in found])}: edit one at a time")
        return found[0]

    def _edit(self, name: str, value: str, method: Method, chosen: str) -> Edited:
        patches, also, skills, passed = self._plan(name, value, method) if method.touches else ([], [], [], 0)
        if method.touches and not method.says and not patches:
            raise SkillError(f"the text says {name}={value} as it is, an erratum says otherwise. Use --method erratum")
        places = self._replace(patches, also, method) if patches else []
        origin = Origin(
            rewritten=sum(last - first for first, last in places),
            passed=passed,
            selected=method.name if passed else "",
            erratum=method.says,
            contradicted=not method.says and name in self.state.stated,
        )
        line = {
            "op": "edit",
            "field": name,
            "value": value,
            "method": str(method),
            **as_line(origin),
            "says": self._sentence(name, value) if method.says else "",
            "patches": _as_lines(patches),
            "skills": [asdict(skill) for skill in skills],
        }
        self._rows.commit(line, places, self._notebook)
        return Edited(name, value, str(method), chosen, origin)

    def _sentence(self, key: str, value: str) -> str:
        one = self._reference(key)
        erratum = Erratum(one.field, value, "", one.skill if one.shared else "")
        return word(erratum, defaults(self.workspace).wording)

    def _choose(self, name: str, value: str) -> tuple[Method, str]:
        """The method that holds for this model and this notebook, and why."""
        if name in self.state.stated:  # in the text a new value would stand before it, and be contradicted
            return Method("erratum"), f"erratum: what one said of {name} stands behind the text"
        suffix, found = Method("suffix"), defaults(self.workspace)
        patches = self._plan(name, value, suffix)[0]
        if not patches:
            return Method("erratum"), f"erratum: the text says {name}={value} as it is, an erratum says otherwise"
        if len(self.state.tokens) - patches[0].first <= NEAR and not self.workspace.model.recurrent:
            return suffix, f"suffix: no more than {NEAR} tokens stand behind the change, and all of them are decoded"
        if found.method.name in ("recompute", "suffix"):
            return suffix, found.why
        if found.method.name not in EDITS:
            return Method("erratum"), f"{found.why}; erratum instead: it is not for a session"
        return found.method, found.why

    def _plan(self, name: str, value: str, method: Method) -> tuple[list[Patch], list[int], list[SkillText], int]:
        """Patches of the notebook, other positions to compute again, the skills as they will be, and how many tokens a
        pass went over to choose the positions."""
        reason = self.workspace.context.supports("rewrite")
        if reason and method.name != "suffix":
            raise UnsupportedError(f"the edit method {method.name} is not possible: {reason}", INSTEAD)
        patches: list[Patch] = []
        also: list[int] = []
        skills, passed = [], 0
        one = self._reference(name)
        for skill in self.state.skills:
            if skill.name != one.skill:
                continue
            segment = self._segment(skill)
            found = change(self.workspace.model, segment, {one.field: value})
            if found is None:
                continue
            moved = sum(patch.grows for patch in patches)
            start = skill.position
            if method.ranks:
                ranked, passed = self._ranked(segment, found, method)
                also += [start + position for position in ranked]
            patches += [patch.offset(start) for patch in found.patches]
            skills.append(_amended(skill, found, start + moved))
        if method.name != "suffix" and any(patch.grows for patch in patches):
            self._check_moves(method)
        return patches, also, skills, passed

    def _check_moves(self, method: Method) -> None:
        """Raise UnsupportedError where rows have been moved as often as their type allows."""
        kind = self.workspace.context.options.type_k
        done = sum(line["op"] == "edit" and line["method"] != "suffix" and _moves(line) for line in self.state.live)
        if kind != "f32" and done >= MOVES.get(kind, FEW_MOVES):
            raise UnsupportedError(
                f"the edit method {method} is not possible: rows behind a value of another length were moved {done} "
                f"times, and each time rounds the keys of a {kind} cache",
                INSTEAD,
            )

    def _ranked(self, segment: Segment, found: Change, method: Method) -> tuple[Sequence[int], int]:
        """The tokens after the change that the method recomputes, and how many tokens a pass went over to find them:
        what precedes the skill, and its corrected text. None where the influence was measured."""
        if not (method.name == "selective" and segment.influence):
            book, first = self.notebook, segment.base
            rows = book.context.read(book.sequence, first, len(segment), base=first, dtype=book.context.lossless_type)
            segment = replace(segment, layers=rows)
            self.workspace.make_room(len(self.state.tokens) + sum(max(0, patch.grows) for patch in found.patches))
            self._notebook = None  # the pass may need its context
        prepared = prepare(self.workspace.scratch, segment, found, method)
        return prepared.also, prepared.passed

    def _segment(self, skill: SkillText) -> Segment:
        """The skill as a segment, without rows: what a change is found in."""
        tokens = np.array(self.state.tokens[skill.position : skill.position + skill.tokens], np.int32)
        spelt, text = self._spelt(skill.position, skill.position + skill.tokens), skill.text.encode()
        if spelt not in (text, b" " + text):  # SentencePiece puts a blank before it
            name = self.stored.name
            raise SessionError(f"the ledger of session {name} is damaged: {skill.name} is not where it says")
        influence = {name: np.array(row, np.float32) for name, row in skill.influence.items()}
        identity, context = self.workspace.identity, np.array(self.state.tokens[: skill.position], np.int32)
        return Segment(
            *(skill.name, "", skill.text, tokens, skill.position, context, skill.fields, identity, ()),
            influence=influence,
        )

    def _replace(self, patches: Sequence[Patch], also: Sequence[int], method: Method) -> list[Range]:
        """Bring the patches into the notebook; return the positions whose rows are others now."""
        grown = sum(patch.grows for patch in patches)
        rewritten = sum(len(patch.tokens) for patch in patches) + len(also)  # needs as many free cells meanwhile
        self.workspace.make_room(len(self.state.tokens) + max(0, grown) + rewritten * (method.name != "suffix"))
        if method.name == "suffix":
            return self._decode_from(patches)
        notebook = self.notebook
        try:
            notebook.replace(patches, also)
            notebook.flush()
        except BaseException:
            self._notebook = None
            raise
        return disturbed(patches, len(self.state.tokens), also)

    def _decode_from(self, patches: Sequence[Patch]) -> list[Range]:
        """Everything from the first patch on, decoded in the order of the tokens: equal to a recompute. Where the
        model's memory cannot go back, that is everything."""
        first, tokens = patches[0].first, patched(self.state.tokens, patches)
        try:
            if self.workspace.model.recurrent:
                first, notebook = 0, self.workspace.notebook()
            else:
                notebook = self.notebook
                notebook.truncate(first)
            notebook.append(tokens[first:], reason=Reason.AGAIN)
            notebook.flush()
        except BaseException:
            self._notebook = None
            raise
        self._notebook = notebook
        return [(first, len(tokens))]

    # Compacting.

    def compact(self) -> Compacted:
        """Take out the errata that later ones supersede, and decode what stands behind the first of them anew.

        Then the rows from there on are those of a prefill of the tokens that are left.
        """
        out = self.state.superseded
        if not out:
            return Compacted()
        patches = self._cuts(out)
        self.workspace.make_room(len(self.state.tokens))
        places = self._decode_from(patches)
        fields = tuple(entry.name for entry in out)
        self._rows.commit({"op": "compact", "fields": fields, "patches": _as_lines(patches)}, places, self._notebook)
        removed = sum(patch.last - patch.first for patch in patches)
        return Compacted(fields, removed, sum(last - first for first, last in places))

    def _cuts(self, out: Sequence[Entry]) -> list[Patch]:
        """Patches that take the errata out. Where one stood at the head of its message, so does what comes next: the
        empty line before that goes, too."""
        patches: list[Patch] = []
        head = taking = False
        for entry in self.state.entries:
            first, last = entry.position, entry.position + entry.tokens
            if entry in out:
                head = head if taking else not self._spelt(first, last).startswith(BETWEEN.encode())
                patches.append(Patch(first, last, ()))
            elif taking and head and (gap := self._gap(first, last)):
                patches.append(Patch(first, first + gap, ()))
            taking = entry in out or (taking and entry.kind == "edit")
        return patches

    def _gap(self, first: int, last: int) -> int:
        """How many of these tokens are the empty line before a part of a message; 0 if it has none of its own."""
        ends = range(first + 1, min(last, first + len(BETWEEN) + 1))
        return next((end for end in ends if self._spelt(first, end) == BETWEEN.encode()), first) - first

    def _spelt(self, first: int, last: int) -> bytes:
        return b"".join(map(self.workspace.model.piece, self.state.tokens[first:last]))

    # Undo.

    def undo(self) -> Line:
        """Back to before the last turn, edit or compaction, to the very rows. Raise SessionError if there is none."""
        undone = self.stored.undo()
        self._notebook = None
        return undone

    @property
    def notebook(self) -> Notebook:
        """The notebook as the ledger has it, put back from disk unless it is at hand."""
        found = self._notebook
        at_hand = found is not None and found.context is self.workspace.context
        if found is None or not at_hand or not found.intact or found.tokens.tolist() != self.state.tokens:
            found = self._notebook = self._rows.restored()
        return found


def _spliced(segment: Segment, changed: Change | None, notebook: Notebook) -> SkillText:
    position = next(p.position for p in notebook.pieces if p.kind == "splice" and p.name == segment.name)
    influence = {name: [round(float(part), 6) for part in row] for name, row in segment.influence.items()}
    skill = SkillText(segment.name, position, segment.text, len(segment), segment.fields, influence)
    return _amended(skill, changed, position) if changed else skill


def _amended(skill: SkillText, found: Change, position: int) -> SkillText:
    """The skill with its new values. Where other tokens stand now, nothing is known of the influence on them."""
    influence = {}
    for name, row in skill.influence.items():
        moved = [0.0] * len(found.tokens)
        for part in align(found.patches, len(row)):
            if not part.patch:
                moved[slice(*part.after)] = row[slice(*part.before)]
        influence[name] = moved
    return SkillText(skill.name, position, found.text, len(found.tokens), found.spans, influence)


def _fields_of(errata: Iterable[Erratum]) -> dict[str, str]:
    return {part.key: part.value for part in errata if part.field and part.value}


def _as_lines(patches: Sequence[Patch]) -> list[Line]:
    return [{"first": patch.first, "last": patch.last, "tokens": list(patch.tokens)} for patch in patches]


def _moves(line: Line) -> bool:
    """Whether an edit put tokens in the place of more or fewer."""
    return any(len(part["tokens"]) != part["last"] - part["first"] for part in line["patches"])
