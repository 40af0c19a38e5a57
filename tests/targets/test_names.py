"""Targets by name, and trees that cannot be hosted: one line each."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest

from real.config import ScenarioError
from real.targets import TargetError, check_target_name
from sim.hosting import subject_of
from sim.session.subject import MFSDP2
from tests.targets.conftest import Run


@pytest.mark.parametrize("name", ["mfsdp2", "mfsdp1", "mfsdp1:optim_grads", "native"])
def test_known_names_are_taken(name: str) -> None:
    check_target_name(name)


@pytest.mark.parametrize("name", ["", "mfsdp3", ":native", "Mfsdp1"])
def test_an_unknown_name_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(TargetError) as raised:
        check_target_name(name)
    expected = f"Expected a target among mfsdp2, mfsdp1, native; got {name!r}."
    assert str(raised.value) == expected


def test_a_folder_without_megatron_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError) as raised:
        subject_of(argparse.Namespace(target="native", megatron=tmp_path))
    assert str(raised.value) == f"Expected a Megatron tree with megatron/core, got {tmp_path}."


def test_the_release_with_our_hooks_says_nothing_of_itself() -> None:
    """Its traces are compared byte by byte on any machine."""
    assert MFSDP2.identity() == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--target mfsdp3", "Expected a target among mfsdp2, mfsdp1, native; got 'mfsdp3'."),
        (
            "--target mfsdp1:optim",
            (
                "Expected a variant of target 'mfsdp1' among optim_grads_params, optim_grads; "
                "got 'optim'."
            ),
        ),
        ("--target mfsdp2:fast", "Expected no variant of target 'mfsdp2', got 'fast'."),
    ],
)
def test_a_target_that_is_none_costs_one_line(
    run_target: Callable[..., Run], words: str, message: str
) -> None:
    run = run_target(*words.split())
    assert (run.status, run.err) == (2, f"sim: {message}\n")


@pytest.mark.slow
def test_a_tree_that_fits_none_is_told_what_is_missing(run_target: Callable[..., Run]) -> None:
    """The release has MFSDP v2 but no wrapper for it."""
    run = run_target("--target", "native")
    assert run.status == 2
    assert run.err.count("\n") == 1
    wanted = "megatron.core.distributed.fsdp.mcore_fsdp_adapter.FullyShardedDataParallelV2"
    assert f"without {wanted}" in run.err
