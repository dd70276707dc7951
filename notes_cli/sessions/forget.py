"""Forgetting: parts of a session are taken out; what is left has the tokens of a session that never had them.

By `cut` what follows is moved: its rows were computed with what is gone, and may carry notes of it. By `suffix` it is
decoded again, and the ledger keeps nothing of what was said. What is left must be what the chat template makes of the
messages that are left: where it puts other words than the ledger has, the part is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

from notes_cli.editing.operations import decode_from
from notes_cli.engine.image_positions import removed_images
from notes_cli.engine.patches import Patch, changed_ranges, position_map
from notes_cli.engine.pieces import Reason
from notes_cli.errors import Help, NotesError, SessionError, UnsupportedError
from notes_cli.sessions.edits import Parts, as_lines, check_moves, moves, of, parts_of, sentence
from notes_cli.sessions.lines import Line, Origin
from notes_cli.sessions.session_kv import SessionKV
from notes_cli.sessions.state import MARKS, TRACE, Entry, State, entry_line, keys_of
from notes_cli.sessions.tool_results import as_question, results_turn
from notes_cli.text.messages import BETWEEN, asking, user_message
from notes_cli.text.prompt import Chunk, Run, build, next_turn
from notes_cli.text.template import ChatTemplate

CUT, SUFFIX = METHODS = "cut", "suffix"


@dataclass(frozen=True, slots=True)
class Forgotten:
    """What was taken out, or would be."""

    parts: Parts
    method: str
    removed: int  # tokens that are gone
    moved: int  # tokens whose rows were moved
    decoded: int  # tokens that were decoded
    remembering: int  # tokens whose rows were computed with what is gone, and are still there
    said_again: tuple[str, ...] = ()  # fields whose erratum was in it: said once more before the next question
    skills: tuple[str, ...] = ()  # that went with their turns
    tokens: int = 0  # that are left


class _Slice(NamedTuple):
    """Tokens [first, last) of the sequence become `tokens`, which belong to this entry."""

    first: int
    last: int
    tokens: Sequence[int]
    entry: Entry


class _Plan(NamedTuple):
    """What is to be done: the patches of the sequence, and the state that they leave but for tokens and rows."""

    parts: Parts
    patches: list[Patch]
    rest: State
    again: tuple[str, ...]
    skills: tuple[str, ...]


class Forgetter:
    """Takes parts out of a session."""

    def __init__(self, kv: SessionKV) -> None:
        self._kv, self._state = kv, kv.state
        self._workspace = kv.workspace
        self._name = kv.stored.name

    def forget(self, names: Sequence[str], method: str = CUT, *, dry: bool = False) -> Forgotten:
        """Take out what is named (edits.py). `dry`: only say what would be done. With `suffix` and no name, what was
        cut before is forgotten for good.

        Raise NotesError where that cannot be; then nothing is changed.
        """
        if method not in METHODS:
            raise NotesError(f"no method {method!r} of forgetting", f"Choose {' or '.join(METHODS)}")
        if not names and (method == CUT or not self._state.traces):
            raise SessionError(f"nothing is named that session {self._name} is to forget", "Name a part of it")
        plan = self._planned(parts_of(names, self._state, self._name))
        if names and not plan.patches:
            raise SessionError(f"{', '.join(plan.parts.names)}: nothing of it is left in session {self._name}")
        first = min([patch.first for patch in plan.patches] + [entry.position for entry in self._cut_before(method)])
        left = len(self._state.tokens) + sum(patch.grows for patch in plan.patches)
        if method == CUT:
            self._check_movable(plan.patches)
        else:
            self._check_decodable(plan.patches, first)
        new = sum(len(patch.tokens) for patch in plan.patches)
        found = Forgotten(
            plan.parts,
            method,
            removed=sum(patch.last - patch.first for patch in plan.patches),
            moved=left - first - new if method == CUT else 0,
            decoded=new if method == CUT else left - (0 if self._workspace.model.recurrent else first),
            remembering=_with_it(plan.rest, first) - new if method == CUT else 0,
            said_again=plan.again,
            skills=plan.skills,
            tokens=left,
        )
        if not dry:
            self._make(plan, found, first)
        return found

    def _cut_before(self, method: str) -> list[Entry]:
        """What was cut earlier: all of it is forgotten for good together with what is named now."""
        return self._state.traces if method == SUFFIX else []

    def _check_movable(self, patches: Sequence[Patch]) -> None:
        """Raise UnsupportedError where rows cannot be moved, or have been as often as is good for them."""
        reason = self._workspace.context.supports("splice") or (
            self._workspace.context.supports("rewrite") if any(patch.tokens for patch in patches) else None
        )
        remedy = Help.OTHER_METHOD(method=SUFFIX)
        if reason:
            raise UnsupportedError(f"what follows cannot be moved: {reason}", remedy)
        check_moves(self._kv, "what follows cannot be moved", remedy)

    def _check_decodable(self, patches: Sequence[Patch], first: int) -> None:
        """Raise UnsupportedError where an image that is left would be decoded again: a session has its rows alone."""
        out = removed_images(self._state.images, [patch.span for patch in patches])
        if any(image.last > first and image not in out for image in self._state.images):
            what = f"an image of session {self._name} follows, and its rows are not decoded again as tokens"
            raise UnsupportedError(what, Help.OTHER_METHOD(method=CUT))

    def _make(self, plan: _Plan, found: Forgotten, first: int) -> None:
        """Change the sequence, and write down what is left of it."""
        new = sum(len(patch.tokens) for patch in plan.patches)
        before = len(self._state.tokens)
        self._workspace.make_room(max(before, found.tokens) + new, held=self._kv.at_hand)
        with self._kv.changing() as sequence:
            if found.method == SUFFIX:
                decode_from(sequence, [Patch(first, first, ()), *plan.patches])
            else:
                sequence.replace(plan.patches)
                sequence.flush()
        done = sum(map(moves, self._state.live))
        entries = plan.rest.entries
        if found.method == SUFFIX:
            entries = [_again(entry, first) for entry in entries if entry.kind != TRACE]
        if found.remembering:
            place = next((at for at, entry in enumerate(entries) if entry.end > first), len(entries))
            turn = max((entry.turn for entry in entries[:place]), default=0)
            entries.insert(place, Entry(TRACE, "", "; ".join(plan.parts.names), first, 0, CUT, Origin(), turn))
        rest = _as_line(replace(plan.rest, entries=entries))
        line = {"op": "forget", "method": found.method, "what": list(plan.parts.names), "rest": rest}
        if found.method == SUFFIX:
            held = self._kv.held
            tokens = [int(token) for token in held.tokens]
            images = {"images": [asdict(image) for image in held.images]} if held.images else {}
            self._kv.rewrite({**line, **images, "moves": done, "patches": as_lines([Patch(0, 0, tokens)])})
        else:
            places = changed_ranges(plan.patches, before)
            self._kv.commit({**line, "moves": int(found.moved > 0), "patches": as_lines(plan.patches)}, places)

    # What is to be taken out.

    def _planned(self, parts: Parts) -> _Plan:
        """Raise SessionError where a part cannot be taken out of the others."""
        self._check_turns(parts)
        slices = [*self._turns(parts.turns)]
        for turn in parts.thoughts:
            slices += self._thought(turn)
        for turn in parts.results:
            slices += self._results(turn)
        slices.sort(key=lambda one: one[:2])
        patches = _patches(slices)
        entries = self._entries(parts, slices, patches)
        rest, skills = self._rest(parts, entries, patches)
        said = [entry for entry in self._state.entries if entry.kind == "erratum" and not self._left(entry, slices)]
        return _Plan(parts, patches, rest, self._say_again(said, rest), skills)

    def _check_turns(self, parts: Parts) -> None:
        """Raise SessionError where nothing would be left, or a call of a tool without its result."""
        gone = set(parts.turns)
        if len(gone) == self._state.turns:
            raise SessionError(
                f"nothing would be left of session {self._name}", Help.REMOVE_WHOLE_SESSION(name=self._name)
            )
        for turn in range(2, self._state.turns + 1):
            if any(of(self._state, turn, "tool")) and (turn in gone) != (turn - 1 in gone):
                raise SessionError(
                    f"turn {turn} has the results of the tools that turn {turn - 1} called, so both go or none",
                    f"Name {turn - 1}-{turn}, or tool:{turn} for the results alone",
                )

    def _pieces(self, turn: int) -> list[Entry]:
        return [entry for entry in self._state.entries if entry.turn == turn and entry.kind not in MARKS]

    def _start(self, turn: int) -> int:
        """Where a turn begins; of the one after the last, the end."""
        return self._pieces(turn)[0].position if turn <= self._state.turns else len(self._state.tokens)

    def _turns(self, turns: Sequence[int]) -> Iterator[_Slice]:
        """Whole turns. The first one's system message stays, but for errata in it: what the first turn that is left
        says follows the words of the template that preceded the question."""
        leading = next(turn for turn in range(1, self._state.turns + 1) if turn not in turns)
        if leading > 1:
            asked, errata = self._asked(1), [entry for entry in self._pieces(1) if entry.kind == "erratum"]
            first = self._says_first(asked, errata)
            for entry in errata:
                if entry.position < first:
                    yield _Slice(entry.position, entry.end, (), entry)
            yield _Slice(first, self._content(leading), (), asked)
        for turn in turns:
            if turn > leading:
                yield _Slice(self._start(turn), self._start(turn + 1), (), self._pieces(turn)[0])

    def _says_first(self, asked: Entry, errata: Sequence[Entry]) -> int:
        """Where what turn 1 says begins: its question, or errata that open the message of it. Errata before that are in
        the system message, or in the one message that the template has for both.

        Raise SessionError where the message holds more than what the turn says.
        """
        first = asked.end - len(self._tail(asked, 1).tokens)
        added = all(entry.text.startswith(BETWEEN) for entry in errata)  # to what is left
        if added and first > asked.position and self._opens(asked, first):
            return first
        skills = [entry.position for entry in self._pieces(1) if entry.kind == "splice"]
        opened = errata and not added and not self._kv.spelt(asked.position, first).strip()
        if opened and max(skills, default=0) <= errata[0].position:
            return errata[0].position
        raise SessionError(
            f"turn 1 of session {self._name} cannot be taken out: what the session rests on is in the message of its "
            "question"
        )

    def _opens(self, asked: Entry, first: int) -> bool:
        """Whether the words between the system message and a question are the template's, and not an empty line that is
        the message's."""
        if self._kv.spelt(asked.position, first).strip():
            return True
        runs = build(self._workspace.template, asking("?", system="s"))[-1].runs
        return bool(runs) and runs[0].special and runs[0].text == BETWEEN

    def _content(self, turn: int) -> int:
        """Where what a later turn says begins, after the words of the template that open its message."""
        first = self._pieces(turn)[0]
        if first.kind == "question":
            return first.end - len(self._tail(first, turn).tokens)
        if first.kind != "text":
            raise self._unlike(turn)
        return first.end

    def _asked(self, turn: int) -> Entry:
        """The last piece of a turn's prompt: it ends where the answer begins."""
        asked = [entry for entry in self._pieces(turn) if entry.kind in ("question", "result")]
        if not asked:
            raise self._unlike(turn)
        return asked[-1]

    def _unlike(self, turn: int) -> SessionError:
        return SessionError(
            f"turn {turn} of session {self._name} does not match the chat template of {self._workspace.model.name} as "
            "it is now, so it is not known which words of it are the template's"
        )

    def _tail(self, asked: Entry, turn: int) -> _Tail:
        """How a turn's prompt ends: from the words of its question on, or after those of its results.

        Raise SessionError where neither template ends it so.
        """
        ids = self._ids(asked)
        for template in (self._workspace.template, self._workspace.thinking_template):
            for joined in (False, True) if asked.kind == "question" else (False,):
                tokens = self._ending(template, turn, joined)
                if tokens and ids[-len(tokens) :] == tokens:
                    return _Tail(template, joined, tokens)
        raise self._unlike(turn)

    def _ending(self, template: ChatTemplate, turn: int, joined: bool) -> list[int]:
        """The same, as this template has it; `joined`: an empty line precedes the question."""
        if any(of(self._state, turn, "tool")):
            runs = self._rendered(template, turn, "x")[-1].runs
            words = max(place for place, run in enumerate(runs) if not run.special)
            return self._tokens(runs[words + 1 :])
        question = user_message(self._state.questions[turn - 1], errata=["x"] if joined else [])
        runs = next_turn(template, [question])[-1].runs
        return self._tokens(runs[next((place for place, run in enumerate(runs) if not run.special), 0) :])

    def _rendered(self, template: ChatTemplate, turn: int, text: str) -> list[Chunk]:
        """The results of a turn, with this text in the place of each."""
        names = [entry.name for entry in of(self._state, turn, "tool")]
        return results_turn(self._workspace, template, [(name, text) for name in names])

    def _tokens(self, runs: Sequence[Run]) -> list[int]:
        return [int(token) for token in self._workspace.model.tokenize_runs(runs)]

    def _ids(self, entry: Entry) -> list[int]:
        return self._state.tokens[entry.position : entry.end]

    def _thought(self, turn: int) -> Iterator[_Slice]:
        """A chain of thought, so that the answer follows the question as where nobody had asked for one."""
        if self._workspace.reasoning.end:  # what is around the answer would be left without what opens it
            raise SessionError(
                f"{self._workspace.model.name} marks its answers after a chain of thought, so they go with it",
                f"Name the turn: {turn}",
            )
        asked = self._asked(turn)
        tail = self._tail(asked, turn)
        direct = self._ending(tail.template.earlier, turn, tail.joined)
        same = _alike(tail.tokens, direct)
        if len(tail.tokens) > same or len(direct) > same:
            yield _Slice(asked.end - len(tail.tokens) + same, asked.end, direct[same:], asked)
        answers = [entry for entry in self._pieces(turn) if entry.kind == "answer"]
        last = max(place for place, entry in enumerate(answers) if entry.thought)
        chain, rest = answers[: last + 1], answers[last + 1 :]
        if rest:
            end = chain[-1].end
            while end < rest[0].end - 1 and self._text(self._state.tokens[end : end + 1]).isspace():
                end += 1  # an empty line after the chain
            yield _Slice(chain[0].position, end, (), chain[0])
            return
        text = self._text(token for entry in chain for token in self._ids(entry))
        found = self._workspace.reasoning.found(text)
        if found is None or not found[1].strip():
            raise SessionError(
                f"turn {turn} of session {self._name} has nothing but a chain of thought", f"Name the turn: {turn}"
            )
        answer = [int(token) for token in self._workspace.model.tokenize(found[1].strip())]
        yield _Slice(chain[0].position, chain[-1].end, answer, chain[-1])

    def _results(self, turn: int) -> Iterator[_Slice]:
        """What tools have returned: the message of each stays, and is empty."""
        results = [*of(self._state, turn, "tool")]
        tail = self._tail(results[-1], turn)
        chunks = [chunk for chunk in self._rendered(tail.template, turn, "") if chunk.kind == "result"]
        if len(chunks) != len(results):
            raise self._unlike(turn)
        for entry, chunk in zip(results, chunks, strict=True):
            old, new = self._ids(entry), self._tokens(chunk.runs)
            head = _alike(old, new)
            end = min(_alike(old[::-1], new[::-1]), len(old) - head, len(new) - head)
            if len(old) > head + end or len(new) > head + end:
                yield _Slice(entry.position + head, entry.end - end, new[head : len(new) - end], entry)

    # What is left.

    def _entries(self, parts: Parts, slices: Sequence[_Slice], patches: Sequence[Patch]) -> list[Entry]:
        """The entries that are left, where and what they are then."""
        numbers = [turn for turn in range(1, self._state.turns + 1) if turn not in parts.turns]
        renumbered = {turn: number for number, turn in enumerate(numbers, 1)}
        shift, place, found = position_map(patches), 0, list[Entry]()
        for entry in self._state.entries:
            turn = renumbered.get(entry.turn) or sum(number < entry.turn for number in numbers)
            if entry.kind in MARKS:
                found.append(replace(entry, position=shift(entry.position), turn=turn))
                continue
            ids = self._left(entry, slices)
            if not ids:
                continue
            opens = next((one for one in reversed(found) if one.kind not in MARKS), None)
            bare = entry.kind == "question" and any(one.first <= entry.position < one.last for one in slices)
            if ids != self._ids(entry):
                entry = self._retold(entry, ids, gone=entry.turn in parts.turns)
            left = replace(entry, position=place, tokens=len(ids), turn=max(1, turn))
            place += len(ids)
            if bare and opens and opens.kind == "text" and left.kind == "question":  # the words that open it now
                found.remove(opens)
                left = replace(left, position=opens.position, tokens=place - opens.position)
                left = replace(left, text=opens.text + left.text)
            found.append(left)
        return found

    def _text(self, ids: Iterable[int]) -> str:
        """Tokens as text, those of the template as they are written."""
        return b"".join(self._workspace.model.token_bytes(token, special=True) for token in ids).decode(
            errors="replace"
        )

    def _left(self, entry: Entry, slices: Sequence[_Slice]) -> list[int]:
        """The tokens that are left of an entry, with those that it gets."""
        found: list[int] = []
        done = entry.position
        for one in slices:
            if one.entry is entry or (one.first < entry.end and one.last > entry.position):
                found += self._state.tokens[done : max(done, min(entry.end, one.first))]
                done = max(done, min(entry.end, one.last))
            if one.entry is entry:
                found += one.tokens
        return [*found, *self._state.tokens[done : entry.end]]

    def _retold(self, entry: Entry, ids: Sequence[int], *, gone: bool) -> Entry:
        """An entry with other tokens. Of a question that is gone, the template's words before it are left."""
        text = self._text(ids)
        origin = Origin() if entry.thought else entry.origin
        return replace(entry, text=text, origin=origin, kind="text" if gone else entry.kind)

    def _rest(self, parts: Parts, entries: list[Entry], patches: Sequence[Patch]) -> tuple[State, tuple[str, ...]]:
        """The state that is left, and the skills that are not in it. Raise SessionError where something that is left
        speaks of one of these."""
        state, shift = self._state, position_map(patches)
        emptied = {turn: as_question([(one.name, "") for one in of(state, turn, "tool")]) for turn in parts.results}
        questions = [emptied.get(turn, text) for turn, text in enumerate(state.questions, 1) if turn not in parts.turns]
        there = {entry.name for entry in entries if entry.kind == "splice"}
        gone = tuple(skill.name for skill in state.skills if skill.name not in there)
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
        rest = State(
            system=state.system,
            questions=questions,
            entries=[entry for entry in entries if entry not in about],
            skills=state.skills,
            values={key: value for key, value in state.values.items() if key not in lost},
            pending={key: said for key, said in state.pending.items() if key not in lost},
            marks=state.marks,
            first=state.first,
            heard=state.heard,
        )
        rest.stated = set().union(*(keys_of(known, one.name) for one in rest.entries if one.kind == "erratum"))
        left = [skill for skill in state.skills if skill.name not in gone]
        rest.has([replace(skill, position=shift(skill.position)) for skill in left])
        return rest, gone

    def _say_again(self, said: Sequence[Entry], rest: State) -> tuple[str, ...]:
        """Of errata that are gone, those that still hold wait for the next question. Return their fields."""
        before, now = self._state.known, rest.known
        again, later = dict[str, str](), set(rest.pending)
        for entry in reversed(self._state.entries):
            if entry.kind not in ("erratum", "edit") or not entry.name:
                continue
            for one in (one for one in before.find(entry.name) if f"{one.skill}.{one.field}" in now):
                key = now.key(one.skill, one.field)
                if entry in said and key not in later and key in rest.values:
                    again[key] = sentence(self._kv, now.resolve(key)[0], rest.values[key])
                later.add(key)
        rest.pending |= dict(reversed(again.items()))
        return tuple(reversed(again))


