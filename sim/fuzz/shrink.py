"""Makes a failing scenario as short as it can be and still fail in the same way."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from real.config import Scenario, ScenarioError
from sim.faults import Fault
from sim.fuzz.seeds import Failure, Setting, make_baseline, run_seed
from sim.session.aside import Aside

_SIZES: Final = ("train_iters", "num_microbatches", "num_layers", "world_size")
"""What is made smaller, in this order."""

_LEAST_ORDERS: Final = 24
"""Device orders of a trial: another scenario has other orders, so one alone says little."""

Fails = Callable[[Setting], bool]


@dataclass(frozen=True, kw_only=True)
class Shrunk:
    """The end of a shrink.

    Attributes:
        setting: The shortest setting that fails.
        failure: How it fails.
        num_trials: Settings that were tried.
    """

    setting: Setting
    failure: Failure
    num_trials: int


def shrink(
    setting: Setting, failure: Failure, progress: Callable[[str], None] = lambda _: None
) -> Shrunk:
    """Shrinks a failure; the result fails in the same way, with the same seed."""
    trials: list[Failure | None] = []
    last = failure

    def fails(candidate: Setting) -> bool:
        nonlocal last
        progress(f"shrinking: trial {len(trials) + 1}, {failure.kind}")
        found = _try(candidate, failure)
        trials.append(found)
        if found is None or found.kind != failure.kind:
            return False
        last = found
        return True

    smallest = minimise(setting, fails)
    return Shrunk(setting=smallest, failure=last, num_trials=len(trials))


def minimise(setting: Setting, fails: Fails) -> Setting:
    """Returns the smallest setting that `fails`, changing one thing at a time until none helps."""
    before = None
    while before != setting:
        before = setting
        for name in _SIZES:
            setting = _smaller(setting, name, fails)
        for fault in setting.faults:
            without = tuple(f for f in setting.faults if f is not fault)
            candidate = dataclasses.replace(setting, faults=without)
            if fails(candidate):
                setting = candidate
    return setting


def _smaller(setting: Setting, name: str, fails: Fails) -> Setting:
    """Returns the setting with the least value of one size that fails."""
    for value in range(1, getattr(setting.scenario, name)):
        scenario = _changed(setting.scenario, name, value)
        if scenario is None or not _fits(setting.faults, scenario):
            continue
        candidate = dataclasses.replace(setting, scenario=scenario)
        if fails(candidate):
            return candidate
    return setting


def _changed(scenario: Scenario, name: str, value: int) -> Scenario | None:
    """Returns the scenario with one size changed, and what depends on it; None when none is."""
    changes: dict[str, object] = {name: value}
    if name == "num_layers":
        if scenario.moe_layer_freq != "1":
            kinds = scenario.moe_layer_freq.split(",")
            changes["moe_layer_freq"] = ",".join(kinds[:value])
        changes["hybrid_layer_pattern"] = scenario.hybrid_layer_pattern[:value]
    try:
        return scenario.changed(**changes)
    except ScenarioError:
        return None


def _fits(faults: tuple[Fault, ...], scenario: Scenario) -> bool:
    return all(fault.rank < scenario.world_size for fault in faults)


def _try(setting: Setting, failure: Failure) -> Failure | None:
    """Runs a setting in a forked copy and returns how it fails, or None."""
    trial = dataclasses.replace(
        setting,
        num_orders=max(setting.num_orders, _LEAST_ORDERS),
        has_reference=setting.has_reference and failure.kind == "reference",
    )
    aside = Aside(lambda: _plain(_judge(trial, failure.seed)))
    try:
        found = aside.result()
    except RuntimeError as error:
        return Failure(seed=failure.seed, kind="process ended", problem=str(error))
    finally:
        aside.stop()
    return None if found is None else Failure(**found)


def _plain(failure: Failure | None) -> dict[str, object] | None:
    return None if failure is None else failure.as_dict()


def _judge(setting: Setting, seed: int | None) -> Failure | None:
    first = make_baseline(setting)
    if isinstance(first, Failure):
        return first
    return None if seed is None else run_seed(setting, first, seed).failure


def scenario_flags(base: Scenario, scenario: Scenario) -> Iterator[str]:
    """Yields the flags that turn one scenario into another."""
    from real.config import flag

    for spec in dataclasses.fields(Scenario):
        value = getattr(scenario, spec.name)
        if value == getattr(base, spec.name):
            continue
        if spec.type == "bool":
            yield f"--{'' if value else 'no-'}{flag(spec.name)}"
        else:
            yield f"--{flag(spec.name)}"
            yield str(value)
