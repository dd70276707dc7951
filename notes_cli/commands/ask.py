"""`notes ask`: the answer on stdout and nothing else there; what happened goes to stderr or into the JSON."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import click

from notes_cli import output
from notes_cli.commands.options import Number, answers_of, model_options, open_workspace

if TYPE_CHECKING:
    from notes_cli.engine.decision import Decision
    from notes_cli.engine.notebook import Notebook
    from notes_cli.engine.sampler import SamplerOptions
    from notes_cli.work.prompting import Prompt
    from notes_cli.work.session import Session
    from notes_cli.work.thinking import Reply, Thought
    from notes_cli.work.workspace import Workspace


@click.command()
@click.argument("question", required=False)
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
    *("-n", "--predict", "limit"),
    type=Number(1),
    default=256,
    show_default=True,
    help="Tokens to answer with at most.",
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
@click.option("--no-splice", is_flag=True, help="The same tokens by full prefill, to compare.")
@click.option("--explain", is_flag=True, help="Dry run: each piece of the prompt, how it would be made, and why.")
@click.option("--json", "json_", is_flag=True, help="One JSON object (docs/json.md).")
@click.option("--no-stream", is_flag=True, help="Print the answer when it is complete.")
@model_options
def command(
    question: str | None,
    splices: tuple[str, ...],
    errata: tuple[str, ...],
    fields: tuple[str, ...],
    method: str | None,
    system: str | None,
    session: str | None,
    think: bool,
    max_think: int,
    choices: str | None,
    limit: int,
    temp: float,
    top_k: int,
    top_p: float,
    min_p: float,
    repeat_penalty: float,
    seed: int | None,
    seam: int | None,
    place: str | None,
    wording: str | None,
    no_splice: bool,
    explain: bool,
    json_: bool,
    no_stream: bool,
    **model: Any,
) -> None:
    """Ask a question, with skills spliced in and errata appended.

    Piped text comes before QUESTION. Skills stand inside the system message of the model's chat template, errata
    after them. What is not given goes by what `notes calibrate` measured of the model, if it did.

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
    asked = _question(question)
    answers = answers_of(choices)

    from notes_cli.engine.decision import decide
    from notes_cli.engine.sampler import SamplerOptions
    from notes_cli.errors import NotesError
    from notes_cli.text.erratum import shipped_wordings
    from notes_cli.work.choosing import DEFAULT_PLACE, DEFAULT_SEAM, defaults
    from notes_cli.work.prompting import Prompt, lay, open_segments, parse_errata, parse_values
    from notes_cli.work.thinking import ROOM, decide_after

    values = parse_values(fields)
    if method is not None and not values:
        raise click.UsageError("--method says how --field amends the cache: give --field NAME=VALUE, too")
    if session and explain:
        raise click.UsageError("--explain does not go with --session. See what is in it: notes session show NAME")
    if seed is None:
        seed = time.time_ns() & 0xFFFFFFFF
    sampling = SamplerOptions(temp, top_k, top_p, min_p, repeat_penalty, seed)

    with open_workspace(quiet=json_, **model) as workspace, _open_session(workspace, session) as kept:
        begun = kept is not None and not kept.empty
        if begun and (splices or values or system or no_splice or place):
            raise NotesError(
                f"session {session} has begun: skills, their place, system text and --no-splice belong to its first "
                "turn. A field is edited with: notes edit"
            )
        segments = open_segments(workspace, splices, output.say, dry=explain)
        _ = workspace.context
        loaded = time.perf_counter()
        if segments or kept:  # without skills nothing goes by the profile, and a model need not be read for it
            found = defaults(workspace, think=think)
            seam = found.seam if seam is None else seam
            place, wording = place or found.place, wording or found.wording
        # A cue without a chain would only mislead: such a model is asked directly.
        think = think and (max_think > 0 or bool(workspace.reasoning.open))
        room = limit + (max_think + ROOM if think or workspace.reasoning.open else 0)
        settled: dict[str, Any] = {"method": None, "method_why": None, "place": None, "seam": None}
        settled["wording"] = wording or shipped_wordings().default
        if kept and begun:
            notebook = kept.follow(asked, errata, wording, room, think)
        else:
            given = parse_errata(errata, segments)
            prompt = Prompt(asked, segments, given, system, wording, values=values, think=think)
            seam, place = DEFAULT_SEAM if seam is None else seam, place or DEFAULT_PLACE
            prompt = replace(prompt, place=place)
            settled |= {"place": place, "seam": seam}
            if values:
                prompt, why = _amended(workspace, prompt, method, splice=not no_splice)
                settled |= {"method": str(prompt.method), "method_why": why}
            notebook = lay(workspace, prompt, seam=seam, splice=not no_splice, dry=explain, room=room)
            if kept:
                kept.begin(prompt, notebook)
        if explain:
            _explain(notebook, settled, json_)
            return
        tokens = _count(notebook)
        with output.progress("reading the prompt", hidden=json_ or tokens["decoded"] < 512) as update:
            notebook.flush(update)
        read = time.perf_counter()

        thought = (
            _think(workspace, notebook, sampling, max_think, show=not json_, stream=not no_stream) if think else None
        )
        decision: Decision | None = None
        if answers is not None:
            decision = decide_after(workspace, notebook, answers, thought) if thought else decide(notebook, answers)
            answer, count, first = decision.choice, 0, time.perf_counter()
            if not json_:
                output.result(answer)
        else:
            reply, first = _generate(
                workspace, notebook, sampling, limit, max_think, thought, stream=not (json_ or no_stream)
            )
            answer, count, thought = reply.text, reply.tokens, reply.thought
            if not json_:
                output.result(answer if no_stream else "")
        if kept:
            written = thought is not None and thought.answer.casefold() == answer.casefold()
            kept.keep(decision.choice if decision and not written else "")
        if json_:
            milliseconds = {
                "load": loaded - started,
                "splice": notebook.seconds["splice"],
                "prompt": read - loaded,
                "first_token": first - loaded,
                "total": time.perf_counter() - started,
            }
            output.as_json(
                {
                    "version": 1,
                    "session": session,
                    "answer": answer,
                    "reasoning": thought.text if thought else None,
                    "thought_whole": thought.whole if thought else None,
                    "choice": decision.choice if decision else None,
                    "probabilities": decision.probabilities if decision else None,
                    "tokens": {**tokens, "reasoning": thought.tokens if thought else 0, "answer": count},
                    "ms": {name: round(1000 * seconds, 3) for name, seconds in milliseconds.items()},
                    **settled,
                    "pieces": [asdict(piece) for piece in notebook.pieces],
                    "sampling": asdict(sampling),
                    "identity": workspace.identity.as_dict() if segments or kept else {"model": workspace.model.name},
                }
            )


