"""`notes probe`: on which rows of a skill does a decision rest, and what must be new for a new value to be seen?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from notes_cli import output
from notes_cli.commands.grouped import Grouped
from notes_cli.commands.listening import listening
from notes_cli.commands.options import FieldValue, Number, SkillName, answers_of, model_options, open_model

if TYPE_CHECKING:
    from notes_cli.measure.probe import Probe, Window


@click.command(cls=Grouped)
@click.argument("name", type=SkillName())
@click.option(
    "--field",
    type=FieldValue(),
    required=True,
    metavar="NAME[=NEW]",
    help="The field, and a new value; without one it is made up.",
)
@click.option("--question", metavar="TEXT", help="What to decide.  [default: the value of the field]")
@click.option(
    "--choices", metavar="A,B,...", help="Decide among these answers.  [default: the greedy answers of both texts]"
)
@click.option(*("-s", "--system"), metavar="TEXT", help="System text before the skill.")
@click.option("--window", type=Number(1), help="Tokens that are probed together.  [default: for 128 windows at most]")
@click.option("--json", "json_", is_flag=True, help="One JSON object (docs/json.md).")
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE", help="Also draw a picture: .png or .svg.")
@model_options
def command(
    name: str,
    field: str,
    question: str | None,
    choices: str | None,
    system: str | None,
    window: int | None,
    json_: bool,
    plot: Path | None,
    **model: Any,
) -> None:
    """Show on which tokens of a skill a decision rests.

    The skill is compiled with the field's value and with a new one, and the question is asked of rows mixed from the
    two: from the new text only the field's own, only those after it, everything from each token on, and each token
    alone. Recovery is 0 where the decision is that with the old value, and 1 where it is that with the new one. The
    text is shown with the recovery of each token under it. A decision that is the same with both values has nothing to
    show, and is refused.

    \b
    Examples:
      notes probe returns --field date=2026-07-01 --question "May I return this?"
      notes probe returns --field tier=silver --plot out.png
    """
    from notes_cli.commands.plot import check_plot, write_plot
    from notes_cli.measure.picture import as_json
    from notes_cli.measure.probing import Probing

    if plot:
        check_plot(plot)
    field, equals, value = field.partition("=")
    wanted = Probing(
        skill=name,
        field=field,
        value=value if equals else None,
        question=question,
        choices=answers_of(choices),
        system=system,
        window=window,
    )
    with open_model(quiet=json_, **model) as opened:
        report = opened.probe(wanted, listener=listening(json_))
    try:
        if plot:
            write_plot(plot, report)
    finally:  # what was measured is not lost with the picture
        if json_:
            output.as_json({"version": 1, **as_json(report)})
        else:
            _print(report)


def _print(report: Probe) -> None:
    from notes_cli.commands.heat import Style, print_heat

    old, new = report.values
    output.result(f"{report.skill}, {report.field}: {old} becomes {new}")
    stale, fresh = report.decisions
    output.result(f"{report.question}  {_quoted(stale)} becomes {_quoted(fresh)}")
    output.result("its log-probability less that of the other: {:+.2f} and {:+.2f} nats\n".format(*report.scores))
    whole = report.field_tokens + report.after_tokens
    rows = [
        _row("the field's own", report.field_tokens, report.field_only, "field", report.by_field),
        _row("all after it, not its own", report.after_tokens, report.after_only),
        _row("everything from the field on", whole, report.windows[0].suffix, "suffix", report.by_suffix),
    ]
    if report.best:
        rows.insert(2, _row(f"{_quoted(report.best.text)} after it alone", report.best.tokens, report.best.alone))
    output.table(("rows of the new text", "tokens", "recovery", "by edit method"), rows, right=("tokens", "recovery"))
    output.result("")
    output.result(_verdict(report))
    half, most = report.reach(0.5), report.reach(0.9)
    output.result(f"Tokens from the field on that must be new for 50% of the recovery: {half}; for 90%: {most}.")
    levels, top = Style.of_stdout().levels, min(1.0, max(0.1, *(window.alone for window in report.windows)))
    what = "its token" if report.window == 1 else f"its {report.window} tokens"
    output.result(f"Under each character: what {what} alone would recover, {levels[0]} to {levels[-1]} ({top:.2f}).\n")
    print_heat(report.text, [_span(window, top) for window in report.windows], report.places)


def _span(window: Window, top: float) -> tuple[int, int, float]:
    """Where its heat is shown: not on the blank that many tokens begin with."""
    word = window.text.lstrip(" ") or window.text
    return window.end - len(word), window.end, window.alone / top


def _row(what: str, tokens: int, recovery: float, method: str = "", by_method: float | None = None) -> tuple[str, ...]:
    return what, str(tokens), _number(recovery), "" if by_method is None else f"{method} {_number(by_method)}"


def _number(value: float) -> str:
    return f"{round(value, 2) + 0.0:.2f}"  # never -0.00


def _verdict(report: Probe) -> str:
    own, after = report.field_only >= 0.5, report.after_only >= 0.5
    if own and after:
        return "It rests on both: the field's own rows or those after it would do."
    if own:
        return "It rests on the field's own rows: the value is looked up when it is asked for."
    if after:
        return "It rests on rows after the field: what was written there from the old value outweighs the new one."
    return "It rests on both together: neither the field's own rows nor those after it would do."


def _quoted(text: str) -> str:
    return f'"{output.spelt(text.strip(" "), 40)}"'
