"""Speaking: the model writes a chain of thought, then an answer that is told from it, or decides.

A prompt with `think` ends where the chain begins. The chain ends by its mark, by an end token, or at `max_think`; what
must precede the answer is put there, so that the sequence ends where the answer begins. Everything here is a task of a
loop (engine/loop.py).
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from notes_cli.engine.constraint import Constraint
from notes_cli.engine.decision import Decision, decide_task
from notes_cli.engine.loop import Logits, Task
from notes_cli.engine.pieces import Reason
from notes_cli.engine.sampler import Sampler, SamplerOptions
from notes_cli.engine.sequence import KVSequence, Stopped
from notes_cli.engine.token_generator import TokenGenerator
from notes_cli.errors import ContextLengthError, Help, UnsupportedError
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.reasoning import Begins, Reasoning, Until

if TYPE_CHECKING:
    from notes_cli.text.tools import Calls

DEFAULT_MAX_THINK = 512  # tokens of a chain, if nothing else is said
UNLIMITED_RESERVE = 4096  # tokens that there is room for at least, for an answer without a limit
ANSWER_RESERVE = 64  # tokens that are kept free after a chain, for its end and an answer
CONCLUDING_TOKENS = 24  # tokens in which a chain that was cut short comes to its answer

Say = Callable[[str], None]
Chosen = Callable[[int, Logits], None]


@dataclass(frozen=True, slots=True)
class ReasoningTrace:
    """A chain of thought: its text without marks, how many tokens it takes, and whether it ended by itself.

    `answer`: what it ends with, where the model puts its answer into the chain (else empty, and the answer follows).
    `rest`: the beginning of an answer that came in one token with the closing mark. `stopped`: why it ended.
    """

    text: str
    tokens: int
    finished: bool
    answer: str = ""
    rest: str = ""
    stopped: Stopped = "end"


@dataclass(frozen=True, slots=True)
class Reply:
    """What the model said: the answer, its tokens, the chain before it, if there was one, and why the answer ends."""

    text: str
    tokens: int
    thought: ReasoningTrace | None = None
    stopped: Stopped = "end"


def ignore_text(text: str) -> None:
    """Nobody hears it."""


class _Told:
    """A text that is told as it comes."""

    def __init__(self, say: Say, *, strip: bool = True) -> None:
        """`strip`: without the blanks that it begins with."""
        self.text = ""
        self._say, self._strip = say, strip

    def add(self, text: str) -> None:
        text = text.lstrip() if self._strip and not self.text else text
        self.text += text
        if text:
            self._say(text)


@dataclass(frozen=True, slots=True)
class ReplyGenerator:
    """How an answer is spoken, and the chain of thought before it.

    `max_tokens`, `max_think`: of the answer, and of a chain. `say` and `say_thought` get their texts as they come,
    `chosen` each token of an answer, with the logits that it was chosen from, before `say` gets its text. `stops`:
    texts before which the answer ends. `grammar`: what the answer is held to, and a chain is not; then it is not
    stripped either. `calls`: it may call tools; one that does is held to no grammar. `opened`: the prompt has what
    opens an answer, if the model has such a mark; with tools it is left out, as a call begins otherwise.
    """

    workspace: Workspace
    sampling: SamplerOptions = field(default_factory=SamplerOptions)
    max_tokens: int = 0
    max_think: int = DEFAULT_MAX_THINK
    on_text: Say = ignore_text
    on_reasoning: Say = ignore_text
    stops: Sequence[str] = ()
    on_token: Chosen | None = None
    grammar: str | None = None
    calls: Calls | None = None
    opened: bool = True

    def reason(self, sequence: KVSequence, *, begun: str = "") -> Task[ReasoningTrace]:
        """Write a chain; the sequence is left where the answer begins.

        `begun`: the chain's text that is there already. Raise EngineError where the context has no room for a chain and
        its end.
        """
        reasoning, start = self.workspace.reasoning, len(sequence)
        reasoning = reasoning.calling if self.calls else reasoning
        told, chain = _Told(self.on_reasoning), Until(reasoning.close)

        def hear(text: str) -> bool:
            told.add(chain.feed(text))
            return chain.found

        limit = 0 if hear(begun) else _within(sequence, self.max_think, self.max_tokens)
        yield from self._writing(sequence, limit, hear, keep=ANSWER_RESERVE)
        told.add(chain.flush())
        count = len(sequence) - start
        finished = chain.found or sequence.stopped == "end"
        room = sequence.stopped != "context" and limit == self.max_think
        if count:
            sequence.pieces[-1] = replace(sequence.pieces[-1], reason=Reason.THOUGHT)
        answer = rest = ""
        if reasoning.inside:
            finished |= reasoning.found(told.text) is not None
            answer = yield from self._concluding(sequence, told)
        else:
            missing, rest = _missing(reasoning, chain)
            closing, cut = self.workspace.model.tokenize(missing, special=True), "" if finished else str(count)
            sequence.append(closing, "answer", reason=Reason.THOUGHT_END, detail=cut)
        stopped: Stopped = "end" if finished else "length" if room else "context"
        return ReasoningTrace(told.text.strip(), len(sequence) - start, finished, answer, rest, stopped)

    def _concluding(self, sequence: KVSequence, told: _Told) -> Task[str]:
        """The answer that a chain ends with; one that was cut short is brought to it. Empty if there is none."""
        reasoning = self.workspace.reasoning

        def hear(text: str) -> bool:
            told.add(text)
            return False

        if reasoning.found(told.text) is None:
            sequence.append(self.workspace.model.tokenize(reasoning.answer), "answer", reason=Reason.THOUGHT_END)
            told.add(reasoning.answer)
            yield from self._writing(sequence, CONCLUDING_TOKENS, hear)
        found = reasoning.found(told.text)
        return found[1].strip() if found else ""

    def reply(self, sequence: KVSequence, thought: ReasoningTrace | None = None) -> Task[Reply]:
        """Write the answer. `thought`: the chain that precedes it; without one the model may begin one unasked."""
        if self.grammar is not None:
            return (yield from self._formed(sequence, thought))
        if thought and thought.answer:
            text, stopped = self._said_in_chain(thought.answer)
            if text:
                self.on_text(text)
            return Reply(text, 0, thought, stopped)
        return (yield from self._free(sequence, thought))

    def _free(self, sequence: KVSequence, thought: ReasoningTrace | None) -> Task[Reply]:
        """Write an answer that is held to nothing."""
        reasoning, start, told = self.workspace.reasoning, len(sequence), _Told(self.on_text)
        begins, end = Begins("" if thought else reasoning.open), Until(reasoning.end, self.stops)

        def hear(text: str) -> bool:
            told.add(end.feed(begins.feed(text)))
            return begins.found or end.found

        told.add(end.feed(thought.rest if thought else ""))
        marks = self.calls.form.marks if self.calls else ""
        yield from self._writing(sequence, self.max_tokens, hear, chosen=self.on_token, marks=marks)
        if begins.found:
            thought = yield from self.reason(sequence, begun=begins.rest)
            return (yield from self.reply(sequence, replace(thought, tokens=len(sequence) - start)))
        told.add(end.feed(begins.flush()))
        told.add(end.flush())
        return Reply(told.text.strip(), len(sequence) - start, thought, "end" if end.found else sequence.stopped)

    def _said_in_chain(self, answer: str) -> tuple[str, Stopped]:
        """As much of an answer that is in the chain as was asked for, and what it stopped at."""
        model, end = self.workspace.model, Until("", self.stops)
        tokens = model.tokenize(answer)
        whole = len(tokens) <= self.max_tokens
        if not whole:
            answer = b"".join(map(model.token_bytes, tokens[: self.max_tokens].tolist())).decode(errors="ignore")
        text = end.feed(answer) + end.flush()
        return text, "end" if end.found or whole else "length"

    def _formed(self, sequence: KVSequence, thought: ReasoningTrace | None) -> Task[Reply]:
        """Write calls, where it may be calls, or an answer that is held to the grammar."""
        if thought is None:
            thought = yield from self._unasked(sequence)
        elif thought.answer or thought.rest.strip():
            thought = _without_answer(self.workspace, sequence, thought)
        called = (yield from self._calling(sequence, self.calls, thought)) if self.calls else None
        if called:
            return called
        if opening := self._opening(thought):
            sequence.append(self.workspace.model.tokenize(opening, special=True), "answer")
        return (yield from self._held(sequence, thought))

    def _opening(self, thought: ReasoningTrace | None) -> str:
        """What opens an answer, where nothing was put there because it might have been a call."""
        reasoning, template = self.workspace.reasoning, self.workspace.template
        if thought:
            return reasoning.answer.removeprefix(reasoning.calling.answer) if self.calls else ""
        return "" if self.opened or template.calling is None else template.reply.removeprefix(template.calling)

    def _unasked(self, sequence: KVSequence) -> Task[ReasoningTrace | None]:
        """The chain that a model begins before an answer which nobody asked it to think about; None if it does not."""
        model, start = self.workspace.model, len(sequence)
        marks = model.tokenize(self.workspace.reasoning.open.strip(), special=True)
        if not len(marks):
            return None
        # All tokens of the mark: an answer may be opened by a mark that begins alike. A state cannot go back, so of
        # that the first one has to do. The last may be merged with what follows the mark, as ">" with a line's end.
        for place in range(1 if model.recurrent else len(marks)):
            (logits,) = yield [sequence]
            best, mark = (model.token_bytes(int(one), special=True) for one in (logits.argmax(), marks[place]))
            if best != mark and not (place == len(marks) - 1 and mark and best.startswith(mark)):
                if place:
                    sequence.truncate(start)
                return None
            sequence.append(marks[place : place + 1], "answer")
        if len(sequence) - start < len(marks):
            sequence.append(marks[len(sequence) - start :], "answer")
        thought = yield from self.reason(sequence)
        return replace(thought, tokens=len(sequence) - start)

    def _calling(self, sequence: KVSequence, calls: Calls, thought: ReasoningTrace | None) -> Task[Reply | None]:
        """Write an answer for as long as it may be calls; None where it is none, and nothing of it is left then. Raise
        UnsupportedError for a model that cannot go back."""
        start, answer, end = len(sequence), "", Until(self.workspace.reasoning.end, self.stops)

        def hear(text: str) -> bool:
            nonlocal answer
            answer += end.feed(text)
            return end.found or not calls.may_be(answer)

        yield from self._writing(sequence, self.max_tokens, hear, marks=calls.form.marks)
        answer += end.flush()
        stopped = "end" if end.found else sequence.stopped
        if not calls.may_be(answer) or (stopped == "end" and not calls.are(answer)):
            if self.workspace.model.recurrent and len(sequence) > start:
                what = "this model cannot take back what was no call: send tools, or a form of the answer"
                raise UnsupportedError(what)
            sequence.truncate(start)
            return None
        if answer:
            self.on_text(answer)
        return Reply(answer.strip(), len(sequence) - start, thought, stopped)

    def _held(self, sequence: KVSequence, thought: ReasoningTrace | None) -> Task[Reply]:
        """Write an answer that is held to the grammar."""
        start, told, end = len(sequence), _Told(self.on_text, strip=False), Until("", self.stops)

        def hear(text: str) -> bool:
            told.add(end.feed(text))
            return end.found

        yield from self._writing(sequence, self.max_tokens, hear, chosen=self.on_token, grammar=self.grammar)
        told.add(end.flush())
        return Reply(told.text, len(sequence) - start, thought, "end" if end.found else sequence.stopped)

    def _writing(
        self,
        sequence: KVSequence,
        limit: int,
        hear: Callable[[str], bool],
        *,
        chosen: Chosen | None = None,
        grammar: str | None = None,
        marks: str = "",
        keep: int = 0,
    ) -> Task[None]:
        """Write at most `limit` tokens. `hear` gets the text as it comes, in whole characters, and says whether that is
        enough. Of special tokens only marks have a text, `marks` among them. `keep`: tokens that the sequence must have
        room for afterwards; it may have less room than when this began."""
        model, reasoning = self.workspace.model, self.workspace.reasoning
        shown = (reasoning.open + reasoning.close + reasoning.end + marks).encode()
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        constraint = None if grammar is None else Constraint(model, grammar)
        with Sampler(self.sampling, constraint) as sampler:
            writer = TokenGenerator(sequence, sampler, limit)
            while writer.active:
                if len(sequence) + keep > sequence.size:
                    sequence.stopped = "context"
                    break
                (logits,) = yield [sequence]
                token = writer.choose(logits)
                if token is not None:
                    if chosen:
                        chosen(token, logits)
                    special = model.token_bytes(token, special=True)
                    if hear(decoder.decode(special if special in shown else model.token_bytes(token))):
                        return
        hear(decoder.decode(b"", final=True))


def _within(sequence: KVSequence, limit: int, answer: int) -> int:
    """As many tokens of the limit as there is room for: none at all would be an answer that nobody thought about.
    `answer`: tokens that may follow."""
    start, size = len(sequence), sequence.size
    if limit and start + ANSWER_RESERVE >= size:
        wanted = start + limit + ANSWER_RESERVE + min(answer, UNLIMITED_RESERVE)
        raise ContextLengthError(
            f"the context is too small to think in: the prompt takes {start} of {size} tokens",
            Help.LARGER_CONTEXT(tokens=min(-(-wanted // 256) * 256, sequence.context.longest or wanted)),
            tokens=start + ANSWER_RESERVE + 1,
            longest=size,
        )
    return min(limit, size - start - ANSWER_RESERVE)


def _missing(reasoning: Reasoning, chain: Until) -> tuple[str, str]:
    """What must be put after a chain for the answer to begin, and what of the answer is there already."""
    if not chain.found:
        return reasoning.closing, ""
    if reasoning.answer.startswith(chain.rest):
        return reasoning.answer[len(chain.rest) :], ""
    return "", chain.rest


def _without_answer(workspace: Workspace, sequence: KVSequence, thought: ReasoningTrace) -> ReasoningTrace:
    """Take back what the model has begun to answer in its chain, or in one token with its closing mark."""
    if thought.answer:
        place, length = _position_of(workspace, sequence, thought), len(sequence)
        sequence.truncate(place)
        text = thought.text.rpartition(thought.answer)[0].rstrip()
        return replace(thought, text=text, answer="", tokens=thought.tokens - (length - place))
    last = workspace.model.token_bytes(int(sequence.tokens[-1]), special=True)
    sequence.truncate(len(sequence) - 1)
    mark = last.removesuffix(thought.rest.encode()).decode(errors="replace")
    sequence.append(workspace.model.tokenize(mark, special=True), "answer", reason=Reason.THOUGHT_END)
    return replace(thought, rest="")


def decide_after_reasoning(
    workspace: Workspace, sequence: KVSequence, choices: Sequence[str], thought: ReasoningTrace
) -> Task[Decision]:
    """The decision after a chain of thought: at the end of the sequence, or where the chain names its answer.

    The sequence is left as it was. Raise NotesError for choices that are none.
    """
    named = thought.answer.casefold()
    if named not in [choice.casefold() for choice in choices]:
        return (yield from decide_task(sequence, choices))
    pieces, tokens = list(sequence.pieces), sequence.tokens
    sequence.truncate(_position_of(workspace, sequence, thought))
    decision = yield from decide_task(sequence, choices)
    choice = next(choice for choice in choices if choice.casefold() == named)
    sequence.append(tokens[len(sequence) :])
    yield [sequence]
    sequence.pieces = pieces
    return replace(decision, choice=choice)


def choose_task(workspace: Workspace, sequence: KVSequence, choices: Sequence[str], limit: int) -> Task[Decision]:
    """Decide at the end of a sequence; with a `limit` above 0, after a chain of thought of at most so many tokens."""
    if not limit:
        return (yield from decide_task(sequence, choices))
    thought = yield from ReplyGenerator(workspace, max_think=limit).reason(sequence)
    return (yield from decide_after_reasoning(workspace, sequence, choices, thought))


def _position_of(workspace: Workspace, sequence: KVSequence, thought: ReasoningTrace) -> int:
    """The position of the token that the thought's answer begins with."""
    position, following = len(sequence), b""
    while thought.answer.encode() not in following:
        position -= 1
        following = workspace.model.token_bytes(int(sequence.tokens[position])) + following
    return position
