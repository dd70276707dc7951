"""Verifies splices, edit methods and sessions on this model: compares logits and decisions with a full recompute."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cache, partial
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from notes_cli.config import resource
from notes_cli.documents import read_yaml
from notes_cli.editing.methods import METHODS, RECOMPUTE, STALE, Change, Method
from notes_cli.engine.pieces import Reason
from notes_cli.engine.segment import LayerRows, Segment, Tokens
from notes_cli.engine.sequence import KVSequence, Task, run
from notes_cli.errors import EngineError, Help, NotesError, Notice, Progress, UnsupportedError
from notes_cli.runtime.assemble import assemble_task
from notes_cli.runtime.check_rows import RowCheck, check_rows
from notes_cli.runtime.generate import decide, log_softmax
from notes_cli.runtime.open_skills import open_segments
from notes_cli.runtime.prompt import DEFAULT_SEAM, Prompt, changes_of, rendered
from notes_cli.runtime.request import NO_CALLBACKS, Callbacks, Request
from notes_cli.runtime.resolve import method_for, resolve
from notes_cli.runtime.workspace import Workspace
from notes_cli.sessions.session import Session
from notes_cli.sessions.state import SkillText, State
from notes_cli.text.erratum import known_fields
from notes_cli.text.keys import listed
from notes_cli.text.messages import user_message
from notes_cli.text.prompt import next_turn


def cosine(found: NDArray[np.float32], reference: NDArray[np.float32]) -> float:
    """Return the cosine similarity of two logit vectors, [n_vocab] each."""
    a, b = found.astype(np.float64), reference.astype(np.float64)
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def divergence(found: NDArray[np.float32], reference: NDArray[np.float32]) -> float:
    """Return KL(reference || found) of the next-token distributions, in nats."""
    p, q = log_softmax(reference), log_softmax(found)
    possible = ~np.isneginf(p)  # tokens of probability 0 contribute nothing
    kl = float((np.exp(p[possible]) * (p[possible] - q[possible])).sum())
    return kl if kl > 0 or np.isnan(kl) else 0.0


def same_top(found: NDArray[np.float32], reference: NDArray[np.float32]) -> bool:
    return int(found.argmax()) == int(reference.argmax())


@cache
def verify_system() -> str:
    """Return a system text that moves skills away from the position where they were compiled."""
    return str(read_yaml(resource("prompts") / "verify.yaml")["system"])


ANSWER = 24  # tokens of an answer that are compared without choices
FIRST = 8  # of these, the first ones, which contain the decision
NEAR = 0.1  # nats between two tokens that count as equally likely
TIMES = 3.0  # a gap of up to this multiple of the noise counts as noise
SINGLE = 32  # tokens of a prompt that are decoded one by one for that
SURE = 0.3  # mean probability of the tokens of a text, below which the model babbles


@dataclass(frozen=True, slots=True)
class Answered:
    """A decision: one of the choices, or a greedy answer, which also has its tokens, the logits before each and after
    the last ([n_vocab] each), and the prompt's tokens; None with images."""

    text: str
    tokens: tuple[int, ...] = ()
    logits: tuple[NDArray[np.float32], ...] = ()
    prompt: Tokens | None = None

    @property
    def babble(self) -> bool:
        """True for a greedy answer whose tokens are hardly likelier than others."""
        scores = [float(log_softmax(row)[token]) for row, token in zip(self.logits, self.tokens, strict=False)]
        return bool(scores) and fmean(scores) < float(np.log(SURE))


@dataclass(frozen=True, slots=True)
class Parting:
    """The first difference of two answers: the number of equal tokens before it, and gap and noise in nats."""

    at: int
    gap: float
    noise: float

    @property
    def near(self) -> bool:
        """True if the gap is within rounding."""
        return self.gap <= max(NEAR, TIMES * self.noise)

    @property
    def late(self) -> bool:
        """True if the first tokens of both are the same."""
        return self.at >= FIRST

    @property
    def same(self) -> bool:
        """True if the difference does not count as a different decision."""
        return self.near or self.late


