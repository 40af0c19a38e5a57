"""A Megatron tree of the user's is the one that runs, or is refused in one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from real.config import ScenarioError
from sim.session.megatron import megatron_on_fake_cuda

ROOT = Path(__file__).parents[2]
BRING_UP = """
import sys, warnings
from pathlib import Path
warnings.simplefilter("ignore")
from real.config import ScenarioError
from sim.session.megatron import megatron_on_fake_cuda
{before}
try:
    with megatron_on_fake_cuda(Path({tree!r})):
        print(sys.modules["megatron.core"].__file__)
except ScenarioError as error:
    print(error)
assert {tree!r} not in sys.path
"""


def bring_up(tree: Path, before: str = "") -> str:
    """Brings a tree up in a fresh interpreter; returns where it came from, or the refusal."""
    done = subprocess.run(
        [sys.executable, "-c", BRING_UP.format(tree=str(tree), before=before)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def make_tree(folder: Path) -> Path:
    """Makes a tree whose `megatron.core` is empty."""
    (folder / "megatron" / "core").mkdir(parents=True)
    (folder / "megatron" / "core" / "__init__.py").touch()
    return folder


def installed() -> Path:
    """Returns the folder of the installed `megatron`, without importing it."""
    found = next(Path(entry) / "megatron" for entry in sys.path if "site-packages" in entry)
    assert (found / "core").is_dir()
    return found


def test_a_folder_without_megatron_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(ScenarioError, match=r"Expected a Megatron tree with megatron/core, got /"),
        megatron_on_fake_cuda(tmp_path),
    ):
        pass


def test_a_tree_is_refused_when_another_is_already_imported(tmp_path: Path) -> None:
    tree, other = make_tree(tmp_path / "tree"), make_tree(tmp_path / "other")
    before = f"sys.path.insert(0, {str(other)!r}); import megatron.core; sys.path.pop(0)"
    expected, found = (folder / "megatron" / "core" for folder in (tree, other))
    assert bring_up(tree, before) == (
        f"Expected megatron.core of {expected}, got {found}, already imported."
    )


def test_a_tree_that_something_else_comes_before_is_refused(tmp_path: Path) -> None:
    """An editable install may answer imports before the path is asked."""
    tree, editable = (make_tree(tmp_path / name) for name in ("tree", "editable"))
    before = f"""
import types
found = types.ModuleType("megatron")
found.__path__ = [{str(editable / "megatron")!r}]
sys.modules["megatron"] = found
"""
    expected, found = (folder / "megatron" / "core" for folder in (tree, editable))
    assert bring_up(tree, before) == (
        f"Expected megatron.core of {expected}, got {found}, found first."
    )


@pytest.mark.slow
def test_a_tree_comes_before_the_installed_one(tmp_path: Path) -> None:
    """Links stand for a checkout: the same files under another name."""
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    for path in (installed() / "core").iterdir():
        (core / path.name).symlink_to(path)
    assert bring_up(tmp_path) == f"{core}/__init__.py"