class _Tail(NamedTuple):
    """How a prompt ends: the template that it was made by, whether an empty line precedes the question, its tokens."""

    template: ChatTemplate
    joined: bool
    tokens: list[int]


def _patches(slices: Sequence[_Slice]) -> list[Patch]:
    """The slices as patches, those next to each other in one."""
    found: list[Patch] = []
    for one in slices:
        if found and one.first <= found[-1].last:
            found[-1] = Patch(found[-1].first, one.last, [*found[-1].tokens, *one.tokens])
        else:
            found.append(Patch(one.first, one.last, one.tokens))
    return found


def _alike(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def _with_it(rest: State, first: int) -> int:
    """Tokens from a position on whose rows were computed there: those of a skill that was spliced have seen nothing."""
    computed = (entry for entry in rest.entries if entry.how != "spliced")
    return sum(max(0, entry.end - max(first, entry.position)) for entry in computed)


def _again(entry: Entry, first: int) -> Entry:
    """An entry when all from a position on has been decoded again, also what was spliced."""
    if entry.how == "decoded" or entry.position < first or not entry.tokens:
        return entry
    return replace(entry, how="decoded", origin=Origin(Reason.AGAIN))


def _as_line(rest: State) -> Line:
    """What is left, as a ledger keeps it."""
    return {
        "system": rest.system,
        "questions": rest.questions,
        "pieces": [entry_line(entry) for entry in rest.entries],
        "skills": [asdict(skill) for skill in rest.skills],
        "values": rest.values,
        "pending": rest.pending,
        "stated": sorted(rest.stated),
        "marks": rest.marks,
        "first": rest.first,
        "heard": rest.heard,
    }