def _amended(workspace: Workspace, prompt: Prompt, method: str | None, *, splice: bool) -> tuple[Prompt, str | None]:
    """The prompt with the method that was named, or with the one that fits, and why."""
    from notes_cli.editing.methods import Method
    from notes_cli.work.choosing import AUTO
    from notes_cli.work.prompting import method_for

    if method not in (None, AUTO):
        return replace(prompt, method=Method.parse(method)), None
    if not splice:
        return replace(prompt, method=Method("recompute")), "recompute: nothing is spliced"
    chosen, why = method_for(workspace, prompt)
    return replace(prompt, method=chosen), why


@contextmanager
def _open_session(workspace: Workspace, name: str | None) -> Iterator[Session | None]:
    """The session of that name, begun or not, held until the turn is kept; None without a name."""
    if name is None:
        yield None
        return
    from notes_cli.library.sessions import Sessions
    from notes_cli.work.session import Session

    with Sessions(workspace.paths.sessions).locked(name, new=True) as stored:
        yield Session(workspace, stored)


def _question(argument: str | None) -> str:
    """Piped text, then the argument. Raise UsageError if there is neither."""
    piped = ""
    piping = sys.stdin is not None and not sys.stdin.isatty()  # None where a script has closed it
    if argument is None and not piping:
        raise click.UsageError('there is no question. Write: notes ask "QUESTION", or pipe it in')
    if piping:
        try:
            piped = sys.stdin.buffer.read().decode().strip()
        except UnicodeDecodeError as error:
            raise click.UsageError(f"the piped text is not UTF-8 (byte {error.start})") from error
    asked = "\n\n".join(part for part in (piped, (argument or "").strip()) if part)
    if not asked:
        raise click.UsageError('the question is empty. Write: notes ask "QUESTION", or pipe it in')
    return asked