def answered(sequence: KVSequence, choices: Sequence[str] | None) -> Answered:
    """Return the decision at the end of a sequence. Appends a greedy answer without choices."""
    if choices:
        return Answered(decide(sequence, choices).choice)
    model = sequence.context.model
    prompt = None if sequence.images else sequence.tokens
    tokens: list[int] = []
    logits = [sequence.logits()]
    while len(tokens) < ANSWER and sequence.room and not model.ends(token := int(logits[-1].argmax())):
        tokens.append(token)
        sequence.append([token], "answer")
        logits.append(sequence.logits())
    return Answered(model.text(tokens).strip(), tuple(tokens), tuple(logits), prompt)


def parting(answer: Answered, reference: Answered, noise: Callable[[], float]) -> Parting | None:
    """Return where an answer differs from the recompute's; None, without a call of `noise`, if equal or a choice."""
    if answer.text == reference.text or not (answer.logits and reference.logits):
        return None
    same = [a == b for a, b in zip(answer.tokens, reference.tokens, strict=False)]
    at = same.index(False) if False in same else len(same)
    expected, actual = (int(answer.logits[at].argmax()) for answer in (reference, answer))
    log_probs = log_softmax(reference.logits[at])
    return Parting(at, float(log_probs[expected] - log_probs[actual]), noise())


class Beginning(AbstractContextManager["Beginning"]):
    """The common prefix of prompts with different questions: decoded once, and forked for each of them."""

    def __init__(self, workspace: Workspace, progress: Progress | None = None, other: Beginning | None = None) -> None:
        """`progress`: of a prefill. `other`: another one, of which a part may do for full prefills."""
        self.workspace, self._progress, self._other = workspace, progress, other
        self._begun: KVSequence | None = None

    def close(self) -> None:
        if self._begun:
            self._begun.close()
        self._begun = None

    def __exit__(self, *_: object) -> None:
        self.close()

    def fork(self, tokens: Tokens, *, whole: bool = False) -> KVSequence | None:
        """Return a sequence with the first of these tokens that are computed, None if there are none. `whole`: with all
        of the beginning, as rows of splices depend on more than their tokens."""
        begun = self._begun
        if begun and begun.intact:
            known = begun.tokens[: len(tokens) - 1]
            same = int(np.append(known != tokens[: len(known)], True).argmax())
            if same == len(begun) or (same and not whole):
                with suppress(EngineError):  # a recurrent state ends where it is
                    return begun.share(same)
        return self._other.fork(tokens) if self._other and not whole else None

    def assembled(self, prompt: Prompt, seam: int = DEFAULT_SEAM) -> KVSequence:
        """Assemble a prompt with room for an answer. Raises NotesError if that is not possible."""
        workspace = self.workspace
        prompt = rendered(workspace, replace(prompt, seam=seam))
        workspace.make_room(prompt.cells, ANSWER)
        begun = self.fork(np.concatenate(prompt.tokens), whole=prompt.splice)
        known = begun is not None and self._begun is not None and len(begun) == len(self._begun)
        sequence = run(assemble_task(workspace, prompt, begun=begun))
        if known:
            return sequence
        self.close()
        at, total = len(sequence) - sequence.undivided, len(sequence.pending)  # as `notes ask` divides it

        def decoding() -> Task[None]:
            while not sequence.divided:
                yield [sequence]
                if self._progress:
                    self._progress(total - len(sequence.pending), total)

        run(decoding())
        if at and workspace.grows and not sequence.images:  # a text with images is there as a whole or not
            with suppress(EngineError):
                self._begun = sequence.share(at)
        return sequence


