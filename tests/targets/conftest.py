"""Runs a target in a process of its own: another tree can be imported there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from real.trace import Trace, read_traces

ROOT = Path(__file__).parents[2]


class Run(NamedTuple):
    """What `sim run` left: its status, its JSON, its error text and the folder of its trace."""

    status: int
    result: dict[str, Any]
    err: str
    out: Path

    @property
    def traces(self) -> list[Trace]:
        """The trace of every rank."""
        return read_traces(self.out)

    def broken(self, rule: str) -> list[str]:
        """Returns the violations of a rule, as text."""
        return [text for text in self.result["problems"] if text.startswith(f"{rule}:")]


@pytest.fixture
def run_target(tmp_path: Path) -> Callable[..., Run]:
    """Calls `python -m sim run --json` with the given words, on a small model.

    `patches` names patches of what is under test (`tests.targets.patches`).
    """

    def run(*words: object, patches: str = "") -> Run:
        module = ["tests.targets.patches", patches] if patches else ["sim"]
        small = ["--num-layers", "2", "--world-size", "2", "--train-iters", "2"]
        command = ["run", "--json", "--out", str(tmp_path), *small, *(str(word) for word in words)]
        done = subprocess.run(
            [sys.executable, "-m", *module, *command],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        result = json.loads(done.stdout) if done.stdout else {}
        return Run(done.returncode, result, done.stderr, tmp_path)

    return run


@pytest.fixture
def tree() -> Callable[[str], Path]:
    """Returns the folder of a Megatron tree by name, or skips the test."""

    def find(name: str) -> Path:
        variable = f"MEGATRON_TREE_{name.upper()}"
        folder = os.environ.get(variable)
        if folder is None:
            pytest.skip(f"set {variable} to the folder of that Megatron tree")
        return Path(folder)

    return find
