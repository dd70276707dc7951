"""`notes ask`: the answer on stdout and nothing else there; what happened goes to stderr or into the JSON."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from notes_cli import output
from notes_cli.commands.answering import Answer, answer
from notes_cli.commands.explaining import as_json, why
from notes_cli.commands.options import Number, model_options, open_workspace
from notes_cli.commands.remedies import tell, worded
from notes_cli.commands.request import Request, read_request

if TYPE_CHECKING:
    from notes_cli.editing.methods import Method
    from notes_cli.engine.notebook import Notebook
    from notes_cli.engine.segment import Segment
    from notes_cli.runtime.workspace import Workspace
    from notes_cli.sessions.session import Session


@click.command()
@click.argument("question", required=False)
@click.option(*("-p", "--prompt"), metavar="TEXT", help="The question, as llama.cpp takes it.")
@click.option(
    *("-f", "--file"), type=click.Path(path_type=Path, allow_dash=True), metavar="FILE", help="A text before it."
)
@click.option(
    "--splice",
    "splices",
    multiple=True,
    metavar="NAME",
    help="A compiled skill, a segment file, or a text. Repeatable.",
)
@click.option(
    "--erratum",
    "errata",
    multiple=True,
    metavar="FIELD=VALUE",
    help="A correction, or free text. Repeatable; the last one wins.",
)
@click.option(
    "--field",
    "fields",
    multiple=True,
    metavar="NAME=VALUE",
    help="A field's new value, brought in by --method. Repeatable.",
)
@click.option(
    "--method",
    metavar="METHOD",
    help="How --field amends the cache: erratum, field+erratum, field, selective@K, blend@K, block, suffix, recompute, "
    "stale, or auto: what this model was measured to need.  [default: auto]",
)
@click.option("-s", "--system", metavar="TEXT", help="System text before the skills.")
@click.option("--session", metavar="NAME", help="Begin a session of that name, or go on with it.")
@click.option("--think", is_flag=True, help="Let the model reason before it answers; its reasoning goes to stderr.")
@click.option(
    *("--max-think", "max_think"),
    type=Number(0),
    default=512,
    show_default=True,
    help="Tokens to reason with at most.",
)
@click.option("--choices", metavar="A,B,...", help="Decide among these answers.")
@click.option(
    *("-n", "--predict", "--n-predict", "limit"),
    type=Number(1, special=-1),
    default=256,
    show_default=True,
    help="Tokens to answer with at most, -1: until the answer or the context ends.",
)
@click.option(
    "--temp",
    type=Number(0, kind=float),
    default=0.0,
    show_default=True,
    help="Temperature, 0: always the likeliest token.",
)
@click.option("--top-k", type=Number(0), default=40, show_default=True, help="Draw among the k likeliest, 0: all.")
@click.option(
    "--top-p", type=Number(0, 1, kind=float), default=0.95, show_default=True, help="Draw among the likeliest p."
)
@click.option(
    "--min-p", type=Number(0, 1, kind=float), default=0.05, show_default=True, help="At least p of the likeliest."
)
@click.option(
    "--repeat-penalty",
    type=Number(0, above=True, kind=float),
    default=1.0,
    show_default=True,
    help="Against repeating, 1: none.",
)
@click.option("--seed", type=Number(0, 2**32 - 1), help="Seed for --temp above 0.  [default: drawn, shown in the JSON]")
@click.option(
    "--seam",
    type=Number(0),
    help="Tokens to recompute where a skill stands behind another text than when it was compiled.  "
    "[default: as measured, else 1]",
)
@click.option(
    "--place",
    type=click.Choice(["early", "late"]),
    help="Skills in the system message, or right before the question.  [default: as measured, else early]",
)
@click.option("--wording", metavar="FORM", help="How errata are worded (prompts/errata.yaml).")
@click.option("--strict", is_flag=True, help="Refuse a skill that cannot be spliced here, instead of decoding it.")
@click.option("--no-splice", is_flag=True, help="The same tokens by full prefill, to compare.")
@click.option("--explain", is_flag=True, help="Dry run: each piece of the prompt, how it would be made, and why.")
@click.option("--json", "json_", is_flag=True, help="One JSON object (docs/json.md).")
@click.option("--no-stream", is_flag=True, help="Print the answer when it is complete.")
@model_options
def command(question: str | None, prompt: str | None, file: Path | None, **given: Any) -> None:
    """Ask a question, with skills spliced in and errata appended.

    Piped text comes before QUESTION, that of --file between them. Skills stand inside the system message of the
    model's chat template, errata after them. What is not given goes by what `notes calibrate` measured of the model, if
    it did.

    \b
    Examples:
      notes ask "May I return this?" --splice returns
      notes ask "May I return this?" --splice returns --erratum "date=2026-07-01"
      notes ask "..." --splice returns --field date=2026-07-01 --method suffix
      notes ask "May I return this?" --splice returns --think
      notes ask "And a week later?" --session mine
      echo "May I return this?" | notes ask --splice returns --choices yes,no
    """
    started = time.perf_counter()
    request = read_request(question, prompt, file, given)

    from notes_cli.runtime.assembling import unspliced

    with (
        open_workspace(quiet=request.json, begins=True, **given) as workspace,
        _open_session(workspace, request.session) as session,
    ):
        segments = _open_segments(workspace, request, session)
        loaded = time.perf_counter()
        settled = _settle(workspace, request, segments, session)
        notebook = _lay(workspace, request, settled, segments, session)
        tokens = _count(notebook)
        if request.explain:
            _explain(notebook, tokens, settled, request.json)
            return
        for notice in unspliced(notebook):
            output.say(f"warning: {worded(notice)}")
        with output.progress("reading the prompt", hidden=request.json or tokens["decoded"] < 512) as update:
            notebook.flush(update)
        read = time.perf_counter()
        answered = answer(workspace, notebook, request, think=settled.think)
        if session:
            session.keep(answered.unwritten)
        if request.json:
            times = {
                "load": loaded - started,
                "splice": notebook.seconds["splice"],
                "prompt": read - loaded,
                "first_token": answered.at - loaded,
                "total": time.perf_counter() - started,
            }
            known = segments or session
            identity = workspace.identity.as_dict() if known else {"model": workspace.model.name}
            output.as_json(_as_json(request, settled, notebook, tokens, answered, times, identity))


@dataclass(frozen=True, slots=True)
class _Settled:
    """What holds for this turn: what was named, else what was measured of the model, else what is safe."""

    goes_on: bool  # a session does: skills stand there already
    think: bool
    wording: str
    place: str
    seam: int
    method: Method | None  # None where no new values come in
    why: str | None  # the method, if it was not named

    def as_json(self) -> dict[str, Any]:
        return {
            "method": str(self.method) if self.method else None,
            "method_why": self.why,
            "place": None if self.goes_on else self.place,
            "seam": self.seam,
            "wording": self.wording,
        }


@contextmanager
def _open_session(workspace: Workspace, name: str | None) -> Iterator[Session | None]:
    """The session of that name, begun or not, held until the turn is kept; None without a name."""
    if name is None:
        yield None
        return
    from notes_cli.sessions.folder import Sessions
    from notes_cli.sessions.session import Session

    with Sessions(workspace.paths.sessions).locked(name, new=True) as stored:
        yield Session(workspace, stored)


def _goes_on(session: Session | None) -> bool:
    return session is not None and not session.empty


def _open_segments(workspace: Workspace, request: Request, session: Session | None) -> list[Segment]:
    """The skills to splice, and a context for them. Raise NotesError for what only a session's first turn can have."""
    from notes_cli.errors import NotesError
    from notes_cli.runtime.assembling import open_segments

    goes_on = _goes_on(session)
    if goes_on and request.opens:
        raise NotesError(
            f"session {request.session} has begun: --place, --system and --no-splice belong to its first turn. "
            "A field is edited with: notes edit"
        )
    words = request.later if goes_on else request.splices
    watch = partial(output.progress, hidden=request.json)
    segments = open_segments(workspace, words, tell, dry=request.explain, watch=watch)
    _ = workspace.context
    return segments