def noise_of(beginning: Beginning, reference: Answered) -> float:
    """Return by how many nats, at most, the gap between the two most likely tokens changes in a recompute's answer if
    the end of its prompt is decoded token by token, for which llama.cpp has other kernels than for batches."""
    if reference.prompt is None:
        return 0.0
    with beginning.fork(reference.prompt) or beginning.workspace.sequence() as sequence:
        rest = reference.prompt[len(sequence) :]
        sequence.append(rest[:-SINGLE])
        sequence.flush()
        for token in rest[-SINGLE:]:
            sequence.append([token])
            first = sequence.logits()
        again = [first, *(sequence.lookahead(reference.tokens) if reference.tokens else ())]
    changes = []
    for before, after in zip(reference.logits, again, strict=True):
        best, second = np.argsort(before)[-1:-3:-1]
        changes.append(abs(float((before[best] - before[second]) - (after[best] - after[second]))))
    return max(changes)


COSINE = 0.99  # a mean below this fails


@dataclass(frozen=True, slots=True)
class Case:
    """The comparison of one question. Decisions are the chosen answer, or the greedy one without choices.

    `question`, `decision`, `reference`: empty at the end of a session, where only logits are compared. `reference`:
    decision of the recompute. `corrected`: that of a recompute of the corrected text; None if no erratum has a field.
    Greedy answers of the two prompts may differ in wording, so only new values are compared: `missing` are those in the
    corrected text's answer but not in this one; None with choices. `parting`: where the answer differs from the
    reference, None if it does not. `babble`: the model has no answer, also where all is decoded: there is no verdict.
    """

    question: str
    cosine: float
    kl: float
    same_top: bool
    decision: str
    reference: str
    spliced: int = 0  # tokens of the prompt, as `decoded`
    decoded: int = 0
    method: str = ""  # where edit methods are compared
    errata: tuple[str, ...] = ()
    corrected: str | None = None
    missing: tuple[str, ...] | None = None
    parting: Parting | None = None
    babble: bool = False

    @property
    def same_decision(self) -> bool:
        return self.decision == self.reference or bool(self.parting and self.parting.same)

    @property
    def as_corrected(self) -> bool:
        """True if the decision is that of the corrected text, or no field is corrected."""
        return self.corrected in (None, self.decision) or self.missing == ()

    @property
    def right(self) -> bool:
        """True if the decision is that of the reference, and of the corrected text, or there is none."""
        return self.babble or (self.same_decision and self.as_corrected)

    @property
    def failure(self) -> str:
        """How the decision is wrong; empty if it is right."""
        if self.babble:
            return ""
        decides = f"{self.method and f'{self.method}: '}{self.question!r} decides {self.decision!r}, "
        if not self.same_decision:
            where = f", from token {self.parting.at + 1} on" if self.parting else ""
            return f"{decides}the recompute's decision is {self.reference!r}{where}"
        if self.missing:
            answer = f"{self.question!r} is answered without {listed(self.missing)}: {self.decision!r}"
            return f"{answer}, the corrected text's answer is {self.corrected!r}"
        return "" if self.as_corrected else f"{decides}the corrected text's decision is {self.corrected!r}"


@dataclass(frozen=True, slots=True)
class Report:
    """Comparisons of spliced skills: a case for each question, and the K/V of each skill, by name."""

    cases: tuple[Case, ...]
    rows: Mapping[str, RowCheck] = field(default_factory=dict)
    system: str = ""  # text before the skills
    left: int = 0  # cases that an interrupt left out, and then there are no rows

    def __repr__(self) -> str:
        verdict = "passed" if self.passed else "failed"
        cases = f"{len(self.cases)} case{'s' * (len(self.cases) != 1)}"
        return f"{type(self).__name__}({verdict}, {cases}, cosine {self.mean('cosine'):.4f})"

    def mean(self, figure: str) -> float:
        """Return the mean of `cosine`, `kl` or `decoded` over the cases; NaN without any."""
        return fmean(float(getattr(case, figure)) for case in self.cases) if self.cases else float("nan")

    @property
    def failures(self) -> tuple[Notice, ...]:
        """The criteria that were missed."""
        found = [Notice(f"{name} has wrong rows: {check.reason}") for name, check in self.rows.items() if check.wrong]
        if not (mean := self.mean("cosine")) >= COSINE:
            row = min(self.cases, key=lambda case: case.cosine)
            lowest = f"lowest: {row.cosine:.4f}, {row.question or 'at the end'!r}"
            found.append(Notice(f"the mean cosine is {mean:.4f}, it must be {COSINE} or more ({lowest})"))
        found += [Notice(case.failure) for case in self.cases if case.failure]
        if self.left:
            found.append(Notice(f"interrupted: {self.left} of {self.left + len(self.cases)} cases are left out"))
        elif self.cases and all(case.babble for case in self.cases):
            found.append(
                Notice("the model answers none of these questions", Help.ADVICE(text="Ask others, or give choices"))
            )
        if not any(case.spliced for case in self.cases):
            found.append(Notice("nothing was reused, so nothing was verified", Help.EXPLAIN()))
        return tuple(found)

    @property
    def passed(self) -> bool:
        return not self.failures


