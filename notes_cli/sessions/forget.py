"""Removes turns, reasoning or tool results from a session, as if they had never been there.

`cut` moves the K/V that follows: it was computed with the removed text and may still depend on it. `suffix` decodes it
again, and removes the text from the ledger, too. The remaining tokens must be those that the chat template gives for
the remaining messages; a part for which they would differ is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

from notes_cli.editing.methods import decode_from
from notes_cli.engine.pieces import Reason
from notes_cli.engine.positions import Patch, changed_ranges, position_map, removed_images
from notes_cli.errors import Help, NotesError, SessionError, UnsupportedError
from notes_cli.runtime.prompt import as_question, results_turn
from notes_cli.sessions.edits import Parts, as_lines, check_moves, erratum_text, moves, parts_of, pieces_of_kind
from notes_cli.sessions.session_kv import SessionKV
from notes_cli.sessions.state import MARKS, TRACE, Entry, Line, Origin, State, entry_line, keys_of
from notes_cli.text.messages import BETWEEN, asking, user_message
from notes_cli.text.prompt import Chunk, Run, build, next_turn
from notes_cli.text.template import ChatTemplate

CUT, SUFFIX = METHODS = "cut", "suffix"


@dataclass(frozen=True, slots=True)
class Forgotten:
    """The effect of forgetting, done or planned."""

    parts: Parts
    method: str
    removed: int  # tokens removed
    moved: int  # tokens whose K/V was moved
    decoded: int  # tokens decoded
    remembering: int  # remaining tokens whose K/V was computed with the removed ones
    repeated: tuple[str, ...] = ()  # fields whose erratum was removed: repeated before the next question
    skills: tuple[str, ...] = ()  # skills removed with their turns
    tokens: int = 0  # tokens left


class _Slice(NamedTuple):
    """Replaces tokens [first, last) of the sequence by `tokens`, which belong to this entry."""

    first: int
    last: int
    tokens: Sequence[int]
    entry: Entry


class _Plan(NamedTuple):
    """The patches of the sequence, and the remaining state, without its tokens and K/V."""

    parts: Parts
    patches: list[Patch]
    rest: State
    again: tuple[str, ...]
    skills: tuple[str, ...]


class Forgetter:
    """Removes parts from an open session."""

    def __init__(self, kv: SessionKV) -> None:
        self._kv, self._state = kv, kv.state
        self._workspace = kv.workspace
        self._name = kv.stored.name

    def forget(self, names: Sequence[str], method: str = CUT, *, dry: bool = False) -> Forgotten:
        """Remove the named parts (edits.py). `dry`: change nothing. `suffix` without names makes earlier cuts final.
        Raises NotesError, without changing anything, if that is not possible."""
        if method not in METHODS:
            raise NotesError(f"no method {method!r} of forgetting", f"Choose {' or '.join(METHODS)}")
        if not names and (method == CUT or not self._state.traces):
            raise SessionError(f"nothing is named that session {self._name} is to forget", "Name a part of it")
        plan = self._plan(parts_of(names, self._state, self._name))
        if names and not plan.patches:
            raise SessionError(f"{', '.join(plan.parts.names)}: nothing of it is left in session {self._name}")
        traces = self._state.traces if method == SUFFIX else []  # earlier cuts become final, too
        first = min([patch.first for patch in plan.patches] + [entry.position for entry in traces])
        remaining = len(self._state.tokens) + sum(patch.grows for patch in plan.patches)
        if method == CUT:
            self._check_movable(plan.patches)
        else:
            self._check_decodable(plan.patches, first)
        new = sum(len(patch.tokens) for patch in plan.patches)
        computed = (entry for entry in plan.rest.entries if entry.how != "spliced")  # depends on earlier text
        after = sum(max(0, entry.end - max(first, entry.position)) for entry in computed)
        forgotten = Forgotten(
            plan.parts,
            method,
            removed=sum(patch.last - patch.first for patch in plan.patches),
            moved=remaining - first - new if method == CUT else 0,
            decoded=new if method == CUT else remaining - (0 if self._workspace.model.recurrent else first),
            remembering=after - new if method == CUT else 0,
            repeated=plan.again,
            skills=plan.skills,
            tokens=remaining,
        )
        if not dry:
            self._execute(plan, forgotten, first)
        return forgotten

    def _check_movable(self, patches: Sequence[Patch]) -> None:
        """Raise UnsupportedError if K/V cannot be moved, or was moved too often."""
        reason = self._workspace.context.supports("splice") or (
            self._workspace.context.supports("rewrite") if any(patch.tokens for patch in patches) else None
        )
        remedy = Help.OTHER_METHOD(method=SUFFIX)
        if reason:
            raise UnsupportedError(f"what follows cannot be moved: {reason}", remedy)
        check_moves(self._kv, "what follows cannot be moved", remedy)

    def _check_decodable(self, patches: Sequence[Patch], first: int) -> None:
        """Raise UnsupportedError if an image would be decoded again: a session stores only its K/V."""
        removed = removed_images(self._state.images, [patch.span for patch in patches])
        if any(image.last > first and image not in removed for image in self._state.images):
            message = f"an image of session {self._name} follows, and its rows are not decoded again as tokens"
            raise UnsupportedError(message, Help.OTHER_METHOD(method=CUT))

    def _execute(self, plan: _Plan, forgotten: Forgotten, first: int) -> None:
        """Change the sequence and write the ledger."""
        new = sum(len(patch.tokens) for patch in plan.patches)
        before = len(self._state.tokens)
        self._workspace.make_room(max(before, forgotten.tokens) + new, held=self._kv.loaded)
        with self._kv.changing() as sequence:
            if forgotten.method == SUFFIX:
                decode_from(sequence, [Patch(first, first, ()), *plan.patches])
            else:
                sequence.replace(plan.patches)
                sequence.flush()
        done = sum(map(moves, self._state.live))
        entries = plan.rest.entries
        if forgotten.method == SUFFIX:  # everything from `first` on, spliced K/V included, was decoded again
            entries = [
                replace(entry, how="decoded", origin=Origin(Reason.AGAIN))
                if entry.tokens and entry.position >= first and entry.how != "decoded"
                else entry
                for entry in entries
                if entry.kind != TRACE
            ]
        if forgotten.remembering:
            place = next((at for at, entry in enumerate(entries) if entry.end > first), len(entries))
            turn = max((entry.turn for entry in entries[:place]), default=0)
            entries.insert(place, Entry(TRACE, "", "; ".join(plan.parts.names), first, 0, CUT, Origin(), turn))
        rest = _as_line(replace(plan.rest, entries=entries))
        line = {"op": "forget", "method": forgotten.method, "what": list(plan.parts.names), "rest": rest}
        if forgotten.method == SUFFIX:
            sequence = self._kv.held
            tokens = [int(token) for token in sequence.tokens]
            images = {"images": [asdict(image) for image in sequence.images]} if sequence.images else {}
            self._kv.rewrite({**line, **images, "moves": done, "patches": as_lines([Patch(0, 0, tokens)])})
        else:
            places = changed_ranges(plan.patches, before)
            self._kv.commit({**line, "moves": int(forgotten.moved > 0), "patches": as_lines(plan.patches)}, places)

    # Tokens to remove.

    def _plan(self, parts: Parts) -> _Plan:
        """Raise SessionError if a part cannot be removed without the others."""
        self._check_turns(parts)
        slices = [*self._slice_turns(parts.turns)]
        for turn in parts.thoughts:
            slices += self._slice_reasoning(turn)
        for turn in parts.results:
            slices += self._slice_results(turn)
        slices.sort(key=lambda cut: cut[:2])
        patches = _patches(slices)
        entries = self._entries(parts, slices, patches)
        rest, skills = self._rest(parts, entries, patches)
        errata = [entry for entry in self._state.entries if entry.kind == "erratum"]
        removed = [entry for entry in errata if not self._remaining(entry, slices)]
        return _Plan(parts, patches, rest, self._queue_again(removed, rest), skills)

    def _check_turns(self, parts: Parts) -> None:
        """Raise SessionError if nothing, or a tool call without its result, would be left."""
        gone = set(parts.turns)
        if len(gone) == self._state.turns:
            raise SessionError(
                f"nothing would be left of session {self._name}", Help.REMOVE_WHOLE_SESSION(name=self._name)
            )
        for turn in range(2, self._state.turns + 1):
            if any(pieces_of_kind(self._state, turn, "tool")) and (turn in gone) != (turn - 1 in gone):
                raise SessionError(
                    f"turn {turn} has the results of the tools that turn {turn - 1} called, so both go or none",
                    f"Name {turn - 1}-{turn}, or tool:{turn} for the results alone",
                )

    def _pieces(self, turn: int) -> list[Entry]:
        return [entry for entry in self._state.entries if entry.turn == turn and entry.kind not in MARKS]

    def _start(self, turn: int) -> int:
        """Return the position where a turn begins; for the turn after the last, the end."""
        return self._pieces(turn)[0].position if turn <= self._state.turns else len(self._state.tokens)

    def _slice_turns(self, turns: Sequence[int]) -> Iterator[_Slice]:
        """Yield slices for whole turns. The system message in turn 1 stays, without errata in it: the content of the
        first remaining turn then follows the template text before the question of turn 1."""
        leading = next(turn for turn in range(1, self._state.turns + 1) if turn not in turns)
        if leading > 1:
            asked, errata = self._last_prompt_piece(1), [entry for entry in self._pieces(1) if entry.kind == "erratum"]
            first = self._first_turn_content(asked, errata)
            for entry in errata:
                if entry.position < first:
                    yield _Slice(entry.position, entry.end, (), entry)
            yield _Slice(first, self._turn_content(leading), (), asked)
        for turn in turns:
            if turn > leading:
                yield _Slice(self._start(turn), self._start(turn + 1), (), self._pieces(turn)[0])

    def _first_turn_content(self, asked: Entry, errata: Sequence[Entry]) -> int:
        """Return the position where the content of turn 1 begins: its question, or errata at the head of the question's
        message. Earlier errata are in the system message, or in a message that the template uses for both. Raises
        SessionError if the message holds other content, too."""
        first = asked.end - len(self._tail(asked, 1).tokens)
        added = all(entry.text.startswith(BETWEEN) for entry in errata)  # they follow text that stays
        if added and first > asked.position and self._opens_message(asked, first):
            return first
        skills = [entry.position for entry in self._pieces(1) if entry.kind == "splice"]
        at_head = errata and not added and not self._kv.text_bytes(asked.position, first).strip()
        if at_head and max(skills, default=0) <= errata[0].position:
            return errata[0].position
        raise SessionError(
            f"turn 1 of session {self._name} cannot be taken out: what the session rests on is in the message of its "
            "question"
        )

    def _opens_message(self, asked: Entry, first: int) -> bool:
        """Return True if the text before the question is the template's, not an empty line within one message."""
        if self._kv.text_bytes(asked.position, first).strip():
            return True
        runs = build(self._workspace.template, asking("?", system="s"))[-1].runs
        return bool(runs) and runs[0].special and runs[0].text == BETWEEN

    def _turn_content(self, turn: int) -> int:
        """Return the position of the content of a later turn, after the template text that opens its message."""
        first = self._pieces(turn)[0]
        if first.kind == "question":
            return first.end - len(self._tail(first, turn).tokens)
        if first.kind != "text":
            raise self._template_mismatch(turn)
        return first.end

    def _last_prompt_piece(self, turn: int) -> Entry:
        """Return the last piece of a turn's prompt, which ends where the answer begins."""
        asked = [entry for entry in self._pieces(turn) if entry.kind in ("question", "result")]
        if not asked:
            raise self._template_mismatch(turn)
        return asked[-1]

    def _template_mismatch(self, turn: int) -> SessionError:
        return SessionError(
            f"turn {turn} of session {self._name} does not match the chat template of {self._workspace.model.name} as "
            "it is now, so it is not known which words of it are the template's"
        )

    def _tail(self, asked: Entry, turn: int) -> _Tail:
        """Return the end of a turn's prompt: from the text of the question on, or after that of the tool results.
        Raises SessionError if no template gives these tokens."""
        ids = self._ids(asked)
        for template in (self._workspace.template, self._workspace.thinking_template):
            for joined in (False, True) if asked.kind == "question" else (False,):
                tokens = self._render_tail(template, turn, joined)
                if tokens and ids[-len(tokens) :] == tokens:
                    return _Tail(template, joined, tokens)
        raise self._template_mismatch(turn)

    def _render_tail(self, template: ChatTemplate, turn: int, joined: bool) -> list[int]:
        """Render the end of a turn's prompt by this template. `joined`: an empty line precedes the question."""
        if any(pieces_of_kind(self._state, turn, "tool")):
            runs = self._render_results(template, turn, "x")[-1].runs
            last = max(place for place, run in enumerate(runs) if not run.special)
            return self._tokens(runs[last + 1 :])
        question = user_message(self._state.questions[turn - 1], errata=["x"] if joined else [])
        runs = next_turn(template, [question])[-1].runs
        return self._tokens(runs[next((place for place, run in enumerate(runs) if not run.special), 0) :])

    def _render_results(self, template: ChatTemplate, turn: int, text: str) -> list[Chunk]:
        """Render the tool results of a turn, with this text in place of each."""
        names = [entry.name for entry in pieces_of_kind(self._state, turn, "tool")]
        return results_turn(self._workspace, template, [(name, text) for name in names])

    def _tokens(self, runs: Sequence[Run]) -> list[int]:
        return [int(token) for token in self._workspace.model.tokenize_runs(runs)]

    def _ids(self, entry: Entry) -> list[int]:
        return self._state.tokens[entry.position : entry.end]

    def _slice_reasoning(self, turn: int) -> Iterator[_Slice]:
        """Yield slices that remove a turn's reasoning and leave the prompt and answer of a turn without reasoning."""
        model = self._workspace.model
        if self._workspace.reasoning.end:  # the markers around the answer would be left without the opening one
            raise SessionError(
                f"{model.name} marks its answers after a chain of thought, so they go with it",
                f"Name the turn: {turn}",
            )
        asked = self._last_prompt_piece(turn)
        tail = self._tail(asked, turn)
        direct = self._render_tail(tail.template.earlier, turn, tail.joined)
        same = _common_prefix(tail.tokens, direct)
        if len(tail.tokens) > same or len(direct) > same:
            yield _Slice(asked.end - len(tail.tokens) + same, asked.end, direct[same:], asked)
        answers = [entry for entry in self._pieces(turn) if entry.kind == "answer"]
        last = max(place for place, entry in enumerate(answers) if entry.thought)
        reasoning, rest = answers[: last + 1], answers[last + 1 :]
        if rest:
            end = reasoning[-1].end
            while end < rest[0].end - 1 and model.text(self._state.tokens[end : end + 1], special=True).isspace():
                end += 1  # an empty line after the reasoning
            yield _Slice(reasoning[0].position, end, (), reasoning[0])
            return
        text = model.text((token for entry in reasoning for token in self._ids(entry)), special=True)
        split = self._workspace.reasoning.found(text)
        if split is None or not split[1].strip():
            raise SessionError(
                f"turn {turn} of session {self._name} has nothing but a chain of thought", f"Name the turn: {turn}"
            )
        answer = [int(token) for token in model.tokenize(split[1].strip())]
        yield _Slice(reasoning[0].position, reasoning[-1].end, answer, reasoning[-1])

    def _slice_results(self, turn: int) -> Iterator[_Slice]:
        """Yield slices that empty the messages with tool results."""
        results = [*pieces_of_kind(self._state, turn, "tool")]
        tail = self._tail(results[-1], turn)
        chunks = [chunk for chunk in self._render_results(tail.template, turn, "") if chunk.kind == "result"]
        if len(chunks) != len(results):
            raise self._template_mismatch(turn)
        for entry, chunk in zip(results, chunks, strict=True):
            old, new = self._ids(entry), self._tokens(chunk.runs)
            head = _common_prefix(old, new)
            end = min(_common_prefix(old[::-1], new[::-1]), len(old) - head, len(new) - head)
            if len(old) > head + end or len(new) > head + end:
                yield _Slice(entry.position + head, entry.end - end, new[head : len(new) - end], entry)

    # State that remains.

    def _entries(self, parts: Parts, slices: Sequence[_Slice], patches: Sequence[Patch]) -> list[Entry]:
        """Return the remaining entries, with new positions and turns."""
        numbers = [turn for turn in range(1, self._state.turns + 1) if turn not in parts.turns]
        renumbered = {turn: number for number, turn in enumerate(numbers, 1)}
        shift, place, entries = position_map(patches), 0, list[Entry]()
        for entry in self._state.entries:
            turn = renumbered.get(entry.turn) or sum(number < entry.turn for number in numbers)
            if entry.kind in MARKS:
                entries.append(replace(entry, position=shift(entry.position), turn=turn))
                continue
            ids = self._remaining(entry, slices)
            if not ids:
                continue
            previous = next((earlier for earlier in reversed(entries) if earlier.kind not in MARKS), None)
            loses_start = entry.kind == "question" and any(cut.first <= entry.position < cut.last for cut in slices)
            if ids != self._ids(entry):
                # Of a removed question, only the template's text before it is left.
                kind = "text" if entry.turn in parts.turns else entry.kind
                origin = Origin() if entry.thought else entry.origin
                text = self._workspace.model.text(ids, special=True)
                entry = replace(entry, text=text, origin=origin, kind=kind)
            remaining = replace(entry, position=place, tokens=len(ids), turn=max(1, turn))
            place += len(ids)
            if loses_start and previous and previous.kind == "text" and remaining.kind == "question":
                # the text before it opens its message now
                entries.remove(previous)
                remaining = replace(remaining, position=previous.position, tokens=place - previous.position)
                remaining = replace(remaining, text=previous.text + remaining.text)
            entries.append(remaining)
        return entries

    def _remaining(self, entry: Entry, slices: Sequence[_Slice]) -> list[int]:
        """Return the tokens of an entry after the slices."""
        tokens: list[int] = []
        done = entry.position
        for cut in slices:
            if cut.entry is entry or (cut.first < entry.end and cut.last > entry.position):
                tokens += self._state.tokens[done : max(done, min(entry.end, cut.first))]
                done = max(done, min(entry.end, cut.last))
            if cut.entry is entry:
                tokens += cut.tokens
        return [*tokens, *self._state.tokens[done : entry.end]]

    def _rest(self, parts: Parts, entries: list[Entry], patches: Sequence[Patch]) -> tuple[State, tuple[str, ...]]:
        """Return the remaining state, and the removed skills. Raises SessionError if a turn that stays corrects one."""
        state, shift = self._state, position_map(patches)
        emptied = {
            turn: as_question([(result.name, "") for result in pieces_of_kind(state, turn, "tool")])
            for turn in parts.results
        }
        questions = [emptied.get(turn, text) for turn, text in enumerate(state.questions, 1) if turn not in parts.turns]
        spliced = {entry.name for entry in entries if entry.kind == "splice"}
        gone = tuple(skill.name for skill in state.skills if skill.name not in spliced)
        known, lost = state.known, set[str]()
        for skill in state.skills:
            if skill.name in gone:
                lost |= {known.key(skill.name, span.name) for span in skill.fields}
        about = [entry for entry in entries if entry.kind in ("erratum", "edit") and keys_of(known, entry.name) & lost]
        for entry in about:
            if entry.kind == "erratum":
                raise SessionError(
                    f"turn {entry.turn + sum(turn <= entry.turn for turn in parts.turns)} corrects {entry.name} of a "
                    f"skill that would be gone ({', '.join(gone)})",
                    "Name that turn, too",
                )
        rest = replace(
            state,
            questions=questions,
            entries=[entry for entry in entries if entry not in about],
            values={key: value for key, value in state.values.items() if key not in lost},
            pending={key: erratum for key, erratum in state.pending.items() if key not in lost},
        )
        rest.stated = set().union(*(keys_of(known, entry.name) for entry in rest.entries if entry.kind == "erratum"))
        remaining = [skill for skill in state.skills if skill.name not in gone]
        rest.set_skills([replace(skill, position=shift(skill.position)) for skill in remaining])
        return rest, gone

    def _queue_again(self, removed: Sequence[Entry], rest: State) -> tuple[str, ...]:
        """Add removed errata that still apply to the pending ones, and return their fields."""
        before, now = self._state.known, rest.known
        again, later = dict[str, str](), set(rest.pending)
        for entry in reversed(self._state.entries):
            if entry.kind not in ("erratum", "edit") or not entry.name:
                continue
            for target in before.find(entry.name):
                if f"{target.skill}.{target.field}" not in now:
                    continue
                key = now.key(target.skill, target.field)
                if entry in removed and key not in later and key in rest.values:
                    again[key] = erratum_text(self._kv, now.resolve(key)[0], rest.values[key])
                later.add(key)
        rest.pending |= dict(reversed(again.items()))
        return tuple(reversed(again))


class _Tail(NamedTuple):
    """The end of a prompt: its template, whether an empty line precedes the question, and its tokens."""

    template: ChatTemplate
    joined: bool
    tokens: list[int]


def _patches(slices: Sequence[_Slice]) -> list[Patch]:
    """Return the slices as patches, adjacent ones merged."""
    patches: list[Patch] = []
    for cut in slices:
        if patches and cut.first <= patches[-1].last:
            patches[-1] = Patch(patches[-1].first, cut.last, [*patches[-1].tokens, *cut.tokens])
        else:
            patches.append(Patch(cut.first, cut.last, cut.tokens))
    return patches


def _common_prefix(remaining: Sequence[int], right: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    pairs = enumerate(zip(remaining, right, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(remaining), len(right)))


def _as_line(rest: State) -> Line:
    """Return the remaining state as JSON for a ledger."""
    keys = ("system", "questions", "values", "pending", "marks", "first", "read_at")
    return {
        **{key: getattr(rest, key) for key in keys},
        "pieces": [entry_line(entry) for entry in rest.entries],
        "skills": [asdict(skill) for skill in rest.skills],
        **({"memory": asdict(rest.memory)} if rest.memory else {}),
        "stated": sorted(rest.stated),
    }
