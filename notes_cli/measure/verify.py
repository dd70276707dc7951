"""Verifies splices, errata and edits on this model: compares logits and decisions with a full recompute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from notes_cli.config import resource
from notes_cli.documents import read_yaml
from notes_cli.editing.methods import AUTO, METHODS, RECOMPUTE, Method, change
from notes_cli.engine.segment import Segment, Tokens, quantized
from notes_cli.engine.sequence import KVSequence
from notes_cli.errors import Help, NotesError, Notice, Progress, UnsupportedError
from notes_cli.runtime.assemble import assemble
from notes_cli.runtime.check_rows import RowCheck, check_rows
from notes_cli.runtime.generate import decide, log_softmax
from notes_cli.runtime.prompt import DEFAULT_SEAM, Prompt, changes_of
from notes_cli.runtime.resolve import method_for
from notes_cli.runtime.workspace import Workspace
from notes_cli.sessions.state import SkillText
from notes_cli.text.erratum import known_fields
from notes_cli.text.keys import listed


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
CUTS = 128, 32  # tokens in a last batch: llama.cpp uses different kernels for large and small batches


@dataclass(frozen=True, slots=True)
class Answered:
    """A decision: one of the choices, or a greedy answer. `margin`: between the two best choices. A greedy answer also
    has its tokens, the logits before each and after the last ([n_vocab] each), and the prompt's tokens; None with
    images."""

    text: str
    margin: float | None = None
    tokens: tuple[int, ...] = ()
    logits: tuple[NDArray[np.float32], ...] = ()
    prompt: Tokens | None = None


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
        decision = decide(sequence, choices)
        return Answered(decision.choice, decision.margin)
    model = sequence.context.model
    prompt = None if sequence.images else sequence.tokens
    tokens: list[int] = []
    logits = [sequence.logits()]
    while len(tokens) < ANSWER and sequence.room and not model.ends(token := int(logits[-1].argmax())):
        tokens.append(token)
        sequence.append([token], "answer")
        logits.append(sequence.logits())
    return Answered(model.text(tokens).strip(), None, tuple(tokens), tuple(logits), prompt)


def parting(answer: Answered, reference: Answered, noise: Callable[[], float]) -> Parting | None:
    """Return where an answer differs from the recompute's; None, without a call of `noise`, if equal or a choice."""
    if answer.text == reference.text or not (answer.logits and reference.logits):
        return None
    same = [a == b for a, b in zip(answer.tokens, reference.tokens, strict=False)]
    at = same.index(False) if False in same else len(same)
    expected, actual = (int(answer.logits[at].argmax()) for answer in (reference, answer))
    log_probs = log_softmax(reference.logits[at])
    return Parting(at, float(log_probs[expected] - log_probs[actual]), noise())


def noise_of(workspace: Workspace, reference: Answered) -> float:
    """Return by how many nats, at most, the gap between the two most likely tokens changes in a recompute's answer if
    its prompt is decoded in different batches."""
    if reference.prompt is None:
        return 0.0
    many, few = CUTS
    last = many if len(reference.prompt) % workspace.context.n_ubatch < many // 2 else few
    cut = max(1, len(reference.prompt) - last)
    with workspace.sequence() as sequence:
        sequence.append(reference.prompt[:cut])
        sequence.flush()
        sequence.append(reference.prompt[cut:])
        first = sequence.logits()
        again = [first, *(sequence.lookahead(reference.tokens) if reference.tokens else ())]
    changes = []
    for before, after in zip(reference.logits, again, strict=True):
        best, second = np.argsort(before)[-1:-3:-1]
        changes.append(abs(float((before[best] - before[second]) - (after[best] - after[second]))))
    return max(changes)


ONE_PREFILL = "recompute"  # of all skills: the repair that always works


@dataclass(frozen=True, slots=True)
class Question:
    """A question to several skills. `needs`: skills whose removal changes the decision of a prefill. `same`: the
    spliced skills decide as one prefill of all."""

    question: str
    needs: tuple[str, ...]
    same: bool


@dataclass(frozen=True, slots=True)
class Mended:
    """A repair that was tried. `same`, by question: it decides as one prefill. Empty if the repair is not possible, for
    the reason in `refused`."""

    name: str
    same: tuple[bool, ...] = ()
    refused: str | None = None