def verify(
    workspace: Workspace,
    prompt: Prompt,
    questions: Sequence[str],
    *,
    choices: Sequence[str] | None = None,
    seam: int = DEFAULT_SEAM,
    progress: Progress | None = None,
    ended: Callable[[], bool] = lambda: False,
) -> Report:
    """Ask each question, instead of the prompt's, without the prompt's corrections and, if there are any, with them.
    `progress` is called during each recompute. `ended` is asked before each question: True leaves out the rest."""
    check_questions(questions)
    plain = replace(prompt, errata=(), fields={})
    corrections = [plain, prompt] if prompt.errata or prompt.fields else [plain]
    cases: list[Case] = []
    with Beginning(workspace, progress) as full, Beginning(workspace, progress, full) as changed:

        def measure(asked: Prompt, spliced: Beginning) -> Case:
            reference = recomputed(full, asked, choices)
            case, answer = _compare(spliced, asked, reference, choices, seam)
            corrected = _corrected(changed, asked, choices)
            wanted, text = corrected.text.casefold() if corrected else "", answer.text.casefold()
            values = [value.strip() for _, value in asked.values]
            missing = tuple(value for value in values if value.casefold() in wanted and value.casefold() not in text)
            fields = (f"{name}={value}" for name, value in asked.fields.items())
            return replace(
                case,
                errata=(*fields, *(each.text for each in asked.errata)),
                corrected=corrected.text if corrected else None,
                missing=None if choices else missing,
                parting=parting(answer, reference[1], partial(noise_of, full, reference[1])),
            )

        for correction in corrections:
            with Beginning(workspace) as spliced:
                for question in questions:
                    if not ended():
                        cases.append(measure(replace(correction, question=question), spliced))
    left = len(corrections) * len(questions) - len(cases)
    segments = () if left or ended() else prompt.segments
    rows = {segment.name: check_rows(workspace, segment, progress) for segment in segments}
    return Report(tuple(cases), rows, prompt.system or "", left)


def _compare(
    spliced: Beginning,
    asked: Prompt,
    reference: tuple[NDArray[np.float32], Answered],
    choices: Sequence[str] | None,
    seam: int,
) -> tuple[Case, Answered]:
    """Assemble a prompt and ask it; return how it compares with a recompute, and its answer. Raises NotesError if it
    cannot be assembled."""
    with spliced.assembled(asked, seam) as sequence:
        logits = sequence.logits()
        tokens = sequence.count("spliced"), sequence.decoded
        answer = answered(sequence, choices)
    expected, right = reference
    case = Case(asked.question, *distances(logits, expected), answer.text, right.text, *tokens)
    return replace(case, babble=answer.babble and right.babble), answer


def distances(found: NDArray[np.float32], reference: NDArray[np.float32]) -> tuple[float, float, bool]:
    """Return cosine, KL divergence in nats, and whether the likeliest token is the same."""
    return cosine(found, reference), divergence(found, reference), same_top(found, reference)


def check_questions(questions: Sequence[str]) -> None:
    """Raise NotesError if there are no questions."""
    if not questions:
        raise NotesError("there is nothing to verify: no question, and no field to ask for", "Give it a question")


