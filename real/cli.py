"""The commands of the product: `torchrun --nproc-per-node N -m real parity|bench`."""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from real.config import Scenario, ScenarioError, load_scenario
from real.flags import BAD_INPUT, OneLineParser, add_scenario_flags, scenario_overrides
from real.result import as_json, format_table

DIFFERS: Final = 1
CONFIGS: Final = Path(__file__).parent.parent / "fixtures" / "configs"


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands."""
    parser = OneLineParser(
        prog="torchrun -m real", description="MFSDP v2 under combined 1F1B on GPUs, one a process."
    )
    commands = parser.add_subparsers(dest="command", required=True, parser_class=OneLineParser)
    parity = commands.add_parser(
        "parity",
        help="train a scenario and its reference and compare them",
        description="Exit status: 0 all agrees, 1 it does not, 2 bad input or machine.",
    )
    parity.add_argument("scenario", nargs="?", type=Path, default=CONFIGS / "parity.toml")
    bench = commands.add_parser("bench", help="time variants of a scenario by turns")
    bench.add_argument("scenario", nargs="?", type=Path, default=CONFIGS / "bench-b.toml")
    bench.add_argument(
        "--variants",
        default="no_fsdp_plain,no_fsdp_combined,mfsdp_plain,mfsdp_combined",
        help="comma-separated, of the default ones and prefetch_none, prefetch_forward, "
        "prefetch_both, mfsdp_combined_dw",
    )
    bench.add_argument("--repeats", type=int, default=5, metavar="N")
    for command in (parity, bench):
        add_scenario_flags(command)
        command.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


_VARIANTS: Final[dict[str, dict[str, object]]] = {
    "no_fsdp_plain": {"overlap_moe_expert_parallel_comm": False, "delay_wgrad_compute": False},
    "no_fsdp_combined": {"delay_wgrad_compute": False},
    "mfsdp_plain": {"overlap_moe_expert_parallel_comm": False, "delay_wgrad_compute": False},
    "mfsdp_plain_fine": {
        "overlap_moe_expert_parallel_comm": False,
        "delay_wgrad_compute": False,
        "fine_grained_hooks": True,
    },
    "mfsdp_combined": {"delay_wgrad_compute": False},
    "mfsdp_combined_dw": {"delay_wgrad_compute": True},
    "prefetch_none": {"prefetch": "none"},
    "prefetch_forward": {"prefetch": "forward"},
    "prefetch_both": {"prefetch": "both"},
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command on this rank and returns its exit status."""
    arguments = make_parser().parse_args(argv)
    is_first = os.environ.get("RANK", "0") == "0"
    try:
        from real.gpu.world import Unready, scenario_of_launch

        scenario = scenario_of_launch(
            load_scenario(arguments.scenario).changed(**scenario_overrides(arguments))
        )
    except ScenarioError as error:
        return _fail(str(error), is_first)
    warnings.simplefilter("ignore")
    try:
        if arguments.command == "bench":
            return _bench(arguments, scenario, is_first)
        return _parity(arguments, scenario)
    except Unready as error:
        return _fail(str(error), is_first)


def _fail(message: str, is_first: bool) -> int:
    if is_first:
        print(f"real: {message}", file=sys.stderr)
    return BAD_INPUT


def _parity(arguments: argparse.Namespace, scenario: Scenario) -> int:
    from real.gpu.parity import run_parity

    result = run_parity(scenario)
    if result is None:
        return 0
    print(json.dumps(as_json(result)) if arguments.json else format_table(scenario, result))
    return DIFFERS if result.problems() else 0


def _bench(arguments: argparse.Namespace, scenario: Scenario, is_first: bool) -> int:
    from real.gpu.bench import run_bench

    names = arguments.variants.split(",")
    unknown = [name for name in names if name not in _VARIANTS]
    if unknown:
        return _fail(f"Expected variants among {', '.join(_VARIANTS)}; got {unknown}.", is_first)
    results = run_bench(
        {name: scenario.changed(**_VARIANTS[name]) for name in names}, repeats=arguments.repeats
    )
    if is_first:
        if arguments.json:
            print(json.dumps(results))
        else:
            for name, values in results.items():
                peak = values["peak_bytes_above_rest"] / 2**30
                print(f"{name:>20}  {values['step_ms']:>9.2f} ms  {peak:>7.2f} GiB above rest")
    return 0