@dataclass(frozen=True, slots=True)
class Composed:
    """The result of verifying several skills together. Repairs are tried if a decision differs from one prefill's."""

    names: tuple[str, ...]
    questions: tuple[Question, ...]
    tried: tuple[Mended, ...] = ()

    def counts(self, several: bool) -> tuple[int, int]:
        """Return how many questions decide as one prefill, and their number, among those that need several skills, or
        at most one."""
        questions = [question for question in self.questions if (len(question.needs) > 1) == several]
        return sum(question.same for question in questions), len(questions)

    @property
    def repair(self) -> str:
        """The cheapest repair with which all questions decide as one prefill; empty if none is needed."""
        if all(question.same for question in self.questions):
            return ""
        return next((repair.name for repair in self.tried if repair.same and all(repair.same)), ONE_PREFILL)


COSINE = 0.99  # a mean below this fails


@dataclass(frozen=True, slots=True)
class Case:
    """The measurement of one question. Decisions are the chosen answer, or the greedy answer without choices.

    `corrected`: decision of a recompute of the corrected text; None if no field is corrected. Greedy answers of the two
    prompts may differ in wording, so only new values are compared: `missing` are those in the corrected text's answer
    but not in this one. `margin`: distance between the two best choices of the reference, None without choices.
    `parting`: where the answer differs from the reference, None if it does not.
    """

    question: str
    errata: tuple[str, ...]
    cosine: float
    kl: float
    same_top: bool
    decision: str
    reference: str
    margin: float | None
    corrected: str | None
    spliced: int
    moved: bool  # some keys were rotated
    parting: Parting | None = None
    missing: tuple[str, ...] | None = None  # None with choices

    @property
    def same_decision(self) -> bool:
        return self.decision == self.reference or bool(self.parting and self.parting.same)

    @property
    def as_corrected(self) -> bool:
        """True if the decision is that of the corrected text, or no field is corrected."""
        return self.corrected in (None, self.decision) or self.missing == ()

    @property
    def right(self) -> bool:
        """True if the decision is that of the reference, and of the corrected text."""
        return self.same_decision and self.as_corrected


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a verification."""

    cases: tuple[Case, ...]
    composition: Composed | None = None  # with several skills
    system: str = ""  # system text before the skills
    small: tuple[tuple[str, str, int], ...] = ()  # skills with quantized K/V: name, type, bytes
    rows: tuple[tuple[str, RowCheck], ...] = ()  # comparison of K/V by skill name

    def __repr__(self) -> str:
        verdict = "passed" if self.passed else "failed"
        return f"Report({verdict}, {len(self.cases)} case{'s' * (len(self.cases) != 1)}, cosine {self.cosine:.4f})"

    @property
    def cosine(self) -> float:
        return fmean(case.cosine for case in self.cases)

    @property
    def kl(self) -> float:
        return fmean(case.kl for case in self.cases)

    @property
    def failures(self) -> tuple[Notice, ...]:
        """The criteria that were missed."""
        failures = [Notice(f"{name} has wrong rows: {check.reason}") for name, check in self.rows if not check.right]
        failures += below_cosine([(case.question, case.cosine) for case in self.cases])
        for case in self.cases:
            if not case.same_decision:
                failures.append(other_decision(case.question, case.decision, case.reference, parting=case.parting))
            elif case.missing:
                message = f"{case.question!r} is answered without {listed(case.missing)}: {case.decision!r}"
                failures.append(Notice(f"{message}, the corrected text's answer is {case.corrected!r}"))
            elif not case.as_corrected:
                whose = "the corrected text's"
                failures.append(other_decision(case.question, case.decision, case.corrected or "", whose))
        if not any(case.spliced for case in self.cases):
            failures.append(Notice("nothing was reused, so nothing was verified", Help.EXPLAIN()))
        return tuple(failures)

    @property
    def passed(self) -> bool:
        return not self.failures


def below_cosine(rows: Sequence[tuple[str, float]]) -> list[Notice]:
    """Return a failure if the mean cosine of these (label, cosine) pairs is too low."""
    mean = fmean(cosine for _, cosine in rows)
    if mean >= COSINE:
        return []
    row, lowest = min(rows, key=lambda pair: pair[1])
    return [Notice(f"the mean cosine is {mean:.4f}, it must be {COSINE} or more (lowest: {lowest:.4f}, {row!r})")]


def other_decision(
    row: str,
    decision: str | None,
    reference: str | None,
    whose: str = "the recompute's",
    *,
    parting: Parting | None = None,
) -> Notice:
    """Return the failure for a decision that differs from the reference."""
    where = f", from token {parting.at + 1} on" if parting else ""
    return Notice(f"{row!r} decides {decision!r}, {whose} decision is {reference!r}{where}")


def verify(
    workspace: Workspace,
    prompt: Prompt,
    questions: Sequence[str],
    *,
    choices: Sequence[str] | None = None,
    seam: int = DEFAULT_SEAM,
    progress: Progress | None = None,
) -> Report:
    """Ask each question, instead of the prompt's, without the prompt's corrections and, if there are any, with them.
    `progress` is called during each recompute."""
    check_questions(questions)
    plain = replace(prompt, errata=(), fields={})
    corrections = [plain, prompt] if prompt.errata or prompt.fields else [plain]
    prompts = [replace(corrected, question=question) for corrected in corrections for question in questions]
    segments = prompt.segments
    small = [(segment.name, segment.kv, segment.nbytes) for segment in segments if any(quantized(segment.kv))]
    places: dict[str, list[int]] = {segment.name: [] for segment in segments}  # where they were spliced

    def measure(asked: Prompt) -> Case:
        with assemble(workspace, asked, seam=seam, room=ANSWER) as spliced:
            logits = spliced.logits()
            moved = [piece for piece in spliced.pieces if piece.moved]
            for piece in moved:
                first = next(skill for skill in spliced.pieces if skill.kind == "splice" and skill.name == piece.name)
                places[piece.name].append(first.position)
            count = spliced.count("spliced")
            answer = answered(spliced, choices)
        expected, reference_answer = recomputed(workspace, asked, choices, progress)
        corrected = _corrected(workspace, asked, choices, progress)
        expected_text, text = corrected.text.casefold() if corrected else "", answer.text.casefold()
        values = [value.strip() for _, value in asked.values]
        missing = tuple(value for value in values if value.casefold() in expected_text and value.casefold() not in text)
        return Case(
            question=asked.question,
            errata=(
                *(f"{name}={value}" for name, value in asked.fields.items()),
                *(each.text for each in asked.errata),
            ),
            cosine=cosine(logits, expected),
            kl=divergence(logits, expected),
            same_top=same_top(logits, expected),
            decision=answer.text,
            reference=reference_answer.text,
            margin=reference_answer.margin,
            corrected=corrected.text if corrected else None,
            spliced=count,
            moved=bool(moved),
            parting=parting(answer, reference_answer, partial(noise_of, workspace, reference_answer)),
            missing=None if choices else missing,
        )

    cases = tuple(map(measure, prompts))
    rows = [(segment.name, check_rows(workspace, segment, places[segment.name], progress)) for segment in segments]
    return Report(cases, system=prompt.system or "", small=tuple(small), rows=tuple(rows))


def check_questions(questions: Sequence[str]) -> None:
    """Raise NotesError if there are no questions."""
    if not questions:
        raise NotesError("there is nothing to verify: no question, and no field to ask for", Help.QUESTION())


def field_questions(segments: Sequence[Segment] | Sequence[SkillText]) -> list[str]:
    """Return a question for the value of each field."""
    known = known_fields(*segments)
    fields = [reference for key in known for reference in known.find(key)]
    names = [
        f"{field.field.replace('_', ' ').replace('-', ' ')}{f' of {field.skill}' if field.shared else ''}"
        for field in fields
    ]
    return [f"What is the {name}?" for name in names]


def corrected_segment(segment: Segment, values: dict[str, str], workspace: Workspace) -> Segment:
    """Return the segment with the corrected text, without K/V, to be recomputed. Ignores unknown fields."""
    changed = change(workspace.model, segment, values)
    bare = replace(segment, fields=(), layers=())
    return replace(bare, text=changed.text, tokens=changed.tokens) if changed else bare


def _corrected(
    workspace: Workspace, prompt: Prompt, choices: Sequence[str] | None, progress: Progress | None
) -> Answered | None:
    """Return the decision of the corrected text without errata; None if no field is corrected."""
    values = prompt.values
    with_images = {segment.name for segment in prompt.segments if segment.media}
    if not values or any(target.skill in with_images for target, _ in values):  # texts with images cannot be edited
        return None
    by_skill: dict[str, dict[str, str]] = {segment.name: {} for segment in prompt.segments}
    for target, value in values:
        by_skill[target.skill][target.field] = value
    segments = [corrected_segment(segment, by_skill[segment.name], workspace) for segment in prompt.segments]
    return recomputed(workspace, replace(prompt, segments=segments, fields={}), choices, progress)[1]


def recomputed(
    workspace: Workspace, prompt: Prompt, choices: Sequence[str] | None, progress: Progress | None
) -> tuple[NDArray[np.float32], Answered]:
    """Decode a prompt in full; return the logits after it, and the decision."""
    with assemble(workspace, prompt, splice=False, room=ANSWER) as sequence:
        sequence.flush(progress)
        return sequence.logits(), answered(sequence, choices)


ALL = "all"


@dataclass(frozen=True, slots=True)
class EditCase:
    """One question after an edit by one method. `reference`: decision of a recompute of the corrected text."""

    question: str
    cosine: float
    kl: float
    same_top: bool
    decision: str
    reference: str
    decoded: int  # prompt tokens decoded


@dataclass(frozen=True, slots=True)
class Tried:
    """One method over all questions. Without cases, `refused` is the reason why it is not possible."""

    method: str
    cases: tuple[EditCase, ...] = ()
    refused: NotesError | None = None

    @property
    def same(self) -> int:
        """Number of decisions equal to the recompute's."""
        return sum(case.decision == case.reference for case in self.cases)

    @property
    def passed(self) -> bool:
        return bool(self.cases) and self.same == len(self.cases)

    def mean(self, figure: str) -> float | None:
        """Return the mean of `cosine`, `kl` or `decoded` over the cases; None without cases."""
        return fmean(float(getattr(case, figure)) for case in self.cases) if self.cases else None