def field_questions(segments: Sequence[Segment] | Sequence[SkillText]) -> list[str]:
    """Return a question for the value of each field."""
    known = known_fields(*segments)
    fields = [reference for key in known for reference in known.find(key)]
    names = [
        f"{field.field.replace('_', ' ').replace('-', ' ')}{f' of {field.skill}' if field.shared else ''}"
        for field in fields
    ]
    return [f"What is the {name}?" for name in names]


def corrected_segment(segment: Segment, changed: Change | None) -> Segment:
    """Return the segment with the corrected text, without K/V, to be recomputed."""
    bare = replace(segment, fields=(), layers=())
    return replace(bare, text=changed.text, tokens=changed.tokens) if changed else bare


def _corrected(beginning: Beginning, prompt: Prompt, choices: Sequence[str] | None) -> Answered | None:
    """Return the decision of the corrected text without errata; None if no field is corrected."""
    with_images = {segment.name for segment in prompt.segments if segment.media}
    if not prompt.values or any(target.skill in with_images for target, _ in prompt.values):  # they cannot be edited
        return None
    changes = changes_of(beginning.workspace, prompt)
    segments = [corrected_segment(segment, changes.get(segment.name)) for segment in prompt.segments]
    return recomputed(beginning, replace(prompt, segments=segments, fields={}), choices)[1]


def recomputed(
    beginning: Beginning, prompt: Prompt, choices: Sequence[str] | None
) -> tuple[NDArray[np.float32], Answered]:
    """Decode a prompt in full; return the logits after it, and the decision."""
    with beginning.assembled(replace(prompt, splice=False)) as sequence:
        return sequence.logits(), answered(sequence, choices)


@dataclass(frozen=True, slots=True, repr=False)
class EditReport(Report):
    """Comparisons of edit methods with a recompute of the corrected text: a case for each method and question."""

    refused: Mapping[str, NotesError] = field(default_factory=dict)  # methods that are not possible, with the reason
    default: str = ""  # method without a named one
    why: str = ""  # reason for the default
    named: bool = False  # methods were named, and each of them counts; else only the default does

    @property
    def by_method(self) -> dict[str, Report]:
        """The cases of each method that was possible."""
        names = dict.fromkeys(case.method for case in self.cases)
        return {name: Report(tuple(case for case in self.cases if case.method == name)) for name in names}

    @property
    def _right(self) -> list[str]:
        """Methods that decide as the recompute."""
        return [name for name, report in self.by_method.items() if all(case.right for case in report.cases)]

    @property
    def decisive(self) -> bool:
        """True unless the control, which changes nothing, decides as the recompute: then no method can fail."""
        return STALE.name not in self._right

    @property
    def cheapest(self) -> str | None:
        """Of the methods that decide as the recompute, the one that decodes the fewest tokens; None without one, and if
        the questions are not decisive."""
        tried = self.by_method
        return min(self._right, key=lambda name: tried[name].mean("decoded"), default=None) if self.decisive else None

    @property
    def failures(self) -> tuple[Notice, ...]:
        """The decisions that differ from the recompute's."""
        counted = [case for case in self.cases if self.named or case.method == self.default]
        if not counted:
            return (Notice("none of these methods is possible here, so nothing was verified"),)
        found = [Notice(case.failure) for case in counted if case.failure]
        return (*found, Notice("interrupted: some methods are left out")) if self.left else tuple(found)


