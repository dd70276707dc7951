"""`notes verify`: compare splices, edits or a session with a full recompute, on this model and for given questions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from notes_cli import output, signals
from notes_cli.commands.options import (
    FILE_OR_PIPE,
    SESSIONS,
    SKILLS,
    answers_of,
    json_option,
    model_options,
    open_model,
)
from notes_cli.commands.remedies import print_callbacks, print_notice, worded
from notes_cli.commands.request import question_options
from notes_cli.commands.terminal import Command, ended_by_ctrl_c, option, piped_text, read_text
from notes_cli.errors import NotesError
from notes_cli.explanations import attributes

if TYPE_CHECKING:
    from notes_cli.measure.verify import Case, EditReport, Parting, Report, SessionReport
    from notes_cli.sessions.state import Entry

_WIDE = 100  # columns of a terminal from which on the table has figures


@click.command(cls=Command)
@click.argument("names", shell_complete=SKILLS, nargs=-1, metavar="[NAME...]")
@option("--session NAME", "Verify a session instead, as it is put back from disk.", shell_complete=SESSIONS)
@option(
    "--question TEXT", "A question. Repeatable.  [default: the value of each field]", name="questions", multiple=True
)
@option("--questions FILE", "Questions, one a line (-: standard input).", name="file", type=FILE_OR_PIPE)
@option("--method", "An edit method. Repeatable.  [default: all]", name="methods", multiple=True)
@question_options(
    *("errata", "fields", "choices", "system", "seam", "wording"),
    errata={"help": "Ask each question with this correction, too. Repeatable."},
    fields={"help": "Verify edit methods that give the field this value. Repeatable."},
    choices={"help": "Decide among these answers.  [default: the greedy answer]"},
    system={
        "help": "System text before the skills.  [default: some sentences, so that skills have to move, where they can]"
    },
    seam={"rare": False},
)
@option(
    "--save",
    "Write what was verified into config.yaml for this model: the cheapest method, --seam, --wording, --carry.",
    is_flag=True,
)
@json_option
@model_options
def command(
    names: tuple[str, ...],
    session: str | None,
    questions: tuple[str, ...],
    file: Path | None,
    save: bool,
    json_: bool,
    **given: Any,
) -> int:
    """Compare splices and errata with a full recompute of the same tokens.

    Each question is asked as `notes ask` asks it, and once more with everything decoded. Their decisions must be the
    same: the choice (--choices), or the first words of the answer. Two texts may part later, or where both tokens are
    about equally likely, so that rounding decides, which is reported and no failure. Where the model babbles in both
    there is no verdict. Ctrl-C ends the questions and reports those before it. With an erratum, the decision must
    also be that of the corrected text. And all rows of each skill are compared with rows that are computed now. Exits 0
    if all of that holds and the mean cosine of the logits is at least 0.99; else it exits 1 and says what does not.

    With --field, edit methods are compared with a recompute of the corrected text, and the cheapest is named that
    decides as it does in all questions. Exits 0 if the default method does, or each that was named. With --save the
    cheapest becomes the default of this model, and the exit status is that of finding one.

    A skill that was compiled alone has not seen those before it, which questions that need two may not survive: give
    some (--questions).

    With --session, what is put back from disk is compared with a prefill of the session's tokens: logits and rows. What
    was forgotten is not among them: the prefill is what a session comes to that never had it.

    Where a model's rows cannot be moved, the skills are verified at the start of the prompt.

    \b
    Examples:
      notes verify store-handbook
      notes verify store-handbook --question "Is it closed?" --choices yes,no
      notes verify store-handbook fees --questions questions.txt
      notes verify store-handbook --erratum "Carrier=Kestrel Freight" --json
      notes verify store-handbook --field "Carrier=Kestrel Freight" --save
      notes verify --session mine --question "Which carrier delivers?"
    """
    if bool(names) == bool(session):
        raise click.UsageError("give the NAMEs of skills, or --session NAME, and not both")
    if session and any(given[name] not in (None, ()) for name in ("errata", "fields", "methods", "system", "seam")):
        raise click.UsageError("a session is verified as it is: only --question, --choices and --wording go with it")
    if given["fields"] and given["errata"]:
        raise click.UsageError("--field and --erratum do not go together: --method erratum states the new value")
    if given["methods"] and not given["fields"]:
        raise click.UsageError("--method is how a new value changes the cache: give --field NAME=VALUE, too")
    settings = ("seam", "wording", "carry")
    chosen = {name: str(given[name]).lower() for name in settings if given[name] is not None}
    if save and (session or not (given["fields"] or chosen)):
        raise click.UsageError("--save is for the method of a --field, a --seam, --wording or --carry: give one")
    answers = answers_of(given["choices"])
    questions += _read_questions(file)

    from notes_cli.text.fields import parse_values

    with open_model(session=session, **given) as opened, ended_by_ctrl_c() as ended:
        callbacks = replace(print_callbacks(), ended=ended)
        how = {"choices": answers, "wording": given["wording"], "callbacks": callbacks}
        report: Report
        entries: Sequence[Entry] = ()
        if session:
            with opened.session(session, new=False, reading=True, say=print_notice) as conversation:
                report, entries = conversation.verify(questions, **how), conversation.entries
        else:
            how |= {name: given[name] for name in ("errata", "methods", "system", "seam")}
            report = opened.verify(names, questions=questions, fields=parse_values(given["fields"]), **how)
        if json_:
            output.as_json(_as_json(report, session, entries))
        else:
            _print(report, opened.name, entries)
        passed = report.passed
        if save and given["fields"] and (passed := bool(cheapest := getattr(report, "cheapest", None))):
            chosen["method"] = str(cheapest)
        if save and passed:
            _save(opened.name, chosen)
        return signals.INTERRUPTED if ended() else 0 if passed else 1


def _save(model: str, chosen: dict[str, str]) -> None:
    from notes_cli.runtime.naming import save_model_defaults

    path = save_model_defaults(model, chosen)
    output.say(f"{', '.join(f'{name}: {value}' for name, value in chosen.items())} for {model}: written to {path}")


def _read_questions(file: Path | None) -> tuple[str, ...]:
    """Return the lines of a file without blank ones. Raises NotesError if there are none."""
    if file is None:
        return ()
    text = piped_text() if str(file) == "-" else read_text(file)
    questions = tuple(dict.fromkeys(line.strip() for line in text.splitlines() if line.strip()))
    if not questions:
        raise NotesError(f"{file} has no questions", "Write one a line")
    return questions


def _as_json(report: Report, session: str | None, entries: Sequence[Entry]) -> dict[str, Any]:
    from notes_cli.measure.verify import EditReport, SessionReport

    facts: dict[str, Any] = {"version": 1}
    if isinstance(report, EditReport):
        refused = {name: worded(error) for name, error in report.refused.items()}
        facts |= {**attributes(report, "default", "why", "decisive", "cheapest"), "refused": refused}
    elif isinstance(report, SessionReport):
        layers = [{**asdict(error), "at": _position(entries, error.position)} for error in report.layers]
        facts |= {"name": session, "tokens": report.tokens, "layers": layers, "reasons": _reasons(report)}
    else:
        rows = {name: {**asdict(check), "wrong": list(map(str, check.wrong))} for name, check in report.rows.items()}
        facts |= {"system": report.system, "rows": rows}
    if not isinstance(report, EditReport):
        facts |= {figure: report.mean(figure) for figure in ("cosine", "kl")}
    return {
        **facts,
        "failed": [worded(failure) for failure in report.failures],
        "pass": report.passed,
        "cases": [{**asdict(case), **attributes(case, "same_decision", "right")} for case in report.cases],
    }


def _print(report: Report, model: str, entries: Sequence[Entry]) -> None:
    from notes_cli.measure.verify import EditReport, SessionReport

    if isinstance(report, EditReport):
        _print_methods(report)
        against = f"against a recompute of the corrected text on {model}"
    else:
        _print_questions(report.cases)
        right = [case.right for case in report.cases if case.question and not case.babble]
        against = f"{sum(right)} of {len(right)} decisions as a full recompute, mean cosine {report.mean('cosine'):.4f}"
        against += f", on {model}"
    if isinstance(report, SessionReport):
        far = report.largest
        where = f"in layer {far.layer}, at {_position(entries, far.position)}: K by {far.k:.1e}, V by {far.v:.1e}"
        output.result(f"of {report.tokens:,} tokens from disk, rows differ most {where}")
        for reason in _reasons(report) or ["nothing that would make rows differ by more than rounding"]:
            output.result(f"expected: {reason}")
    if report.system:
        output.result(f"the skills come after a system text (-s): {_short(report.system)}")
    for name, check in report.rows.items():
        if not check.wrong:
            output.result(f"{name}: K and V of {check.layers} layers and {check.tokens} tokens are as computed now")
        for why in check.unchecked:
            output.result(f"{name}: not compared: {why}")
    for failure in report.failures:
        output.result(f"missed: {worded(failure)}")
    output.result(f"{'pass' if report.passed else 'FAIL'}: {against}")
    if report.rows and not report.passed:
        output.result(f"next: {_next_step(report)}")


def _print_questions(cases: Sequence[Case]) -> None:
    wide, corrects = output.width(_WIDE) >= _WIDE, any(case.corrected is not None for case in cases)
    rows = [
        (
            _question(case),
            *((f"{case.cosine:.4f}", f"{case.kl:.1e}") if wide else ()),
            *(_short(case.decision), _short(case.reference)),
            *((_short(case.corrected or ""),) if corrects else ()),
            ("no verdict" if case.babble else "same" if case.right else "DIFFERS") if case.question else "",
        )
        for case in cases
    ]
    figures = ("cosine", "KL") if wide else ()
    corrected = ("corrected text",) if corrects else ()
    output.table(("question", *figures, "reused", "recompute", *corrected, "decision"), rows, right=figures)
    for case in cases:
        if case.parting:
            output.result(_describe_parting(case, case.parting))


def _print_methods(report: EditReport) -> None:
    rows = []
    for method, tried in report.by_method.items():
        first, same = tried.cases[0], sum(case.right for case in tried.cases)
        decision = "same" if same == len(tried.cases) else "DIFFERS"
        detail = f"{_short(first.decision)} ({_short(first.reference)})"
        detail = detail if len(tried.cases) == 1 else f"{same} of {len(tried.cases)}"
        means = f"{tried.mean('cosine'):.4f}", f"{tried.mean('kl'):.1e}", f"{tried.mean('decoded'):.0f}"
        rows.append((method, *means, decision, detail))
    rows += [(method, "", "", "", "refused", worded(error)) for method, error in report.refused.items()]
    columns = ("method", "cosine", "KL", "decoded", "decision", "")
    output.table(columns, rows, right=columns[1:4])
    output.result(f"without --method it is {report.why}")
    if not report.decisive:
        output.result("the old value decides these questions as the new one does, so they tell nothing of methods")
    elif report.cheapest:
        output.result(f"the cheapest that decides as the recompute: {report.cheapest}")


def _question(case: Case) -> str:
    return (case.question or "at the end") + ("  + " + ", ".join(case.errata) if case.errata else "")


def _describe_parting(case: Case, parting: Parting) -> str:
    where = f"{_question(case)}: both answers are the same up to token {parting.at}"
    gap = f"{parting.gap:.2f} nats between the two tokens there, and rounding moves that by {parting.noise:.2f}"
    if parting.near:
        return f"{where}, where two are about equally likely ({gap})"
    if parting.late:
        return f"{where}: a text may part so late without being another answer ({gap})"
    return f"{where} only, and rounding does not explain that ({gap})"


def _next_step(report: Report) -> str:
    if broken := [name for name, check in report.rows.items() if check.wrong]:
        return f"compile {broken[0]} again: notes compile --from {broken[0]} --force"
    if not any(case.spliced for case in report.cases):
        return "see why nothing was reused: notes ask --explain"
    if len(report.rows) > 1 and not all(case.same_decision for case in report.cases):
        return "repeat it with the skills in another order, a longer --seam, or as one: notes compile A B --together C"
    if any(case.same_decision and not case.as_corrected for case in report.cases):
        return "look for a method that corrects it: notes verify --field NAME=VALUE"
    return "ask such questions with --recompute, which decodes everything"


def _reasons(report: SessionReport) -> list[str]:
    return [cause.value.format(", ".join(where)) for cause, where in report.causes.items()]


def _position(entries: Sequence[Entry], position: int) -> str:
    for entry in entries:
        if entry.position <= position < entry.position + entry.tokens:
            return f"position {position}, {entry.kind} {entry.name}".rstrip()
    return "the state after the last token"


def _short(text: str) -> str:
    return output.line(text, 40)