@dataclass(frozen=True, slots=True)
class Edits:
    """The methods that were tried, and the default for this model."""

    tried: tuple[Tried, ...]
    auto: str
    why: str
    all: bool  # "all" was requested: only a failure of `auto` counts

    def __repr__(self) -> str:
        shown = [
            f"{method.method} {method.same} of {len(method.cases)}" if method.cases else method.method
            for method in self.tried
        ]
        return f"Edits({'passed' if self.passed else 'failed'}, {', '.join(shown)})"

    @property
    def failures(self) -> tuple[Notice, ...]:
        """The decisions of requested, possible methods that differ from the recompute's."""
        tried = [method for method in self.tried if method.cases and (not self.all or method.method == self.auto)]
        if not tried:
            return (Notice("none of these methods is possible here, so nothing was verified"),)
        return tuple(
            Notice(f"{method.method}: {other_decision(case.question, case.decision, case.reference)}")
            for method in tried
            for case in method.cases
            if case.decision != case.reference
        )

    @property
    def passed(self) -> bool:
        """True if at least one requested method is possible, and all that are decide as the recompute."""
        return not self.failures


def verify_edits(
    workspace: Workspace,
    prompt: Prompt,
    questions: Sequence[str],
    methods: Sequence[str],
    *,
    choices: Sequence[str] | None = None,
    seam: int = DEFAULT_SEAM,
    progress: Progress | None = None,
) -> Edits:
    """Apply the prompt's field values by each method, and ask each question instead of the prompt's. `methods` may
    contain `auto` and `all`. Raises NotesError for an unknown method, values that change nothing, and no question.
    `progress` is called during each recompute."""
    check_questions(questions)
    if any(segment.media for segment in prompt.segments):
        message = "of a skill with an image nothing is edited, so there are no methods to compare"
        raise UnsupportedError(message, "Leave it out, and correct it by an erratum")
    if not changes_of(workspace, prompt):
        values = ", ".join(f"{name}={value}" for name, value in prompt.fields.items())
        raise NotesError(f"there is nothing to verify: the text says {values} already")
    auto, why = method_for(workspace, prompt)
    named = {str(AUTO): [auto], ALL: [*map(Method, METHODS), auto]}
    chosen = [named.get(name) or [Method.parse(name, also=tuple(named))] for name in methods]
    wanted = dict.fromkeys(method for several in chosen for method in several)
    prompts = [replace(prompt, question=question) for question in questions]
    references = [recomputed(workspace, replace(asked, method=RECOMPUTE), choices, progress) for asked in prompts]

    def tried(method: Method) -> Tried:
        cases = []
        for asked, (expected, reference) in zip(prompts, references, strict=True):
            try:
                sequence = assemble(workspace, replace(asked, method=method), seam=seam, room=ANSWER)
            except NotesError as error:  # not possible on this model, or for a skill compiled like this
                return Tried(str(method), refused=error)
            with sequence:
                sequence.flush(progress)
                logits = sequence.logits()
                decoded = sequence.decoded
                decision = answered(sequence, choices).text
            distances = cosine(logits, expected), divergence(logits, expected), same_top(logits, expected)
            cases.append(EditCase(asked.question, *distances, decision, reference.text, decoded))
        return Tried(str(method), tuple(cases))

    return Edits(tuple(map(tried, wanted)), str(auto), why, ALL in methods)
