"""Every duty of the hooks that can be missed is missed by nobody."""

from __future__ import annotations

import warnings

import pytest

from sim.mutants import MUTANTS, run_mutants
from sim.quiet import quiet


@pytest.mark.slow
def test_every_mutant_is_noticed_or_has_a_reason() -> None:
    """A mutant that lives is a fault that the bench would let pass."""
    with warnings.catch_warnings():
        quiet()
        verdicts = run_mutants()
    survived = [v.name for v in verdicts if v.killed_by is None and v.equivalent is None]
    assert survived == []
    assert [v.name for v in verdicts] == [mutant.name for mutant in MUTANTS]


@pytest.mark.slow
def test_a_mutant_called_equivalent_changes_no_result() -> None:
    """The reason is a claim, so the mutant is run all the same and nothing may notice it."""
    with warnings.catch_warnings():
        quiet()
        verdicts = run_mutants([mutant for mutant in MUTANTS if mutant.equivalent])
    assert [v.killed_by for v in verdicts] == [None] * len(verdicts)
