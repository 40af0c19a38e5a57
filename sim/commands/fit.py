"""`python -m sim fit`: makes a cost file of the raw measurements of `real calibrate`."""

from __future__ import annotations

import argparse
import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from real.config import Scenario
from sim.commands.common import FIXTURES, fail


def add(commands: Any) -> None:
    """Adds the command's parser."""
    parser = commands.add_parser(
        "fit",
        help="make a cost file of measurements",
        description="Makes a cost file of what `real calibrate` measured. What was not measured "
        "comes from another cost file. Exit status: 0 done, 2 bad input.",
    )
    parser.add_argument("measured", type=Path, help="the JSON file of `real calibrate`")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="a TOML file")
    parser.add_argument(
        "--base",
        type=Path,
        default=FIXTURES / "costs" / "h200.toml",
        metavar="FILE",
        help="the cost file to take the rest from",
    )
    parser.add_argument(
        "--factors",
        default="",
        metavar="NAME=X,...",
        help="factors that `python -m sim accuracy --fit` found: host, sharding, matrix, memory",
    )
    parser.add_argument(
        "--step-error",
        type=float,
        metavar="X",
        help="median error that `python -m sim accuracy` found, for the band of a step time",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Makes the cost file."""
    try:
        measured = json.loads(arguments.measured.read_text())
        base = tomllib.loads(arguments.base.read_text())
        small = measured["small"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return fail(f"Expected measurements and a cost file to start from, got: {error!r}.")
    from sim.timing.costs.costfile import CostError, load_cluster, parse_cluster
    from sim.timing.fit.accuracy import Factors

    try:
        parse_cluster(base, arguments.base)
    except CostError as error:
        return fail(str(error))
    try:
        pairs = [pair.partition("=") for pair in arguments.factors.split(",") if pair]
        factors = Factors(**{name: float(value) for name, _, value in pairs})
    except (TypeError, ValueError):
        return fail(f"Expected --factors such as host=1.1,matrix=0.9, got {arguments.factors!r}.")
    lacking = sorted({"machine", "nodes"} - set(measured))
    if lacking:
        return fail(
            f"{arguments.measured}: expected what `real calibrate` writes, lacks {lacking}."
        )
    from sim.quiet import quiet

    quiet()
    from sim.timing.fit.hostfit import host_costs
    from sim.timing.fit.measured import apply_factors, device_costs, source_of, to_toml
    from sim.timing.fit.reconcile import reconcile
    from sim.timing.fit.small import small_models

    found = small_models(measured, Scenario(**small))
    content = host_costs(measured, found.timed, device_costs(measured, base))
    reconcile(content, parse_cluster(content, arguments.out), found.models)
    apply_factors(content, factors)
    if arguments.step_error is not None:
        content["error"]["step"] = {
            "value": arguments.step_error,
            "source": f"{source_of(measured)}; median error on a measured grid",
        }
    machine = measured["machine"]
    content["description"] = f"{machine['num_devices']} x {machine['device']}, measured"
    arguments.out.write_text(to_toml(content, content["description"]))
    cluster = load_cluster(str(arguments.out))
    if arguments.json:
        print(json.dumps({"out": str(arguments.out), "host": dict(cluster.host)}))
    else:
        print(f"{arguments.out}: {cluster.description}")
    return 0