class _Voice:
    """Text as it comes: when it began, and whether its line is open."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self.first = 0.0
        self._write = write
        self._open = False

    def say(self, text: str) -> None:
        self.first = self.first or time.perf_counter()
        self._open = not text.endswith("\n")  # before it is written, which an interrupt may cut short
        self._write(text)

    def end(self) -> None:
        if self._open:
            self.say("\n")


def _think(
    workspace: Workspace, notebook: Notebook, options: SamplerOptions, limit: int, *, show: bool, stream: bool
) -> Thought:
    """The chain of thought, shown on stderr, dimmed on a terminal."""
    from rich.console import Console

    from notes_cli.work.thinking import think

    console = Console(stderr=True)
    voice = _Voice(lambda text: console.out(text, style="dim", highlight=False, end=""))
    try:
        thought = think(workspace, notebook, options, limit, voice.say if show and stream else None)
        if show and not stream:
            voice.say(thought.text)
    finally:
        voice.end()
    return thought


def _generate(
    workspace: Workspace,
    notebook: Notebook,
    options: SamplerOptions,
    limit: int,
    thinking: int,
    thought: Thought | None,
    *,
    stream: bool,
) -> tuple[Reply, float]:
    """The answer, and when its first token was there. Streams whole characters only.

    An interrupt or an error ends the answer: what has been written stands, on a line of its own.
    """
    from notes_cli.work.thinking import reply

    voice = _Voice(lambda text: click.echo(text, nl=False) if stream else None)
    try:
        found = reply(workspace, notebook, options, limit, thinking=thinking, say=voice.say, thought=thought)
    except BaseException:
        voice.end()
        raise
    return found, voice.first or time.perf_counter()


def _count(notebook: Notebook) -> dict[str, int]:
    """Tokens of the prompt by how their rows come about; a seam, an erratum and what is rewritten are decoded too."""
    spliced, seam = notebook.count("spliced"), notebook.count("seam")
    rewritten = sum(piece.rewritten for piece in notebook.pieces)
    errata = sum(piece.tokens for piece in notebook.pieces if piece.kind == "erratum")
    return {
        "total": len(notebook),
        "spliced": spliced,
        "seam": seam,
        "decoded": len(notebook) - spliced + rewritten,
        "rewritten": rewritten,
        "erratum": errata,
    }


def _explain(notebook: Notebook, settled: dict[str, Any], json_: bool) -> None:
    if json_:
        pieces = [asdict(piece) for piece in notebook.pieces]
        output.as_json({"version": 1, "tokens": _count(notebook), **settled, "pieces": pieces})
        return
    rows = [
        (str(piece.position), str(piece.tokens), piece.kind, piece.name, piece.how, piece.why)
        for piece in notebook.pieces
    ]
    output.table(("position", "tokens", "piece", "name", "how", "why"), rows, right=("position", "tokens"))
    tokens = _count(notebook)
    output.result(
        f"{tokens['total']} tokens: {tokens['spliced']} spliced, {tokens['decoded']} decoded "
        f"({tokens['seam']} of them at seams, {tokens['rewritten']} in place of spliced ones)"
    )
    if settled["method_why"]:
        output.result(f"method {settled['method_why']}")
