"""`python -m real preflight`: names everything that this machine lacks, before anything starts."""

from __future__ import annotations

import argparse
import json
from typing import Any

from real.commands.common import fail


def add(commands: Any) -> None:
    """Adds the command's parser."""
    preflight = commands.add_parser(
        "preflight",
        help="name everything that this machine lacks for a GPU job (no torchrun needed)",
        description="Exit status: 0 nothing is missing, 2 something is, in one line.",
    )
    preflight.add_argument("--gpus", type=int, metavar="N", help="GPUs to use (default: all here)")
    preflight.add_argument("--nodes", type=int, default=1, metavar="N", help="machines of the job")
    preflight.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Looks at this machine; prints the number of GPUs that a job would use here."""
    import torch

    from real.gpu.preflight import missing_gpus, missing_packages

    num_gpus = arguments.gpus if arguments.gpus is not None else torch.cuda.device_count()
    missing = missing_gpus(max(1, num_gpus))
    num_ranks = num_gpus * arguments.nodes
    # One GPU alone stands for one rank of a job (`--peers loopback`).
    if not missing and num_ranks % 2 and num_ranks > 1:
        missing.append(f"expected an even number of GPUs in all (EP2), got {num_ranks}")
    missing += missing_packages(has_te=True, imports_te=not missing)
    if arguments.json:
        print(json.dumps({"gpus": num_gpus, "missing": missing}))
    elif not missing:
        print(num_gpus)
    return fail("; ".join(missing) + ".") if missing else 0
