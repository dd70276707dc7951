"""Generates a reply: optional reasoning, then an answer, a constrained answer, tool calls, or a decision.

A prompt with `think` ends where the reasoning begins. Reasoning ends with its closing mark, an end token, or at
`max_think`; then the tokens that must precede the answer are appended. Everything here is a task
(engine/sequence.py). A decision chooses among given answers by their log-probabilities: each answer is scored whole,
with and without a leading blank, which is a habit of tokenizers; the better score counts, normalised over the answers.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from notes_cli.engine.model import Model
from notes_cli.engine.pieces import Reason
from notes_cli.engine.sampler import Constraint, Sampler, SamplerOptions
from notes_cli.engine.sequence import KVSequence, Logits, Stopped, Task, TokenGenerator, run
from notes_cli.errors import ContextLengthError, Help, NotesError, UnsupportedError
from notes_cli.runtime.workspace import Workspace
from notes_cli.text.reasoning import LeadingMark, Reasoning, TextStream

if TYPE_CHECKING:
    from notes_cli.text.tools import Calls


DEFAULT_MAX_THINK = 512  # default maximum of reasoning tokens
UNLIMITED_RESERVE = 4096  # tokens reserved for an answer without a limit
ANSWER_RESERVE = 64  # tokens reserved after reasoning, for its end and an answer
CONCLUDING_TOKENS = 24  # tokens in which truncated reasoning is brought to its answer

Say = Callable[[str], None]
Chosen = Callable[[int, Logits], None]


@dataclass(frozen=True, slots=True)
class ReasoningTrace:
    """Reasoning output: text without marks, number of tokens, and whether it was finished. `answer`: its final answer,
    for models that answer within the reasoning (else empty, and the answer follows). `rest`: the beginning of the
    answer, if it came in one token with the closing mark. `stopped`: why it ended."""

    text: str
    tokens: int
    finished: bool
    answer: str = ""
    rest: str = ""
    stopped: Stopped = "end"


@dataclass(frozen=True, slots=True)
class Reply:
    """A generated answer: text, number of tokens, reasoning if any, why generation ended, and the stop sequence that
    ended it, if one did."""

    text: str
    tokens: int
    thought: ReasoningTrace | None = None
    stopped: Stopped | None = "end"  # None for a choice
    stop: str = ""


def ignore_text(text: str) -> None:
    """Ignore the text."""


@dataclass(frozen=True, slots=True)
class ReplyGenerator:
    """Settings and callbacks of one reply. `max_tokens`, `max_think`: of the answer, and of the reasoning. `on_text`
    and `on_reasoning` get their texts as they are generated, `on_token` each token of an answer with its logits, before
    its text. `ended`: asked after each token; True ends the reply. `stops`: stop sequences. `grammar`: constraint of
    the answer, not of the reasoning; the answer is not stripped then. `calls`: tools that it may call, unconstrained.
    `opened`: the prompt has the mark that opens an answer, if the model has one; with tools it is left out, as a call
    begins otherwise. `prefilled`: the prompt has the beginning of the answer, so that no reasoning precedes the rest,
    and blanks before it count. `call_begins`: where a call begins in the answer's text, or -1; it is asked after each
    token. There the answer is cut, also in the sequence, and a call by `call_grammar` follows. `raw`: it continues a
    text, without marks of reasoning."""

    workspace: Workspace
    sampling: SamplerOptions = field(default_factory=SamplerOptions)
    max_tokens: int = 0
    max_think: int = DEFAULT_MAX_THINK
    on_text: Say = ignore_text
    on_reasoning: Say = ignore_text
    ended: Callable[[], bool] = lambda: False
    stops: Sequence[str] = ()
    on_token: Chosen | None = None
    grammar: str | None = None
    calls: Calls | None = None
    opened: bool = True
    prefilled: bool = False
    call_begins: Callable[[], int] | None = None
    call_grammar: str | None = None
    raw: bool = False

    @property
    def _reasoning(self) -> Reasoning:
        return Reasoning() if self.raw else self.workspace.reasoning

    def reason(self, sequence: KVSequence, *, begun: str = "") -> Task[ReasoningTrace]:
        """Generate reasoning up to the start of the answer. `begun`: reasoning text that is already generated. Raises
        EngineError without capacity for reasoning and its end."""
        reasoning, start = self._reasoning, len(sequence)
        reasoning = reasoning.calling if self.calls else reasoning
        stream = TextStream(self.on_reasoning, reasoning.close, strip=True)

        def on_text(text: str) -> bool:
            stream.add(text)
            return bool(stream.found)

        limit = 0 if on_text(begun) else _reasoning_limit(sequence, self.max_think, self.max_tokens)
        yield from self._generate(sequence, limit, on_text, keep=ANSWER_RESERVE)
        stream.end()
        count = len(sequence) - start
        finished = bool(stream.found) or sequence.stopped == "end"
        within_context = sequence.stopped != "context" and limit == self.max_think
        if count:
            sequence.pieces[-1] = replace(sequence.pieces[-1], reason=Reason.THOUGHT)
        answer = rest = ""
        if reasoning.inside:
            finished |= reasoning.found(stream.text) is not None
            answer = yield from self._conclude(sequence, stream)
        else:
            missing, rest = _closing_text(reasoning, stream)
            closing, cut = self.workspace.model.tokenize(missing, special=True), "" if finished else str(count)
            sequence.append(closing, "answer", reason=Reason.THOUGHT_END, detail=cut)
        stopped: Stopped = "end" if finished else "length" if within_context else "context"
        return ReasoningTrace(stream.text.strip(), len(sequence) - start, finished, answer, rest, stopped)

    def _conclude(self, sequence: KVSequence, stream: TextStream) -> Task[str]:
        """Return the answer at the end of the reasoning, generating it if the reasoning was truncated; empty if there
        is none."""
        reasoning = self._reasoning

        def on_text(text: str) -> bool:
            stream.add(text)
            return False

        if reasoning.found(stream.text) is None:
            sequence.append(self.workspace.model.tokenize(reasoning.answer), "answer", reason=Reason.THOUGHT_END)
            stream.add(reasoning.answer)
            yield from self._generate(sequence, CONCLUDING_TOKENS, on_text)
        match = reasoning.found(stream.text)
        return match[1].strip() if match else ""

    def reply(self, sequence: KVSequence, thought: ReasoningTrace | None = None) -> Task[Reply]:
        """Generate the answer. `thought`: preceding reasoning; without it the model may start to reason unrequested."""
        if self.grammar is not None:
            return (yield from self._generate_formed(sequence, thought))
        if thought and thought.answer:
            return self._answer_in_reasoning(thought.answer, thought)
        return (yield from self._generate_free(sequence, thought))

    def _generate_free(self, sequence: KVSequence, thought: ReasoningTrace | None) -> Task[Reply]:
        """Generate an unconstrained answer."""
        reasoning, start = self._reasoning, len(sequence)
        stream = TextStream(self.on_text, reasoning.end, self.stops, strip=not self.prefilled)
        begins = LeadingMark(reasoning.open) if reasoning.open and not (thought or self.prefilled) else None
        places: list[tuple[int, int]] = []  # of tokens: in the text and in the sequence
        cut = -1  # place in the text

        def on_text(text: str) -> bool:
            nonlocal cut
            places.append((len(stream.text), len(sequence) - 1))
            stream.add(begins.feed(text) if begins else text)
            cut = self.call_begins() if self.call_begins else -1
            return bool(begins and begins.found) or bool(stream.found) or cut >= 0

        stream.add(thought.rest if thought else "")
        marks = self.calls.form.marks if self.calls else ""
        yield from self._generate(sequence, self.max_tokens, on_text, on_token=self.on_token, marks=marks)
        if begins and begins.found:
            thought = yield from self.reason(sequence, begun=begins.rest)
            return (yield from self.reply(sequence, replace(thought, tokens=len(sequence) - start)))
        if cut >= 0:
            sequence.truncate(next((token for place, token in reversed(places) if place <= cut), start))
            left = self.max_tokens - (len(sequence) - start)
            calling = replace(self, grammar=self.call_grammar, max_tokens=left)
            reply = yield from calling._generate_constrained(sequence, thought)
            return replace(reply, tokens=len(sequence) - start)
        if begins:
            stream.add(begins.flush())
        stream.end()
        return self._reply(sequence, stream, start, thought, stream.text.strip())

    def _reply(
        self, sequence: KVSequence, stream: TextStream, start: int, thought: ReasoningTrace | None, text: str
    ) -> Reply:
        """Return the reply that began at token `start`, of a stream that has ended."""
        stopped: Stopped = "end" if stream.found else sequence.stopped
        stop = stream.found if stream.found in self.stops else ""
        return Reply(text, len(sequence) - start, thought, stopped, stop)

    def _answer_in_reasoning(self, answer: str, thought: ReasoningTrace) -> Reply:
        """Return an answer from the reasoning, truncated to the limits."""
        model, stream = self.workspace.model, TextStream(self.on_text, "", self.stops)
        tokens = model.tokenize(answer)
        whole = len(tokens) <= self.max_tokens
        if not whole:
            answer = b"".join(map(model.token_bytes, tokens[: self.max_tokens].tolist())).decode(errors="ignore")
        stream.add(answer)
        stream.end()
        stopped: Stopped = "end" if stream.found or whole else "length"
        return Reply(stream.text, 0, thought, stopped, stream.found)

    def _generate_formed(self, sequence: KVSequence, thought: ReasoningTrace | None) -> Task[Reply]:
        """Generate tool calls, if allowed, or a constrained answer."""
        if thought is None:
            thought = yield from self._unrequested_reasoning(sequence)
        elif thought.answer or thought.rest.strip():
            thought = _without_answer(self.workspace, sequence, thought)
        called = (yield from self._generate_calls(sequence, self.calls, thought)) if self.calls else None
        if called:
            return called
        if opening := self._opening(thought):
            sequence.append(self.workspace.model.tokenize(opening, special=True), "answer")
        return (yield from self._generate_constrained(sequence, thought))

    def _opening(self, thought: ReasoningTrace | None) -> str:
        """Return the mark that opens an answer, if it was left out for a possible call."""
        reasoning, template = self._reasoning, self.workspace.template
        if thought:
            return reasoning.answer.removeprefix(reasoning.calling.answer) if self.calls else ""
        return "" if self.opened or template.calling is None else template.reply.removeprefix(template.calling)

    def _unrequested_reasoning(self, sequence: KVSequence) -> Task[ReasoningTrace | None]:
        """Generate the reasoning that a model starts unrequested; None if it does not."""
        model, start = self.workspace.model, len(sequence)
        marks = model.tokenize(self._reasoning.open.strip(), special=True)
        if not len(marks):
            return None
        # Compare all tokens of the mark, as an answer's mark may have the same prefix. A recurrent state cannot be
        # rolled back, so there the first token decides. The last may be merged with what follows, such as ">" and a
        # line break.
        for place in range(1 if model.recurrent else len(marks)):
            logits = yield from sequence.next_logits()
            best, mark = (model.token_bytes(int(token), special=True) for token in (logits.argmax(), marks[place]))
            if best != mark and not (place == len(marks) - 1 and mark and best.startswith(mark)):
                if place:
                    sequence.truncate(start)
                return None
            sequence.append(marks[place : place + 1], "answer")
        if len(sequence) - start < len(marks):
            sequence.append(marks[len(sequence) - start :], "answer")
        thought = yield from self.reason(sequence)
        return replace(thought, tokens=len(sequence) - start)

    def _generate_calls(self, sequence: KVSequence, calls: Calls, thought: ReasoningTrace | None) -> Task[Reply | None]:
        """Generate while the text may be tool calls; None, with all of it removed, if it is none. Raises
        UnsupportedError where the model cannot be rolled back."""
        start, stream = len(sequence), TextStream(ignore_text, self._reasoning.end, self.stops)

        def on_text(text: str) -> bool:
            stream.add(text)
            return bool(stream.found) or not calls.may_be(stream.text)

        yield from self._generate(sequence, self.max_tokens, on_text, marks=calls.form.marks)
        stream.end()
        answer, ended = stream.text, bool(stream.found) or sequence.stopped == "end"
        if not calls.may_be(answer) or (ended and not calls.are(answer)):
            if self.workspace.model.recurrent and len(sequence) > start:
                text_ = "this model cannot take back what was no call: send tools, or a form of the answer"
                raise UnsupportedError(text_)
            sequence.truncate(start)
            return None
        if answer:
            self.on_text(answer)
        return self._reply(sequence, stream, start, thought, answer.strip())

    def _generate_constrained(self, sequence: KVSequence, thought: ReasoningTrace | None) -> Task[Reply]:
        """Generate an answer constrained by the grammar."""
        start, stream = len(sequence), TextStream(self.on_text, "", self.stops)

        def on_text(text: str) -> bool:
            stream.add(text)
            return bool(stream.found)

        yield from self._generate(sequence, self.max_tokens, on_text, on_token=self.on_token, grammar=self.grammar)
        stream.end()
        return self._reply(sequence, stream, start, thought, stream.text)

    def _generate(
        self,
        sequence: KVSequence,
        limit: int,
        on_text: Callable[[str], bool],
        *,
        on_token: Chosen | None = None,
        grammar: str | None = None,
        marks: str = "",
        keep: int = 0,
    ) -> Task[None]:
        """Generate at most `limit` tokens. `on_text` gets the text in whole characters and returns True to stop.
        Special tokens have no text except the marks of the model and those in `marks`. `keep`: tokens to leave free."""
        model, reasoning = self.workspace.model, self._reasoning
        shown = (reasoning.open + reasoning.close + reasoning.end + marks).encode()
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        constraint = None if grammar is None else Constraint(model, grammar)
        with Sampler(self.sampling, constraint, model) as sampler:
            generator = TokenGenerator(sequence, sampler, limit)
            while generator.active:
                if len(sequence) + keep > sequence.size:
                    sequence.stopped = "context"
                    break
                logits = yield from sequence.next_logits()
                token = generator.choose(logits)
                if token is not None:
                    if on_token:
                        on_token(token, logits)
                    special = model.token_bytes(token, special=True)
                    if on_text(decoder.decode(special if special in shown else model.token_bytes(token))):
                        return
                    if self.ended():
                        sequence.stopped = "end"
                        break
        on_text(decoder.decode(b"", final=True))


def _reasoning_limit(sequence: KVSequence, limit: int, answer: int) -> int:
    """Return the reasoning limit, reduced to the capacity. Raises EngineError if none is left. `answer`: tokens that
    may follow."""
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


def _closing_text(reasoning: Reasoning, until: TextStream) -> tuple[str, str]:
    """Return the text to append after the reasoning to start the answer, and the part of the answer that is present."""
    if not until.found:
        return reasoning.closing, ""
    if reasoning.answer.startswith(until.rest):
        return reasoning.answer[len(until.rest) :], ""
    return "", until.rest


def _without_answer(workspace: Workspace, sequence: KVSequence, thought: ReasoningTrace) -> ReasoningTrace:
    """Remove an answer that the model began in its reasoning, or in one token with the closing mark."""
    if thought.answer:
        place, length = _answer_index(workspace, sequence, thought), len(sequence)
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
    """Decide after reasoning: at the end of the sequence, or where the reasoning names its answer. The sequence is left
    unchanged. Raises NotesError for invalid choices."""

    named = thought.answer.casefold()
    if named not in [choice.casefold() for choice in choices]:
        return (yield from decide_task(sequence, choices))
    pieces, tokens = list(sequence.pieces), sequence.tokens
    sequence.truncate(_answer_index(workspace, sequence, thought))
    decision = yield from decide_task(sequence, choices)
    choice = next(choice for choice in choices if choice.casefold() == named)
    sequence.append(tokens[len(sequence) :])
    yield from sequence.next_logits()
    sequence.pieces = pieces
    return replace(decision, choice=choice)


def _answer_index(workspace: Workspace, sequence: KVSequence, thought: ReasoningTrace) -> int:
    """Return the index of the token at which the answer within the reasoning begins."""
    position, following = len(sequence), b""
    while thought.answer.encode() not in following:
        position -= 1
        following = workspace.model.token_bytes(int(sequence.tokens[position])) + following
    return position


@dataclass(frozen=True, slots=True)
class Decision:
    """The preferred answer, and the probability of each answer among those given."""

    choice: str
    probabilities: dict[str, float]

    @property
    def margin(self) -> float:
        """Difference between the highest and the second probability."""
        ranked = sorted(self.probabilities.values(), reverse=True)
        return ranked[0] - ranked[1]


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))


def decide(sequence: KVSequence, choices: Sequence[str]) -> Decision:
    """Score each choice as the answer at the end of the sequence, which is left unchanged."""
    return run(decide_task(sequence, choices))


def decide_task(sequence: KVSequence, choices: Sequence[str]) -> Task[Decision]:
    """As `decide`, as a task (engine/sequence.py)."""
    check_choices(choices)
    model = sequence.context.model
    variants = variants_of(model, choices)
    every = dict.fromkeys(chain.from_iterable(variants.values()))
    # "no" against "not sure": the shorter answer is complete only if generation ends there.
    ending = any(a != b and b[: len(a)] == a for a in every for b in every)
    first = log_softmax((yield from sequence.next_logits()))
    following: dict[tuple[int, ...], Iterable[Logits]] = {}
    for tokens in every:
        prefix = tokens if ending else tokens[:-1]
        following[tokens] = (yield from sequence.lookahead_task(prefix)) if prefix else ()
    ends = model.end_tokens if ending else []
    scores = {
        choice: max(_score(tokens, first, following[tokens], ends) for tokens in options)
        for choice, options in variants.items()
    }
    weights = np.exp(np.array(list(scores.values())) - max(scores.values()))
    probabilities = dict(zip(scores, (float(w) for w in weights / weights.sum()), strict=True))
    return Decision(max(probabilities, key=lambda choice: probabilities[choice]), probabilities)


def variants_of(model: Model, choices: Sequence[str]) -> dict[str, list[tuple[int, ...]]]:
    """Tokenize each choice without and with a leading blank."""
    return {choice: [tuple(map(int, model.tokenize(text))) for text in (choice, " " + choice)] for choice in choices}


def check_choices(choices: Sequence[str]) -> None:
    if len(choices) < 2 or len(set(choices)) < len(choices) or not all(choices):
        raise NotesError(f"choices must be two or more different answers, got {','.join(choices)!r}")


def _score(
    tokens: Sequence[int], first: NDArray[np.float64], ahead: Iterable[NDArray[np.float32]], ends: Sequence[int]
) -> float:
    """Return the log-probability of the tokens: the first by `first`, the others by `ahead`, the logits after each of
    them; with `ends`, times the probability that one of these end tokens follows."""
    rows = [log_softmax(row) for row in ahead]
    total = float(first[tokens[0]]) + sum(float(row[token]) for row, token in zip(rows, tokens[1:], strict=False))
    return total + float(rows[-1][ends].max()) if ends else total
