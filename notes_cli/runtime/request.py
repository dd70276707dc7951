"""Defines a request with all its options, its effective settings, the events of its answer, and the answer."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypedDict

from notes_cli.editing.methods import Method
from notes_cli.engine.pieces import Piece
from notes_cli.engine.sampler import SamplerOptions
from notes_cli.engine.sequence import KVSequence, Stopped
from notes_cli.errors import NotesError, Notice
from notes_cli.runtime.generate import DEFAULT_MAX_THINK, UNLIMITED_RESERVE, ReasoningTrace
from notes_cli.runtime.open_skills import SkillRef, Watch, no_progress
from notes_cli.text.erratum import of_fields

if TYPE_CHECKING:
    from notes_cli.runtime.generate import Decision
    from notes_cli.text.messages import Conversation, ToolCall

PARALLEL = 16  # concurrent questions
UNLIMITED = 2**31 - 1  # tokens: limited by the context only


def freeze_lists(of: object, *names: str) -> None:
    """Make tuples of the lists that a frozen dataclass has by these names, so that an iterator serves more than once.
    Errata may be a mapping of fields and values, choices None. Raise NotesError for a text in the place of a list."""
    for name in names:
        given = getattr(of, name)
        if given is None:
            continue
        if isinstance(given, str):
            raise NotesError(f"{name} is the text {given!r}, and not a list", f"Write [{given!r}]")
        object.__setattr__(of, name, of_fields(given) if isinstance(given, Mapping) else tuple(given))


@dataclass(frozen=True, slots=True)
class Request:
    """One question and all options for its answer. None means the model's in config.yaml, else the default. Raises
    NotesError for an option of the wrong type, and for a negative number of tokens.

    Options:
    splice: Skills to splice: names of compiled skills, paths of segment files or texts, or Segments.
    errata: Corrections stated after the skills: `field=value`, `OLD => NEW` (of the text), free text, or a mapping of
        fields to values.
    fields: New values of fields, a mapping, applied by `method`.
    method: Edit method for `fields`, a name or a Method.
    system: System text before the skills.
    think: Let the model reason before it answers; the reasoning is not part of the answer's text.
    max_think: Tokens of reasoning at most.
    choices: Decide among these answers (two or more) instead of generating text.
    max_tokens: Tokens of the answer at most.
    sampling: All sampling options, as SamplerOptions.
    json_schema: JSON schema (parsed) that the answer satisfies.
    grammar: Grammar (GBNF) that the answer satisfies, instead of a schema.
    memory: A skill that is kept just before the question: in a session it moves there in each turn, which remembers it.
    images: Images to show with the question: paths of image files, or names and Segments of compiled images.
    results: In a session, in place of a question: (tool, result) for each tool call of the last answer.
    seam: Tokens to recompute at the start of a skill that follows another context than at compile time.
    place: Place of the skills: "early" in the system message, or "late" before the question.
    wording: Wording of errata, a name in prompts/errata.json, or a sentence with {field} and {value}.
    recompute: Decode the same tokens instead of splicing them, to compare.
    decode: Names from `splice` to decode instead, so that these skills attend to the text before them.
    strict: Refuse a skill that cannot be spliced, instead of decoding it.
    exact: Reuse K/V only where it equals that of a full prefill of the prompt, and decode the rest.
    stops: Texts that end the answer, without being part of it.
    likely: Log-probabilities of the answer's tokens, with so many alternatives to each; None: none.
    tools: Functions that the answer may call, each as OpenAI's API, MCP or Anthropic's API defines them.
    tool_choice: "auto", "required", or the name of the tool that the answer must call.
    conversation: Messages (text/messages.py) in place of question and system text, also tools and the beginning of the
        answer. Its SkillParts name `splice`, its ErratumParts are the errata; without any they are placed as usual.
    allowed: The tools of the conversation that may be called; none named: all.
    call_grammar: Grammar of a call that the model may begin; None: calls are unconstrained.
    must_call: `grammar` is that of a call.
    """

    question: str
    splice: Sequence[SkillRef] = ()
    errata: Sequence[str] = ()
    fields: Mapping[str, str] = field(default_factory=dict)
    method: Method | None = None
    system: str | None = None
    think: bool = False
    max_think: int = DEFAULT_MAX_THINK
    choices: Sequence[str] | None = None
    max_tokens: int = 256
    sampling: SamplerOptions = field(default_factory=SamplerOptions)
    seam: int | None = None
    place: str | None = None
    wording: str | None = None
    recompute: bool = False
    decode: Sequence[str] = ()
    strict: bool = False
    exact: bool = False
    json_schema: Any = None
    grammar: str | None = None
    results: Sequence[tuple[str, str]] = ()
    images: Sequence[SkillRef] = ()
    memory: SkillRef | None = None
    stops: Sequence[str] = ()
    likely: int | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str = "auto"
    conversation: Conversation | None = None
    allowed: Sequence[Mapping[str, Any]] = ()
    call_grammar: str | None = None
    must_call: bool = False

    def __post_init__(self) -> None:
        freeze_lists(self, "splice", "images", "errata", "decode", "choices", "results", "stops", "tools", "allowed")
        for name, count in (("max_think", self.max_think), ("max_tokens", self.max_tokens), ("seam", self.seam or 0)):
            if count < 0:
                raise NotesError(f"{name} must be a number of tokens, not {count!r}")

    @property
    def room(self) -> int:
        """Tokens to reserve for the answer."""
        return UNLIMITED_RESERVE if self.max_tokens == UNLIMITED else self.max_tokens


class Asking(TypedDict, total=False):
    """Types of the options of a question as keywords: those of Request and of SamplerOptions, where their meanings and
    defaults are, without the rules for calls of tools."""

    splice: Sequence[SkillRef]
    errata: Sequence[str] | Mapping[str, str]
    fields: Mapping[str, str]
    method: Method | str | None
    system: str | None
    think: bool
    max_think: int
    choices: Sequence[str] | None
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    seed: int
    frequency_penalty: float
    presence_penalty: float
    sampling: SamplerOptions | None
    json_schema: Any
    grammar: str | None
    images: Sequence[SkillRef]
    memory: SkillRef | None
    results: Sequence[tuple[str, str]]
    stops: Sequence[str]
    likely: int | None
    tools: Sequence[Mapping[str, Any]]
    tool_choice: str
    conversation: Conversation | None
    seam: int | None
    place: str | None
    wording: str | None
    recompute: bool
    decode: Sequence[str]
    strict: bool
    exact: bool


@dataclass(frozen=True, slots=True)
class Counts:
    """Tokens of a prompt by origin of their K/V. Seam, erratum and rewritten tokens are also decoded."""

    total: int
    spliced: int
    seam: int
    decoded: int
    rewritten: int
    erratum: int
    shared: int = 0  # in cells shared with other requests (`ask_many`), computed or spliced once for all

    @classmethod
    def of(cls, sequence: KVSequence) -> Counts:
        rewritten = sum(piece.rewritten for piece in sequence.pieces)
        errata = sum(piece.tokens for piece in sequence.pieces if piece.kind == "erratum")
        spliced, seam = sequence.count("spliced"), sequence.count("seam")
        return cls(len(sequence), spliced, seam, sequence.decoded, rewritten, errata)


@dataclass(frozen=True, slots=True)
class Settings:
    """Effective settings of a request: explicit, else the model's, else a safe default."""

    think: bool
    wording: str
    place: str
    seam: int
    method: Method | None = None  # None without new values
    why: str | None = None  # reason for the method, unless it was explicit


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A decoded prompt: its tokens by origin, its pieces, and its settings. `saved`: seconds that a prefill of the
    spliced tokens took on this machine when they were compiled; None if unknown. `seconds`: since the request began.
    `missed`: where a server stopped continuing a cached prompt, and why; empty if it did not, or that is not known."""

    counts: Counts
    pieces: tuple[Piece, ...]
    settings: Settings
    saved: float | None
    seconds: float = 0.0
    missed: str = ""

    def __repr__(self) -> str:
        counts = self.counts
        return f"Prefilled({counts.total} tokens, {counts.spliced} spliced, {counts.decoded} decoded)"


@dataclass(frozen=True, slots=True)
class Token:
    """A token of an answer with its log-probability and its likeliest alternatives."""

    text: str  # of `raw`
    raw: bytes  # a control token has its name here
    logprob: float
    likely: tuple[tuple[str, bytes, float], ...] = ()  # text, raw bytes, log-probability
    shown: bytes = b""  # added to the answer's text; empty for a control token


@dataclass(frozen=True, slots=True)
class Text:
    """New text of an answer, of its reasoning, or of the arguments of a call in it. `tokens`: its tokens, if
    log-probabilities were requested."""

    text: str
    index: int = 0  # of the answer, if there are several
    reasoning: bool = False
    tokens: tuple[Token, ...] = ()
    call: ToolCall | None = None  # with these arguments, which are JSON; its first text is empty


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer, its prompt's statistics, and timings in seconds; `prompt` and `first_token` count from the end of
    `load`."""

    text: str
    tokens: int  # generated, without those of the reasoning
    settings: Settings
    counts: Counts  # of the prompt
    pieces: tuple[Piece, ...]
    thought: ReasoningTrace | None = None
    decision: Decision | None = None
    stopped: Stopped | None = None  # why generation ended; None for a choice
    begun: float = 0.0  # start of the request (time.perf_counter)
    load: float = 0.0  # until model, segments and context were ready
    splice: float = 0.0
    prompt: float = 0.0
    first_token: float = 0.0  # or the choice
    saved: float | None = None  # as in Prefilled
    index: int = 0  # if there are several
    calls: tuple[ToolCall, ...] = ()
    stop: str = ""  # the one of `stops` that ended it
    rest: tuple[Token, ...] = ()  # tokens after its last text, if log-probabilities were requested

    def __str__(self) -> str:
        return self.text

    @property
    def message(self) -> dict[str, Any]:
        """The answer with its calls as a message of OpenAI's API."""
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments_json}}
            for call in self.calls
        ]
        return {"role": "assistant", "content": self.text, **({"tool_calls": calls} if calls else {})}

    def __repr__(self) -> str:
        shown = self.text if len(self.text) <= 60 else f"{self.text[:57]}..."
        summary = f"{self.tokens} token{'s' * (self.tokens != 1)}"
        if self.decision:
            summary = f"probability {self.probabilities[self.text]:.2f}"
        cut = {"length": ", cut off at max_tokens", "context": ", cut off by the context's end"}
        counts = f"{self.counts.spliced} spliced, {self.counts.decoded} decoded"
        return f"Answer({shown!r}, {summary}, {counts}{cut.get(self.stopped or '', '')})"

    def _repr_markdown_(self) -> str:
        """Notebooks show the text."""
        return self.text

    @property
    def reasoning(self) -> int:
        """Number of tokens of its reasoning."""
        return self.thought.tokens if self.thought else 0

    @property
    def choice(self) -> str | None:
        """The preferred choice; None without choices."""
        return self.decision.choice if self.decision else None

    @property
    def probabilities(self) -> dict[str, float]:
        """Probability of each choice, with a sum of 1; empty without choices."""
        return self.decision.probabilities if self.decision else {}

    @property
    def unwritten(self) -> str:
        """A choice that is not in the sequence; empty if it is, possibly as the end of the reasoning."""
        at_the_end = self.thought is not None and self.thought.answer.casefold() == self.text.casefold()
        return self.text if self.decision and not at_the_end else ""


Event = Notice | Prefilled | Text | Answer


@dataclass(frozen=True, slots=True)
class Callbacks:
    """`on_event` gets notices, the decoded prompt, texts as they are generated, and the answer. `progress` shows the
    progress of compiles and prefills. `ended` is asked after each token; True ends the answer there."""

    on_event: Callable[[Event], object] = lambda event: None
    progress: Watch = no_progress
    ended: Callable[[], bool] = lambda: False

    def __repr__(self) -> str:
        changed = (item.name for item in fields(self) if getattr(self, item.name) is not item.default)
        return f"Callbacks({', '.join(changed)})"


Stream = Generator[str, None, Answer]  # yields texts, returns the answer
NO_CALLBACKS = Callbacks()