def _settle(workspace: Workspace, request: Request, segments: Sequence[Segment], session: Session | None) -> _Settled:
    from notes_cli.runtime.assembling import check_seam
    from notes_cli.runtime.settings import UNMEASURED, defaults
    from notes_cli.text.erratum import shipped_wordings

    check_seam(request.seam or 0, segments)
    # A cue without a chain would only mislead: such a model is asked directly.
    think = request.think and (request.max_think > 0 or bool(workspace.reasoning.open))
    # Without skills nothing goes by the profile, and a model need not be read for it.
    found = defaults(workspace, think=think) if segments or session else UNMEASURED
    wording = request.wording or found.wording or shipped_wordings().default
    seam = found.seam if request.seam is None else request.seam
    if found.note:
        output.say(f"warning: {worded(found.note)}")
    goes_on = _goes_on(session)
    amends = bool(request.values) and not goes_on
    method, why = _method(workspace, request, segments, think) if amends else (None, None)
    return _Settled(goes_on, think, wording, request.place or found.place, seam, method, why)


def _method(
    workspace: Workspace, request: Request, segments: Sequence[Segment], think: bool
) -> tuple[Method, str | None]:
    """The method that was named, or the one that fits, and why."""
    from notes_cli.editing.methods import Method
    from notes_cli.runtime.assembling import Prompt, method_for

    if request.method:
        return request.method, None
    if not request.splice:
        return Method("recompute"), "recompute: nothing is spliced"
    return method_for(workspace, Prompt(request.question, segments, values=request.values, think=think))


