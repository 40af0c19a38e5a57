"""`torchrun -m real bench`: times variants of a scenario by turns."""

from __future__ import annotations

import argparse
import json
from typing import Any, Final

from real.commands.common import add_scenario, fail, is_first_rank, scenario_of

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


def add(commands: Any) -> None:
    """Adds the command's parser."""
    bench = commands.add_parser("bench", help="time variants of a scenario by turns")
    add_scenario(bench, "bench-b.toml")
    bench.add_argument(
        "--variants",
        default="no_fsdp_plain,no_fsdp_combined,mfsdp_plain,mfsdp_combined",
        help="comma-separated, of the default ones and prefetch_none, prefetch_forward, "
        "prefetch_both, mfsdp_combined_dw",
    )
    bench.add_argument("--repeats", type=int, default=5, metavar="N")


def run(arguments: argparse.Namespace) -> int:
    """Times the variants; the first rank prints the medians."""
    scenario = scenario_of(arguments)
    from real.gpu.bench import run_bench

    names = arguments.variants.split(",")
    unknown = [name for name in names if name not in _VARIANTS]
    if unknown:
        return fail(f"Expected variants among {', '.join(_VARIANTS)}; got {unknown}.")
    results = run_bench(
        {name: scenario.changed(**_VARIANTS[name]) for name in names}, repeats=arguments.repeats
    )
    if is_first_rank():
        if arguments.json:
            print(json.dumps(results))
        else:
            for name, values in results.items():
                peak = values["peak_bytes_above_rest"] / 2**30
                print(f"{name:>20}  {values['step_ms']:>9.2f} ms  {peak:>7.2f} GiB above rest")
    return 0
