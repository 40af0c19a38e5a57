"""Flags that say which Megatron a run imports, and which of its ways to train is under test."""

from __future__ import annotations

import argparse
from pathlib import Path

from real.config import ScenarioError
from real.targets import DEFAULT, TargetError
from sim.session.subject import MFSDP2, Subject, find_subject


def add_hosting_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that say what is under test."""
    parser.add_argument(
        "--target",
        default=DEFAULT,
        metavar="NAME",
        help="what is under test: mfsdp2, the released MFSDP v2 with our hooks (default); mfsdp1, "
        "or mfsdp1:optim_grads, the released MFSDP v1 with Megatron's own hooks; native, a tree "
        "that joins MFSDP v2 and the combined schedule itself; or FILE.py:CLASS, an adapter of "
        "one's own (docs/your-tree.md)",
    )
    parser.add_argument(
        "--megatron",
        type=Path,
        metavar="PATH",
        help="import the Megatron tree in this folder instead of the installed release",
    )


def subject_of(arguments: argparse.Namespace) -> Subject:
    """Returns what the flags say; nothing is imported yet.

    Raises:
        ScenarioError: There is no such target, or the folder holds no Megatron.
    """
    tree: Path | None = arguments.megatron
    if tree is not None and not (tree / "megatron" / "core" / "__init__.py").is_file():
        raise ScenarioError(f"Expected a Megatron tree with megatron/core, got {tree}.")
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
