"""What the GPU targets would run, without a GPU, a compiler, a cluster or a network."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SBATCH = ROOT / "real" / "cluster" / "gpu-test.sbatch"
HAS_GPU = any(Path("/dev").glob("nvidia[0-9]*"))
FORGOTTEN = (
    "CUDA_HOME",
    "GPUS",
    "MASTER_ADDR",
    "MASTER_PORT",
    "NNODES",
    "NODE_RANK",
    "SYSTEM_PACKAGES",
    "WHEELHOUSE",
)


def run(
    *command: str | Path, path: str | None = None, cwd: Path = ROOT, **env: str
) -> subprocess.CompletedProcess[str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in FORGOTTEN and not name.startswith(("SLURM_", "MAKE"))
    }
    kept["PATH"] = path or os.environ["PATH"]
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**kept, **env},
        capture_output=True,
        text=True,
        check=False,
    )


def add_script(folder: Path, name: str, body: str) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(0o755)


@pytest.mark.parametrize("script", [".ci/gpu-test", ".ci/wheelhouse", SBATCH])
def test_scripts_are_bash(script: str | Path) -> None:
    """A typing error in one would only show on a cluster."""
    assert run("bash", "-n", script).returncode == 0


@pytest.mark.skipif(HAS_GPU, reason="there is a GPU")
def test_gpu_test_without_a_gpu_is_one_line() -> None:
    """It says so before it sets anything up."""
    done = run("make", "-s", "gpu-test")
    said = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    expected = "gpu-test: expected at least one CUDA GPU on this machine, found none."
    assert (done.returncode, done.stdout, said) == (2, "", [expected])


def commands_of(output: str) -> list[str]:
    return [line.removeprefix("+ ") for line in output.splitlines() if line.startswith("+ ")]


def test_one_machine_runs_tests_and_all_commands_on_its_gpus() -> None:
    """No address is needed where there is one machine."""
    done = run(".ci/gpu-test", "-x", DRY_RUN="1", GPUS="4")
    first, *launched = commands_of(done.stdout)
    assert first == ".venv/bin/python -m pytest -m gpu -n 3 -x"
    torchrun = ".venv/bin/python -m torch.distributed.run --standalone --nproc-per-node=4 -m real "
    assert [line.removeprefix(torchrun).split()[0] for line in launched if torchrun in line] == [
        "parity",
        "parity",
        "trace",
        "bench",
    ]
    assert ".venv/bin/python -m sim check runs/gpu-test/real" in launched


def test_one_gpu_stands_for_one_rank() -> None:
    """It cannot train a model of two ranks, and needs no torchrun."""
    done = run(".ci/gpu-test", "-x", DRY_RUN="1", GPUS="1")
    assert done.returncode == 0
    first, *others = commands_of(done.stdout)
    assert first == ".venv/bin/python -m pytest -m gpu -k loopback -x"
    assert [line.split()[2:4] for line in others] == [
        ["real", "trace"],
        ["sim", "check"],
        ["real", "bench"],
    ]
    alone = "--peers loopback --world-size 2 --rank 0"
    assert [alone in line for line in others] == [True, False, True]


def test_each_run_over_machines_has_a_rendezvous_of_its_own() -> None:
    """A quick machine would join the run that a slow one is still ending."""
    done = run(".ci/gpu-test", DRY_RUN="1", GPUS="8", NNODES="2", MASTER_ADDR="a", NODE_RANK="1")
    places = [
        word
        for line in commands_of(done.stdout)
        for word in line.split()
        if word.startswith(("--rdzv-endpoint", "--rdzv-id"))
    ]
    assert len(places) == len(set(places)) == 8
    assert "pytest" not in done.stdout  # the first machine alone runs what stays on one machine
    assert "--rdzv-conf=is_host=0" in done.stdout


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"NNODES": "2"}, "expected MASTER_ADDR, the name of one machine, with NNODES=2; got none"),
        ({"NNODES": "two"}, "expected NNODES of 1 or more, got 'two'"),
        ({"GPUS": "0"}, "expected GPUS of 1 or more, got '0'"),
    ],
)
def test_gpu_test_refuses_what_it_cannot_run(env: dict[str, str], message: str) -> None:
    """Before anything starts."""
    done = run(".ci/gpu-test", DRY_RUN="1", **env)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"gpu-test: {message}.\n"


def test_the_batch_script_starts_torchrun_from_slurm_s_variables(tmp_path: Path) -> None:
    """The two tasks differ in their number only, and meet at the first machine."""
    stubs = tmp_path / "bin"
    add_script(stubs, "scontrol", 'echo "node07"; echo "node08"')
    add_script(stubs, "make", f'echo "make $1"; [[ $1 == setup ]] || DRY_RUN=1 {ROOT}/.ci/gpu-test')
    add_script(
        stubs,
        "srun",
        'echo "srun $*"; while [[ $1 == --* ]]; do shift; done\n'
        'for SLURM_NODEID in 0 1; do export SLURM_NODEID; "$@"; done',
    )
    done = run(
        "bash",
        SBATCH,
        path=f"{stubs}:{os.environ['PATH']}",
        SLURM_SUBMIT_DIR=str(ROOT),
        SLURM_JOB_ID="123",
        SLURM_JOB_NUM_NODES="2",
        SLURM_JOB_NODELIST="node[07-08]",
        SLURM_GPUS_ON_NODE="8",
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "make setup"
    assert "--ntasks=2 --ntasks-per-node=1 --kill-on-bad-exit=1 make gpu-test" in lines[1]
    parity = [line for line in lines if line.endswith("real parity --num-microbatches 4")]
    assert parity == [
        "+ .venv/bin/python -m torch.distributed.run --nnodes=2 --rdzv-backend=c10d "
        f"--rdzv-endpoint=node07:20123 --rdzv-id=123-0 --rdzv-conf=is_host={is_host} "
        "--nproc-per-node=8 -m real parity --num-microbatches 4"
        for is_host in (1, 0)
    ]


def test_wheelhouse_builds_transformer_engine_against_the_torch_of_the_checkout(
    tmp_path: Path,
) -> None:
    """With the headers of the toolkit and of the wheels that torch brought."""
    add_script(tmp_path / "cuda" / "bin", "nvcc", "")
    house = tmp_path / "house"
    done = run(
        ".ci/wheelhouse", DRY_RUN="1", CUDA_HOME=str(tmp_path / "cuda"), WHEELHOUSE=str(house)
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert f"CPATH={tmp_path}/cuda/include" in done.stdout
    _, build, download, _ = commands_of(done.stdout)
    assert build.endswith(
        f"wheel --no-deps --no-build-isolation -w {house} transformer-engine-torch>=2.17.1,<2.18"
    )
    assert f"download -d {house} --find-links {house} torch==" in download
    assert ".[dev,gpu]" in download


def test_wheelhouse_on_system_packages_takes_only_what_is_missing(tmp_path: Path) -> None:
    """A container has a torch of its own, and a built wheel is not built again."""
    house = tmp_path / "house"
    house.mkdir()
    (house / "transformer_engine_torch-2.17.1-cp312-cp312-linux_x86_64.whl").touch()
    done = run(".ci/wheelhouse", DRY_RUN="1", SYSTEM_PACKAGES="1", WHEELHOUSE=str(house))
    assert (done.returncode, done.stderr) == (0, "")
    report, download = commands_of(done.stdout)
    assert f"Taking {house}/transformer_engine_torch-2.17.1" in done.stdout
    interpreter = shutil.which((ROOT / ".venv" / ".built-with").read_text().strip())
    assert interpreter is not None
    assert f"--python {interpreter} install --dry-run --find-links {house}" in report
    assert f"download --no-deps -d {house}" in download


def test_system_packages_are_seen_in_the_environment(tmp_path: Path) -> None:
    """Those of the very interpreter that is named, be it one of a virtual environment."""
    for name in ("Makefile", "pyproject.toml"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    with_packages = run("make", "-n", "setup", SYSTEM_PACKAGES="1", cwd=tmp_path).stdout
    assert "site.getsitepackages()" in with_packages
    assert "/system-packages.pth" in with_packages
    assert "system-packages" not in run("make", "-n", "setup", cwd=tmp_path).stdout


def test_wheelhouse_without_a_compiler_is_one_line(tmp_path: Path) -> None:
    """The build would fail after many minutes and pages of output."""
    for tool in ("bash", "dirname"):
        (tmp_path / tool).symlink_to(f"/usr/bin/{tool}")
    done = run(".ci/wheelhouse", path=str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "wheelhouse: expected CUDA_HOME or nvcc on PATH, to build transformer-engine-torch; "
        "found neither.\n"
    )
    done = run(".ci/wheelhouse", CUDA_HOME=str(tmp_path))
    assert done.returncode == 2
    assert f"expected bin/nvcc in CUDA_HOME, {tmp_path} has none." in done.stderr


def test_set_up_from_a_wheelhouse_asks_no_network(tmp_path: Path) -> None:
    """Neither for the packages nor for what builds the project."""
    for name in ("Makefile", "pyproject.toml"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    done = run("make", "-n", "setup", "WHEELHOUSE=house", cwd=tmp_path)
    installs = done.stdout.split("pip install")[1:]
    assert all("--no-index --find-links house" in part for part in installs)
    assert "'setuptools>=77' wheel" in installs[0]
    assert "--no-build-isolation -e '.[dev,gpu]'" in installs[1]
    assert "--find-links" not in run("make", "-n", "setup", cwd=tmp_path).stdout
