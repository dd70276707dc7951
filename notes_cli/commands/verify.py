"""`notes verify`: is a splice as good as a full recompute, on this model, for this skill and these questions?"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from notes_cli import output
from notes_cli.commands.options import Number, answers_of, model_options, open_workspace

if TYPE_CHECKING:
    from notes_cli.measure.verify import Report


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@click.option(
    "--question",
    "questions",
    multiple=True,
    metavar="TEXT",
    help="A question. Repeatable.  [default: the value of each field]",
)
@click.option(
    "--erratum", "errata", multiple=True, metavar="FIELD=VALUE", help="Verify with this correction, too. Repeatable."
)
@click.option("--choices", metavar="A,B,...", help="Decide among these answers.  [default: the greedy answer]")
@click.option(
    *("-s", "--system"),
    metavar="TEXT",
    help="System text before the skills.  [default: a few sentences, so that skills move, if they can]",
)
@click.option("--seam", type=Number(0), help="Tokens to recompute where a skill begins.  [default: 1]")
@click.option("--wording", metavar="FORM", help="How errata are worded (prompts/errata.yaml).")
@click.option("--json", "json_", is_flag=True, help="One JSON object (docs/json.md).")
@model_options
def command(
    names: tuple[str, ...],
    questions: tuple[str, ...],
    errata: tuple[str, ...],
    choices: str | None,
    system: str | None,
    seam: int | None,
    wording: str | None,
    json_: bool,
    **model: Any,
) -> int:
    """Compare splice and errata with a full recompute of the same tokens.

    Shows logit cosine, KL divergence, whether the likeliest token and the decision are the same, and the control: the
    same rows without rotation, which must be worse. With an erratum, the decision must also be that of the corrected
    text. Exits 0 if every decision is the same and the mean cosine is at least 0.99, else 1.

    Where a model's rows cannot be moved, the skills are verified at the start of the prompt, and there is no control.

    \b
    Examples:
      notes verify returns
      notes verify returns --question "May I return this?" --choices yes,no
      notes verify returns --erratum "date=2026-07-01" --json
    """
    from notes_cli.measure.verify import field_questions, verify
    from notes_cli.text.wording import verify_system
    from notes_cli.work.prompting import DEFAULT_SEAM, open_segments, parse_errata

    answers = answers_of(choices)
    with open_workspace(quiet=json_, **model) as workspace:
        segments = open_segments(workspace, names, output.say)
        if system is None:
            system = "" if any(segment.whole for segment in segments) else verify_system()
        report = verify(
            workspace,
            segments,
            list(questions) or field_questions(segments),
            parse_errata(errata, segments),
            choices=answers,
            system=system,
            seam=DEFAULT_SEAM if seam is None else seam,
            wording=wording,
        )
        name = f"{workspace.model.name} {workspace.model.quantization}"
    if json_:
        output.as_json(_as_json(report))
    else:
        _print(report, name)
    return 0 if report.passed else 1


def _as_json(report: Report) -> dict[str, Any]:
    cases = report.cases
    return {
        "version": 1,
        "cosine": report.cosine,
        "kl": report.kl,
        "same_top": all(case.same_top for case in cases),
        "same_decision": all(case.same_decision for case in cases),
        "control": {
            "cosine": report.control_cosine,
            "same_decision": all(case.control_decision == case.reference for case in cases),
        },
        "pass": report.passed,
        "cases": [{**asdict(case), "same_decision": case.same_decision, "right": case.right} for case in cases],
    }


def _print(report: Report, model: str) -> None:
    rows = []
    for case in report.cases:
        rows.append(
            (
                case.question + ("  + " + ", ".join(case.errata) if case.errata else ""),
                f"{case.cosine:.4f}",
                f"{case.kl:.1e}",
                _short(case.decision),
                _short(case.reference),
                "" if case.corrected is None else _short(case.corrected),
                "same" if case.right else "DIFFERS",
                f"{case.control_cosine:.4f}" if case.moved else "not moved" if case.spliced else "not reused",
                _short(case.control_decision),
            )
        )
    output.table(
        ("question", "cosine", "KL", "spliced", "recompute", "corrected text", "decision", "control cosine", "control"),
        rows,
        right=("cosine", "KL", "control cosine"),
    )
    same = sum(case.right for case in report.cases)
    verdict = "pass" if report.passed else "FAIL"
    if any(case.moved for case in report.cases):
        control = f"control without rotation {report.control_cosine:.4f}"
    elif any(case.spliced for case in report.cases):
        control = "no control: rows were reused where they were compiled"
    else:
        control = "no control: nothing was reused, notes ask --explain says why"
    output.result(
        f"{verdict}: {same} of {len(rows)} decisions as a full recompute, mean cosine {report.cosine:.4f} "
        f"({control}) on {model}"
    )


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 40 else line[:39] + "…"