def _lay(
    workspace: Workspace, request: Request, settled: _Settled, segments: Sequence[Segment], session: Session | None
) -> Notebook:
    """The prompt in a notebook, with room for what will be written: the session's next turn, or the first of all."""
    from notes_cli.editing.methods import Method
    from notes_cli.runtime.assembling import Prompt, assemble, known_fields, meant, parse_errata
    from notes_cli.runtime.thinking import ROOM

    room = request.room + (request.max_think + ROOM if settled.think or workspace.reasoning.open else 0)
    known = known_fields(*(session.state.skills if session else ()), *segments)
    for told in meant([*request.errata, *request.values], known):
        output.say(told)
    if session and settled.goes_on:
        return session.follow(
            *(request.question, request.errata, settled.wording, room, settled.think),
            segments=segments,
            seam=settled.seam,
            strict=request.strict,
        )
    prompt = Prompt(
        request.question,
        segments,
        parse_errata(request.errata, segments),
        request.system,
        settled.wording,
        values=request.values,
        method=settled.method or Method(),
        place=settled.place,
        think=settled.think,
    )
    notebook = assemble(
        workspace,
        prompt,
        seam=settled.seam,
        splice=request.splice,
        dry=request.explain,
        room=room,
        strict=request.strict,
    )
    if session:
        session.begin(prompt, notebook)
    return notebook


def _as_json(
    request: Request,
    settled: _Settled,
    notebook: Notebook,
    tokens: dict[str, int],
    answered: Answer,
    times: dict[str, float],
    identity: dict[str, str],
) -> dict[str, Any]:
    """The document that docs/json.md describes. `times` in seconds."""
    thought, decision = answered.thought, answered.decision
    return {
        "version": 1,
        "session": request.session,
        "answer": answered.text,
        "reasoning": thought.text if thought else None,
        "thought_whole": thought.finished if thought else None,
        "thought_stopped": thought.stopped if thought else None,
        "stopped": answered.stopped,
        "choice": decision.choice if decision else None,
        "probabilities": decision.probabilities if decision else None,
        "tokens": {**tokens, "reasoning": thought.tokens if thought else 0, "answer": answered.tokens},
        "ms": {name: round(1000 * seconds, 3) for name, seconds in times.items()},
        **settled.as_json(),
        "pieces": [as_json(piece) for piece in notebook.pieces],
        "sampling": asdict(request.sampling),
        "identity": identity,
    }


def _count(notebook: Notebook) -> dict[str, int]:
    """Tokens of the prompt by how their rows come about; a seam, an erratum and what is rewritten are decoded too."""
    spliced, seam = notebook.count("spliced"), notebook.count("seam")
    rewritten = sum(piece.rewritten for piece in notebook.pieces)
    errata = sum(piece.tokens for piece in notebook.pieces if piece.kind == "erratum")
    return {
        "total": len(notebook),
        "spliced": spliced,
        "seam": seam,
        "decoded": notebook.decoded,
        "rewritten": rewritten,
        "erratum": errata,
    }


def _explain(notebook: Notebook, tokens: dict[str, int], settled: _Settled, json_: bool) -> None:
    if json_:
        pieces = [as_json(piece) for piece in notebook.pieces]
        output.as_json({"version": 1, "tokens": tokens, **settled.as_json(), "pieces": pieces})
        return
    rows = [
        (str(piece.position), str(piece.tokens), piece.kind, piece.name, piece.how, why(piece))
        for piece in notebook.pieces
    ]
    output.table(("position", "tokens", "piece", "name", "how", "why"), rows, right=("position", "tokens"))
    output.result(
        f"{tokens['total']} tokens: {tokens['spliced']} spliced, {tokens['decoded']} decoded "
        f"({tokens['seam']} of them at seams, {tokens['rewritten']} in place of spliced ones)"
    )
    if settled.why:
        output.result(f"method {settled.why}")
