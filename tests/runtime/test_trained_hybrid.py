"""A hybrid that was trained decides by a skill that its state was carried through as by one that is decoded.

The model is that of training/hybrid, the questions are of texts that its training never saw (`python -m bench.carried`
asks more of them, in more ways).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench.carried import CARRIED, MODEL, READ, WITHOUT, Asker, Found
from notes_cli.config import Paths
from notes_cli.engine.options import ContextOptions
from notes_cli.runtime.workspace import Workspace
from training.hybrid.cases import held_out

CASES = 36  # a third of them about the skill, about what is before it, and about what it redefines
SEAM = 4


@pytest.fixture(scope="module")
def asker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asker]:
    paths = Paths.under(tmp_path_factory.mktemp("hybrid"))
    with Workspace(MODEL, ContextOptions(n_ctx=1024, n_threads=1), paths=paths, carry=True) as workspace:
        yield Asker(workspace)


def asked(asker: Asker, situation: str, *seams: int) -> tuple[list[str], list[dict[str, Found]], list[str]]:
    """What each question is about, what was found in each way, and what is right."""
    cases = held_out(CASES, corrected=situation == "erratum")
    return (
        [case.about for case in cases],
        [asker.ways(case, situation, seams) for case in cases],
        [case.answer for case in cases],
    )


def same(found: list[dict[str, Found]], way: str, about: list[str], *which: str) -> int:
    """How often a way decides as reading does, of the questions about these."""
    return sum(one[way].choice == one[READ].choice for one, of in zip(found, about, strict=True) if of in which)


@pytest.mark.parametrize("situation", ["text", "skill"])
def test_carried_decides_as_decoded_and_what_forgets_does_not(asker: Asker, situation: str) -> None:
    """After a text, and after another skill that is carried, too."""
    about, found, right = asked(asker, situation, SEAM)
    every = ("skill", "before", "redefined")
    assert sum(one[READ].choice == answer for one, answer in zip(found, right, strict=True)) > 0.8 * CASES
    assert same(found, CARRIED, about, *every) >= 0.95 * CASES
    assert same(found, WITHOUT, about, "skill", "redefined") < 0.5 * 24
    assert same(found, f"S <- B, seam {SEAM}", about, "before") < 0.5 * 12
    assert same(found, f"S <- S, seam {SEAM}", about, "skill", "redefined") < 0.5 * 24


def test_an_erratum_after_a_carried_skill_as_after_one_that_is_decoded(asker: Asker) -> None:
    """Half of the errata are about what is asked for, half about another field."""
    about, found, right = asked(asker, "erratum")
    assert sum(one[READ].choice == answer for one, answer in zip(found, right, strict=True)) > 0.8 * CASES
    assert same(found, CARRIED, about, "skill", "before", "redefined") >= 0.95 * CASES
