"""`notes verify`: compare splices, edits or a session with a full recompute, on this model and for given questions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from notes_cli import output
from notes_cli.commands.options import (
    FILE_OR_PIPE,
    SESSIONS,
    SKILLS,
    answers_of,
    json_option,
    model_options,
    open_model,
)
from notes_cli.commands.remedies import print_callbacks, worded
from notes_cli.commands.request import question_options
from notes_cli.commands.terminal import Command, option, piped_text, read_text
from notes_cli.errors import NotesError
from notes_cli.explanations import attributes, difference_why, entry_why

if TYPE_CHECKING:
    from notes_cli.errors import Notice
    from notes_cli.measure.examination import SessionReport
    from notes_cli.measure.verify import Case, Edits, Parting, Report
    from notes_cli.sessions.state import Entry

_WIDE = 100  # columns of a terminal from which on the table has figures


@click.command(cls=Command)
@click.argument("names", shell_complete=SKILLS, nargs=-1, metavar="[NAME...]")
@option("--session", "Verify a session instead, as it is put back from disk.", shell_complete=SESSIONS, metavar="NAME")
@option(
    "--question",
    "A question. Repeatable.  [default: the value of each field]",
    name="questions",
    multiple=True,
    metavar="TEXT",
)
@option(
    "--questions",
    "Questions, one a line (-: standard input).",
    name="file",
    type=FILE_OR_PIPE,
    metavar="FILE",
)
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
    errata: tuple[str, ...],
    fields: tuple[str, ...],
    methods: tuple[str, ...],
    choices: str | None,
    system: str | None,
    seam: int | None,
    wording: str | None,
    save: bool,
    json_: bool,
    **model: Any,
) -> int:
    """Compare splices and errata with a full recompute of the same tokens.

    Each question is asked as `notes ask` asks it, and once more with everything decoded. Their decisions must be the
    same: the choice (--choices), or the first words of the answer. Two texts may part later, or where both tokens are
    about equally likely, so that rounding decides, which is reported and no failure. With an erratum, the decision must
    also be that of the corrected text. And all rows of each skill are compared with rows that are computed now. Exits 0
    if all of that holds and the mean cosine of the logits is at least 0.99; else it exits 1 and says what does not.

    With --field, edit methods are compared with a recompute of the corrected text, and the cheapest is named that
    decides as it does in all questions. Exits 0 if the default method does, or each that was named. With --save the
    cheapest becomes the default of this model, and the exit status is that of finding one.

    A skill that was compiled alone has not seen those before it, which questions that need two may not survive: give
    some (--questions).

    With --session, what is put back from disk is compared with a prefill of the session's tokens: logits (also by how
    much the one that differs most does) and rows. What was forgotten is not among them: the prefill is what a session
    comes to that never had it.

    Where a model's rows cannot be moved, the skills are verified at the start of the prompt.

    \b
    Examples:
      notes verify returns
      notes verify returns --question "May I return this?" --choices yes,no
      notes verify returns shipping --questions mine.txt
      notes verify returns --erratum "date=2026-07-01" --json
      notes verify returns --field date=2026-07-01 --save
      notes verify --session mine --question "May I return this?"
    """
    if bool(names) == bool(session):
        raise click.UsageError("give the NAMEs of skills, or --session NAME, and not both")
    if session and (errata or fields or methods or system is not None or seam is not None):
        raise click.UsageError("a session is verified as it is: only --question, --choices and --wording go with it")
    if fields and errata:
        raise click.UsageError("--field and --erratum do not go together: --method erratum states the new value")
    if methods and not fields:
        raise click.UsageError("--method is how a new value changes the cache: give --field NAME=VALUE, too")
    given = {"seam": seam, "wording": wording, "carry": model["carry"]}
    chosen = {name: str(value).lower() for name, value in given.items() if value is not None}
    if save and (session or not (fields or chosen)):
        raise click.UsageError("--save is for the method of a --field, a --seam, --wording or --carry: give one")
    answers = answers_of(choices)
    questions += _read_questions(file)

    from notes_cli.measure.examination import Examination
    from notes_cli.text.fields import parse_values

    wanted = Examination(
        splice=names,
        questions=questions,
        errata=errata,
        fields=parse_values(fields),
        methods=methods,
        choices=answers,
        system=system,
        seam=seam,
        wording=wording,
    )
    callbacks = print_callbacks()
    with open_model(session=session, **model) as opened:
        if session:
            with opened.session(session, new=False, reading=True) as conversation:
                comparison, entries = conversation.verify(wanted, callbacks=callbacks), conversation.entries
            places = [_describe_position(entries, error.position) for error in comparison.layers]
            if json_:
                output.as_json(_session_as_json(comparison, session, places))
            else:
                _print_session(comparison, places, opened.name)
            return 0 if comparison.passed else 1
        if fields:
            edits = opened.verify_edits(wanted, callbacks=callbacks)
            output.as_json(_edits_as_json(edits)) if json_ else _print_edits(edits, opened.name)
            if save and edits.cheapest:
                _save(opened.name, {**chosen, "method": edits.cheapest})
            return 0 if (edits.cheapest if save else edits.passed) else 1
        report = opened.verify(wanted, callbacks=callbacks)
        output.as_json(_as_json(report)) if json_ else _print(report, opened.name)
        if save and report.passed:
            _save(opened.name, chosen)
        return 0 if report.passed else 1


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


def _as_json(report: Report) -> dict[str, Any]:
    cases = report.cases
    return {
        "version": 1,
        **attributes(report, "system", "cosine", "kl"),
        "same_top": all(case.same_top for case in cases),
        "same_decision": all(case.same_decision for case in cases),
        "rows": {name: {**asdict(check), "wrong": list(map(str, check.wrong))} for name, check in report.rows},
        "failed": [worded(failure) for failure in report.failures],
        "pass": report.passed,
        "cases": [{**asdict(case), **attributes(case, "same_decision", "right")} for case in cases],
        "kept": {name: {"kv": kv, "bytes": size} for name, kv, size in report.small},
    }


def _print(report: Report, model: str) -> None:
    wide, corrects = output.width(_WIDE) >= _WIDE, any(case.corrected is not None for case in report.cases)
    rows = [
        (
            _question(case),
            *((f"{case.cosine:.4f}", f"{case.kl:.1e}") if wide else ()),
            *(_short(case.decision), _short(case.reference)),
            *(("" if case.corrected is None else _short(case.corrected),) if corrects else ()),
            "same" if case.right else "DIFFERS",
        )
        for case in report.cases
    ]
    figures = ("cosine", "KL") if wide else ()
    corrected = ("corrected text",) if corrects else ()
    output.table(("question", *figures, "spliced", "recompute", *corrected, "decision"), rows, right=figures)
    for case in report.cases:
        if case.parting:
            output.result(_describe_parting(case, case.parting))
    for name, kv, size in report.small:
        output.result(f"{name}: its file keeps rows as {kv} ({output.human_size(size)}), rounded")
    if report.system:
        output.result(f"the skills come after a system text (-s): {_short(report.system)}")
    for name, check in report.rows:
        if check.right:
            output.result(f"{name}: K and V of {check.layers} layers and {check.tokens} tokens are as computed now")
        for why in check.unchecked:
            output.result(f"{name}: not compared: {why}")
    same = sum(case.right for case in report.cases)
    _verdict(
        f"{same} of {len(rows)} decisions as a full recompute, mean cosine {report.cosine:.4f}, on {model}",
        report.failures,
    )
    if not report.passed:
        output.result(f"next: {_next_step(report)}")


def _question(case: Case) -> str:
    return case.question + ("  + " + ", ".join(case.errata) if case.errata else "")


def _describe_parting(case: Case, parting: Parting) -> str:
    where = f"{_question(case)}: both answers are the same up to token {parting.at}"
    gap = f"{parting.gap:.2f} nats between the two tokens there, and rounding moves that by {parting.noise:.2f}"
    if parting.near:
        return f"{where}, where two are about equally likely ({gap})"
    if parting.late:
        return f"{where}: a text may part so late without being another answer ({gap})"
    return f"{where} only, and rounding does not explain that ({gap})"


def _next_step(report: Report) -> str:
    if broken := [name for name, check in report.rows if not check.right]:
        return f"compile {broken[0]} again: notes compile --from {broken[0]} --force"
    if not any(case.spliced for case in report.cases):
        return "see why nothing was reused: notes ask --explain"
    if len(report.rows) > 1 and not all(case.same_decision for case in report.cases):
        return "repeat it with the skills in another order, a longer --seam, or as one: notes compile A B --together C"
    if any(case.same_decision and not case.as_corrected for case in report.cases):
        return "look for a method that corrects it: notes verify --field NAME=VALUE"
    return "ask such questions with --recompute, which decodes everything"


def _verdict(summary: str, failures: Sequence[Notice]) -> None:
    for failure in failures:
        output.result(f"missed: {worded(failure)}")
    output.result(f"{'FAIL' if failures else 'pass'}: {summary}")


def _edits_as_json(edits: Edits) -> dict[str, Any]:
    means = ("cosine", "kl", "decoded")
    tried = [
        {
            "method": trial.method,
            "refused": worded(trial.refused) if trial.refused else None,
            "same": trial.same,
            "pass": trial.passed,
            **{figure: trial.mean(figure) for figure in means},
            "cases": [asdict(case) for case in trial.cases],
        }
        for trial in edits.tried
    ]
    return {
        "version": 1,
        **attributes(edits, "default", "why", "decisive", "cheapest"),
        "failed": [worded(failure) for failure in edits.failures],
        "pass": edits.passed,
        "methods": tried,
    }


def _print_edits(edits: Edits, model: str) -> None:
    rows = []
    for trial in edits.tried:
        if trial.refused:
            rows.append((trial.method, "", "", "", "refused", worded(trial.refused)))
            continue
        first, count = trial.cases[0], len(trial.cases)
        decision = "same" if trial.passed else "DIFFERS"
        detail = f"{trial.same} of {count}" if count > 1 else f"{_short(first.decision)} ({_short(first.reference)})"
        means = f"{trial.mean('cosine'):.4f}", f"{trial.mean('kl'):.1e}", f"{trial.mean('decoded'):.0f}"
        rows.append((trial.method, *means, decision, detail))
    columns = ("method", "cosine", "KL", "decoded", "decision", "")
    output.table(columns, rows, right=columns[1:4])
    output.result(f"without --method it is {edits.why}")
    if not edits.decisive:
        output.result("the old value decides these questions as the new one does, so they tell nothing of methods")
    elif edits.cheapest:
        output.result(f"the cheapest that decides as the recompute: {edits.cheapest}")
    _verdict(f"against a recompute of the corrected text on {model}", edits.failures)


def _describe_position(entries: Sequence[Entry], position: int) -> str:
    for entry in entries:
        if entry.position <= position < entry.position + entry.tokens:
            return f"position {position}, {entry.kind} {entry.name}".rstrip()
    return "the state after the last token"


def _session_as_json(report: SessionReport, name: str, places: Sequence[str]) -> dict[str, Any]:
    return {
        "version": 1,
        "name": name,
        **attributes(report, "tokens", "cosine", "kl"),
        "same_top": all(point.same_top for point in report.points),
        "same_decision": report.same_decision,
        "failed": [worded(failure) for failure in report.failures],
        "pass": report.passed,
        "points": [asdict(point) for point in report.points],
        "layers": [{**asdict(error), "at": at} for error, at in zip(report.layers, places, strict=True)],
        "edits": [f"{edit.text} by {edit.how}: {entry_why(edit)}" for edit in report.edits],
        "reasons": [difference_why(cause, where) for cause, where in report.causes.items()],
    }


def _print_session(report: SessionReport, places: Sequence[str], model: str) -> None:
    rows = [
        (
            *("at the end" if point.question is None else point.question, f"{point.cosine:.4f}", f"{point.kl:.1e}"),
            f"{point.difference:.1e}",
            *("same" if point.same_top else "another", _short(point.decision or ""), _short(point.reference or "")),
            "" if point.decision is None else "same" if point.decision == point.reference else "DIFFERS",
        )
        for point in report.points
    ]
    columns = ("after", "cosine", "KL", "logits", "top", "session", "recompute", "decision")
    output.table(columns, rows, right=("cosine", "KL", "logits"))
    errors = [
        (f"{error.layer}", error.part, f"{error.k:.1e}", f"{error.v:.1e}", at)
        for error, at in zip(report.layers, places, strict=True)
    ]
    output.table(("layer", "rows", "K error", "V error", "largest at"), errors, right=("layer", "K error", "V error"))
    for edit in report.edits:
        output.result(f"edit {edit.text} by {edit.how}: {entry_why(edit)}")
    for cause, where in report.causes.items():
        output.result(f"expected: {difference_why(cause, where)}")
    if not report.causes:
        output.result("expected: nothing that would make rows differ by more than rounding")
    farthest = max(report.largest.k, report.largest.v)
    _verdict(
        f"{report.tokens} tokens from disk against a prefill of them, mean cosine {report.cosine:.4f}, "
        f"rows within {farthest:.1e} on {model}",
        report.failures,
    )


def _short(text: str) -> str:
    return output.line(text, 40)
