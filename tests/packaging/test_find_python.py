"""`.ci/find-python` finds an interpreter that runs, or says what each candidate answered."""

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "find-python"


@dataclass(frozen=True, kw_only=True)
class FakeMachine:
    """A checkout, a PATH folder and a home folder with only the interpreters a test adds."""

    checkout: Path
    path_folder: Path
    home: Path

    def find_python(self, **environment: str) -> subprocess.CompletedProcess[str]:
        """Runs the script with no other environment than the machine's own and `environment`."""
        bash = shutil.which("bash")
        assert bash is not None, "Expected bash on PATH, got none."
        return subprocess.run(
            [bash, str(self.checkout / ".ci" / "find-python")],
            env={"PATH": str(self.path_folder), "HOME": str(self.home), **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )

    def add_to_path(self, names: Mapping[str, str]) -> None:
        """Puts interpreters on PATH, by name, each answering its version."""
        for name, version in names.items():
            add_interpreter(self.path_folder / name, version)


def add_interpreter(file: Path, version: str) -> Path:
    """Writes an interpreter that answers every question with its version."""
    return add_script(file, f"echo {version}")


def add_script(file: Path, body: str) -> Path:
    """Writes an executable shell script."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/sh\n{body}\n")
    file.chmod(0o755)
    return file


@pytest.fixture
def machine(tmp_path: Path) -> FakeMachine:
    """A machine without any Python."""
    machine = FakeMachine(
        checkout=tmp_path / "check out", path_folder=tmp_path / "bin", home=tmp_path / "home"
    )
    for folder in (machine.checkout / ".ci", machine.path_folder, machine.home):
        folder.mkdir(parents=True)
    shutil.copy(SCRIPT, machine.checkout / ".ci")
    sort = shutil.which("sort")
    assert sort is not None, "Expected sort on PATH, got none."
    (machine.path_folder / "sort").symlink_to(sort)
    return machine


def test_script_is_executable() -> None:
    """The Makefile runs it by path."""
    assert os.access(SCRIPT, os.X_OK)


def test_newest_name_on_path_wins(machine: FakeMachine) -> None:
    """A name with a version says more than `python3`."""
    machine.add_to_path({"python3": "3.12.9", "python3.12": "3.12.9", "python3.13": "3.13.1"})

    found = machine.find_python()

    assert (found.returncode, found.stdout, found.stderr) == (0, "python3.13\n", "")


def test_override_wins_over_path(machine: FakeMachine, tmp_path: Path) -> None:
    """Whoever names an interpreter gets that one."""
    machine.add_to_path({"python3.12": "3.12.9"})
    chosen = add_interpreter(tmp_path / "my python" / "python", "3.12.1")

    found = machine.find_python(PYTHON=str(chosen))

    assert (found.returncode, found.stdout) == (0, f"{chosen}\n")


def test_unusable_override_is_an_error_although_path_has_a_python(machine: FakeMachine) -> None:
    """Quietly taking another interpreter than the one named would hide a typing error."""
    machine.add_to_path({"python3.12": "3.12.9"})

    found = machine.find_python(PYTHON="/nowhere/python")

    assert (found.returncode, found.stdout) == (2, "")
    assert "/nowhere/python: not found" in found.stderr


def test_shim_that_fails_is_skipped(machine: FakeMachine) -> None:
    """A version manager's shim exists on PATH for versions that are not selected."""
    add_script(machine.path_folder / "python3.12", "echo 'python3.12: not selected' >&2; exit 127")
    machine.add_to_path({"python3": "3.12.9"})

    found = machine.find_python()

    assert (found.returncode, found.stdout) == (0, "python3\n")


def test_interpreter_without_ensurepip_is_skipped(machine: FakeMachine) -> None:
    """Some systems ship Python without the modules that make virtual environments."""
    add_script(
        machine.path_folder / "python3.12",
        'case "$2" in *ensurepip*) exit 1 ;; *) echo 3.12.3 ;; esac',
    )

    found = machine.find_python()

    assert found.returncode == 2
    assert "is version 3.12.3, but has no venv and ensurepip modules" in found.stderr


def test_activated_venv_of_the_checkout_is_skipped(machine: FakeMachine) -> None:
    """Building .venv anew begins with removing it, and the interpreter inside with it."""
    inside = machine.checkout / ".venv" / "bin"
    add_interpreter(inside / "python3.12", "3.12.9")
    machine.add_to_path({"python3": "3.12.9"})

    found = machine.find_python(PATH=f"{inside}:{machine.path_folder}")

    assert (found.returncode, found.stdout) == (0, "python3\n")


@pytest.mark.parametrize("root_is_named", [True, False])
def test_pyenv_folder_is_used_when_path_has_none(
    machine: FakeMachine, tmp_path: Path, root_is_named: bool
) -> None:
    """An interpreter that pyenv installed but did not select is still there."""
    root = tmp_path / "pyenv root" if root_is_named else machine.home / ".pyenv"
    installed = add_interpreter(root / "versions" / "3.12.1" / "bin" / "python", "3.12.1")

    found = machine.find_python(**({"PYENV_ROOT": str(root)} if root_is_named else {}))

    assert (found.returncode, found.stdout) == (0, f"{installed}\n")


def test_pyenv_newest_patch_of_the_best_tested_series_wins(machine: FakeMachine) -> None:
    """Patches are numbers: 10 is newer than 9, and 3.13 does not beat 3.12."""
    versions = machine.home / ".pyenv" / "versions"
    for version in ("3.11.7", "3.12.9", "3.12.10", "3.13.0", "3.13.0t"):
        add_interpreter(versions / version / "bin" / "python", version)

    found = machine.find_python()

    assert found.stdout == f"{versions}/3.12.10/bin/python\n"


def test_path_wins_over_pyenv_folder(machine: FakeMachine) -> None:
    """What is on PATH was put there on purpose."""
    machine.add_to_path({"python3.14": "3.14.0"})
    add_interpreter(machine.home / ".pyenv/versions/3.12.1/bin/python", "3.12.1")

    assert machine.find_python().stdout == "python3.14\n"


def test_nothing_found_names_all_that_was_looked_at(machine: FakeMachine) -> None:
    """The reader can tell a missing Python from a broken one and from an old one."""
    machine.add_to_path({"python3": "3.11.7", "python": "2.7.18"})
    add_script(machine.path_folder / "python3.12", "echo 'python3.12: not selected' >&2; exit 127")

    found = machine.find_python()

    assert (found.returncode, found.stdout) == (2, "")
    head, *answers, advice = found.stderr.splitlines()
    assert head.startswith("Expected a Python of version 3.12 or newer")
    assert answers == [
        "  python3.14: not found",
        "  python3.13: not found",
        f"  {machine.path_folder}/python3.12: does not run: python3.12: not selected",
        f"  {machine.path_folder}/python3: is version 3.11.7",
        f"  {machine.path_folder}/python: is version 2.7.18",
        f"  {machine.home}/.pyenv/versions: no other 3.12 or newer",
    ]
    assert "make PYTHON=" in advice
