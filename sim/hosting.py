"""Flags that say which Megatron a run imports, and which of its ways to train is under test."""

from __future__ import annotations

import argparse
from pathlib import Path

from real.config import ScenarioError
from real.flags import add_hosting_flags
from real.targets import TargetError
from real.targets.tree import check_tree
from sim.session.subject import MFSDP2, Subject, find_subject

__all__ = ["add_hosting_flags", "refuse_unfit", "subject_of"]


def subject_of(arguments: argparse.Namespace) -> Subject:
    """Returns what the flags say; nothing is imported yet.

    Raises:
        ScenarioError: There is no such target, or the folder holds no Megatron.
    """
    tree: Path | None = arguments.megatron
    check_tree(tree)
    return find_subject(arguments.target, tree)


def refuse_unfit(subject: Subject) -> str | None:
    """Imports Megatron and returns in one line why the target cannot be built, or None."""
    from real.mcore.versions import UnsupportedVersion, check_megatron_version
    from real.targets import find_target
    from sim.session.megatron import megatron_on_fake_cuda

    try:
        if subject.tree is None:
            check_megatron_version()
        if subject is MFSDP2:
            return None
        with megatron_on_fake_cuda(subject.tree):
            find_target(subject.name)
    except (UnsupportedVersion, TargetError, ScenarioError) as error:
        return str(error)
    return None