def verify_edits(
    workspace: Workspace,
    prompt: Prompt,
    questions: Sequence[str],
    methods: Sequence[str],
    *,
    choices: Sequence[str] | None = None,
    seam: int = DEFAULT_SEAM,
    progress: Progress | None = None,
    ended: Callable[[], bool] = lambda: False,
) -> EditReport:
    """Apply the prompt's field values by each method, by default all, and ask each question instead of the prompt's.
    Raises NotesError for an unknown method, values that change nothing, and no question. `progress` is called during
    each recompute. `ended` is asked before each method: True leaves out the rest."""
    check_questions(questions)
    if any(segment.media for segment in prompt.segments):
        message = "of a skill with an image nothing is edited, so there are no methods to compare"
        raise UnsupportedError(message, "Leave it out, and correct it by an erratum")
    if not changes_of(workspace, prompt):
        values = ", ".join(f"{name}={value}" for name, value in prompt.fields.items())
        raise NotesError(f"there is nothing to verify: the text says {values} already")
    default, why = method_for(workspace, prompt)
    wanted = dict.fromkeys(map(Method.parse, methods or METHODS))
    prompts = [replace(prompt, question=question) for question in questions]
    with Beginning(workspace, progress) as full:
        references = [recomputed(full, replace(asked, method=RECOMPUTE), choices) for asked in prompts]
    cases: list[Case] = []
    refused: dict[str, NotesError] = {}
    tried = 0
    for method in wanted:
        if ended():
            break
        tried += 1
        asked = [replace(prompt, method=method) for prompt in prompts]
        try:  # not possible on this model, or for a skill compiled like this
            with Beginning(workspace) as edited:
                compared = [_compare(edited, *each, choices, seam)[0] for each in zip(asked, references, strict=True)]
        except NotesError as error:
            refused[method.name] = error
        else:
            cases += [replace(case, method=method.name) for case in compared]
    left = (len(wanted) - tried) * len(questions)
    how: dict[str, Any] = {"default": default.name, "why": why, "named": bool(methods), "left": left}
    return EditReport(tuple(cases), refused=refused, **how)


def verify_skills(
    workspace: Workspace,
    request: Request,
    questions: Sequence[str] = (),
    methods: Sequence[str] = (),
    callbacks: Callbacks = NO_CALLBACKS,
) -> Report:
    """Compare the splices and errata of a request with a full recompute of the same tokens; an EditReport of `methods`
    if the request has new values of fields. `questions`, by default the value of each field, take the place of the
    request's. Without a system text some sentences precede the skills, so that they are moved if they can be. Raises
    NotesError if that is not possible."""
    segments = open_segments(workspace, request.splice, callbacks.on_event, watch=callbacks.progress)
    if request.system is None:
        fixed = any(segment.prefix_only and not (segment.carry and workspace.context.carries) for segment in segments)
        request = replace(request, system="" if fixed else verify_system())
    draft = resolve(workspace, request, segments, callbacks)
    given = workspace, draft.prompt, tuple(questions) or field_questions(segments)
    with callbacks.progress(LABEL, later=True) as update:
        how: dict[str, Any] = {"choices": request.choices, "seam": draft.settings.seam, "progress": update}
        how["ended"] = callbacks.ended
        return verify_edits(*given, tuple(methods), **how) if request.fields else verify(*given, **how)


LABEL = "recomputing"  # of the progress display


@dataclass(frozen=True, slots=True)
class LayerError:
    """The largest error of a KV entry in a layer, relative to that of the prefill, and its position; -1 for a state."""

    layer: int
    part: str
    k: float
    v: float
    position: int


class Cause(Enum):
    """Reasons why K/V of a session may differ from a prefill's by more than rounding, with the skills, edits or cuts
    concerned in braces."""

    OTHER_CONTEXT = "{} is preceded by a different context than at compile time"
    BLOCKS = "{} was compiled in blocks, which have not seen each other"
    IN_PLACE = "what comes after an edit in place was computed with the old value ({})"
    CUT = "what comes after what was cut out was computed with it, and may carry notes of it ({})"


@dataclass(frozen=True, slots=True, repr=False)
class SessionReport(Report):
    """The comparison of a session with a prefill: a case for its end, without a question, and for each question."""

    tokens: int = 0
    layers: tuple[LayerError, ...] = ()
    causes: Mapping[Cause, tuple[str, ...]] = field(default_factory=dict)

    @property
    def largest(self) -> LayerError:
        return max(self.layers, key=lambda error: max(error.k, error.v))


