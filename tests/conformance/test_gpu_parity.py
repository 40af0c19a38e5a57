"""The hooks that the laptop checked, on GPUs: twenty steps against the reference."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

RUNS = {
    "delayed wgrad": [],
    "no delayed wgrad": ["--no-delay-wgrad-compute"],
    "clipping": ["--clip-grad", "0.2"],
    "plain reference": ["--reference", "ddp"],
    "three layers, prefetch both": ["--num-layers", "3", "--prefetch", "both"],
    "plain schedule, our hooks": ["--schedule", "plain", "--fine-grained-hooks"],
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", RUNS)
def test_twenty_steps_agree_with_the_reference_on_two_gpus(name: str, tmp_path: Path) -> None:
    """Equal first losses, gradients and weights on NCCL are what the simulation promises."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "real",
        "parity",
        "--num-microbatches=4",
        "--json",
        f"--report={tmp_path}",
        *RUNS[name],
    ]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    result = json.loads(run.stdout.strip().splitlines()[-1])
    assert result["passed"]
    assert result["losses"][0] == result["reference_losses"][0]
    assert len(result["losses"]) == 20