def verify_session(
    session: Session,
    questions: Sequence[str] = (),
    *,
    choices: Sequence[str] | None = None,
    wording: str | None = None,
    callbacks: Callbacks = NO_CALLBACKS,
) -> SessionReport:
    """Compare a session restored from disk with a prefill of its tokens: at its end, and after each question as the
    next turn, by default for the value of each field. The session is not changed. `callbacks.ended` is asked before
    each question: True leaves out the rest. Raises NotesError if there is no turn, or an image."""
    if session.empty:
        raise NotesError(f"there is nothing to verify: session {session.stored.name} has no turn")
    if session.state.images:
        raise NotesError(f"session {session.stored.name} has images, which a prefill of its tokens cannot show")
    workspace, state = session.workspace, session.state
    request, choices = Request("", wording=wording, choices=choices), choices and list(choices)
    wording = resolve(workspace, request, (), callbacks, had=state.skills, goes_on=True).settings.wording
    follows = next_turn(workspace.template, [user_message("?")])
    ending = int(workspace.tokenize(follows[0])[0])  # ends the last answer: restored K/V has no logits
    restored = [("", session.sequence.lookahead([ending])[0], "", session.sequence.tokens[:0])]
    rows = _rows(session.sequence)
    asked = questions or field_questions(state.skills)
    for question in asked:
        if callbacks.ended():
            break
        sequence = session.follow(question, (), wording, ANSWER)
        logits, tokens = sequence.logits(), sequence.tokens[len(state.tokens) :]
        restored.append((question, logits, answered(sequence, choices).text, tokens))
        if not workspace.model.recurrent:  # else the session restores it again
            sequence.truncate(len(state.tokens))

    longest = max(len(tokens) for *_, tokens in restored)
    workspace.make_room(len(state.tokens), longest + 1 + ANSWER)
    cases = []
    with callbacks.progress(LABEL, later=True) as update, workspace.sequence() as prefilled:
        prefilled.append(state.tokens)
        prefilled.flush(update)
        layers = tuple(map(_layer_error, rows, _rows(prefilled)))
        for question, logits, decision, tokens in restored:
            if not question:
                expected, reference = prefilled.lookahead([ending])[0], ""
            else:
                with prefilled.share() as sequence:
                    sequence.append(tokens)
                    expected, reference = sequence.logits(), answered(sequence, choices).text
            cases.append(Case(question, *distances(logits, expected), decision, reference, len(state.tokens)))
    left = 1 + len(asked) - len(cases)
    return SessionReport(tuple(cases), left=left, tokens=len(state.tokens), layers=layers, causes=causes_of(state))


def _rows(sequence: KVSequence) -> tuple[LayerRows, ...]:
    return sequence.context.read(sequence.seq_id, 0, len(sequence), base=0, dtype=sequence.context.lossless_type)


def _layer_error(rows: LayerRows, reference: LayerRows) -> LayerError:
    errors = []  # relative, by row, [n_rows] each; 0 without columns
    for found, expected in ((rows.k, reference.k), (rows.v, reference.v)):
        a, b = found.astype(np.float32), expected.astype(np.float32)
        errors.append(np.linalg.norm(a - b, axis=1) / (np.linalg.norm(b, axis=1) + 1e-6))
    k, v = errors
    position = -1 if rows.part == "state" else int(np.maximum(k, v).argmax())
    return LayerError(rows.layer, rows.part, float(k.max()), float(v.max()), position)


def causes_of(state: State) -> dict[Cause, tuple[str, ...]]:
    """Return why a session's K/V may differ from a prefill's by more than rounding."""
    splices = [entry for entry in state.entries if entry.kind == "splice"]
    edits = [entry for entry in state.entries if entry.kind == "edit"]
    moved = [entry.name for entry in splices if entry.reason is Reason.MOVED or entry.how == "seam"]
    blocks = [entry.name for entry in splices if entry.blocks]
    in_place = [entry.name for entry in splices if entry.rewritten]
    in_place += [entry.text for entry in edits if (method := METHODS.get(entry.how)) is None or method.in_place]
    in_place += [skill.name for skill in state.skills if skill.in_place]
    cut = [entry.text for entry in state.traces]
    causes = {Cause.OTHER_CONTEXT: moved, Cause.BLOCKS: blocks, Cause.IN_PLACE: in_place, Cause.CUT: cut}
    return {cause: tuple(dict.fromkeys(names)) for cause, names in causes.items() if names}
