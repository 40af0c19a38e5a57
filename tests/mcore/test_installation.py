"""Our hooks in place of MFSDP's own, and back."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pytest_mock import MockerFixture

from real.config import Scenario

SMALL = Scenario(num_layers=2, num_microbatches=2, world_size=2, train_iters=1)
OWN_HOOKS = SMALL.changed(overlap_moe_expert_parallel_comm=False)

_ALONE = "TEST_IS_ALONE"

RunRanks = Callable[..., list[Any]]
HooksOn = Callable[[torch.nn.Module], dict[str, list[Any]]]
Records = list[dict[str, Any]]


def is_own(hook: object) -> bool:
    """Tells MFSDP's own execution hooks from others."""
    return getattr(hook, "__qualname__", "").startswith("FsdpModule.")


def test_detached_hooks_are_put_back_where_they_were(
    run_ranks: RunRanks, hooks_on: HooksOn
) -> None:
    """Same hooks, same keys, same order, among those that others registered before and after."""

    def body(rank: int, records: Records) -> object:
        from real.mcore import internals
        from real.mcore.jobs import FsdpJob

        root = FsdpJob(OWN_HOOKS).model.module
        layer = root.decoder.layers[0]
        layer.register_forward_pre_hook(lambda *_: None)
        layer.register_forward_hook(lambda *_: None)
        before = hooks_on(root)
        attach = internals.detach_execution_hooks(root)
        without = hooks_on(root)
        attach()
        attach()
        return before, without, hooks_on(root)

    before, without, after = run_ranks(OWN_HOOKS, body)[0]
    assert sum(is_own(hook) for hooks in before.values() for _, hook in hooks) > 20
    assert without == {
        place: others
        for place, hooks in before.items()
        if (others := [(key, hook) for key, hook in hooks if not is_own(hook)])
    }
    assert after == before


def test_install_takes_every_hook_of_mfsdp_off_and_remove_puts_them_back(
    run_ranks: RunRanks, hooks_on: HooksOn
) -> None:
    """Both sets at once would reduce every gradient twice."""

    def body(rank: int, records: Records) -> object:
        from real.mcore.jobs import FsdpJob

        model = FsdpJob(OWN_HOOKS).model
        before = hooks_on(model.module)
        model.config.overlap_moe_expert_parallel_comm = True
        model.install()
        installed = hooks_on(model.module)
        model.install()
        again = hooks_on(model.module)
        model.remove()
        model.remove()
        return before, installed, again, hooks_on(model.module)

    before, installed, again, after = run_ranks(OWN_HOOKS, body)[0]
    assert not any(is_own(hook) for hooks in installed.values() for _, hook in hooks)
    assert again == installed
    assert after == before


def counted_from(start: int, record: dict[str, Any]) -> dict[str, Any]:
    """Returns a record with the numbers of records counted from another start."""
    moved = {**record, "seq": record["seq"] - start}
    if record.get("record") is not None:
        moved["record"] -= start
    if record["op"] == "host_sync" and record["what"] == "event":
        moved["on"] -= start
    return moved


def a_step(scenario: Scenario, change: Callable[[Any], None]) -> Callable[[int, Records], Any]:
    """Returns what one step records after `change` of the model, numbered from its start."""

    def body(rank: int, records: Records) -> object:
        from real.mcore.jobs import FsdpJob
        from real.trace import active_recorder

        job = FsdpJob(scenario)
        change(job.model)
        start = len(records)
        active_recorder().begin_step(0)
        loss = job.forward_backward(0)
        return loss, [counted_from(start, record) for record in records[start:]]

    return body


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.install(),
        lambda model: (model.remove(), model.install()),
    ],
    ids=["twice", "again"],
)
def test_installing_anew_changes_no_record_of_a_step(
    run_ranks: RunRanks, change: Callable[[Any], None]
) -> None:
    """Not the order of anything, and not the loss."""
    once = run_ranks(SMALL, a_step(SMALL, lambda model: None))
    assert len(once[0][1]) > 100
    assert run_ranks(SMALL, a_step(SMALL, change)) == once


def test_a_second_wrapper_of_a_model_uses_the_hooks_that_are_there(
    run_ranks: RunRanks, hooks_on: HooksOn
) -> None:
    """Megatron wraps a chunk anew after loading; two sets would count gradients twice."""

    def body(rank: int, records: Records) -> object:
        from real.mcore.jobs import FsdpJob
        from real.mcore.schedule import Mfsdp1F1B

        first = FsdpJob(SMALL).model
        before = hooks_on(first.module)
        second = Mfsdp1F1B(first.config, first.module)
        return first.scheduler is second.scheduler, before, hooks_on(first.module)

    is_same, before, after = run_ranks(SMALL, body)[0]
    assert is_same
    assert after == before


@pytest.fixture
def _nobody_joined(mocker: MockerFixture) -> None:
    """Models of earlier tests, which nobody removed, have not joined the schedule."""
    from megatron.core.pipeline_parallel import combined_1f1b

    from real.mcore.internals import schedule

    mocker.patch.dict(schedule._joined, clear=True)
    mocker.patch.object(combined_1f1b, "find_megatron_fsdp", schedule._released_finder)


@pytest.mark.usefixtures("_nobody_joined")
def test_the_schedule_finds_adapters_as_long_as_one_is_joined() -> None:
    """Models come and go; the released finder returns with the last one."""
    from megatron.core.pipeline_parallel import combined_1f1b

    from real.mcore import internals

    class Adapter:
        pass

    released = combined_1f1b.find_megatron_fsdp
    adapter = Adapter()
    wrapper = torch.nn.Module()
    wrapper.__dict__["module"] = adapter
    first = internals.join_schedule(Adapter)
    second = internals.join_schedule(Adapter)
    found = [combined_1f1b.find_megatron_fsdp(model) for model in (adapter, wrapper)]
    first()
    first()  # counts once
    found.append(combined_1f1b.find_megatron_fsdp(adapter))
    second()
    assert found == [adapter] * 3
    assert combined_1f1b.find_megatron_fsdp is released


@pytest.mark.usefixtures("_nobody_joined")
def test_adapters_of_two_types_are_both_found() -> None:
    """Whoever joins first does not keep the others out."""
    from megatron.core.pipeline_parallel import combined_1f1b

    from real.mcore import internals

    class First:
        pass

    class Second:
        pass

    undo = [internals.join_schedule(adapter_type) for adapter_type in (First, Second)]
    adapters = [First(), Second()]
    found = [combined_1f1b.find_megatron_fsdp(adapter) for adapter in adapters]
    undo[0]()
    found.append(combined_1f1b.find_megatron_fsdp(adapters[1]))
    undo[1]()
    assert found == [*adapters, adapters[1]]


@pytest.mark.usefixtures("_nobody_joined")
def test_a_joined_schedule_still_finds_the_released_wrapper() -> None:
    """Another model of the process may be under the first version of MFSDP."""
    from megatron.core.pipeline_parallel import combined_1f1b

    from real.mcore import internals

    class Adapter:
        pass

    plain = torch.nn.Linear(1, 1)
    expected = combined_1f1b.find_megatron_fsdp(plain)
    leave = internals.join_schedule(Adapter)
    try:
        assert combined_1f1b.find_megatron_fsdp(plain) is expected
    finally:
        leave()


def test_remembered_layouts_are_equal_to_built_ones(mocker: MockerFixture) -> None:
    """A layout is a value of shapes and ranks."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp.experimental.layout import GlobalLayout

    from real.mcore import internals

    shapes = [torch.Size([5, 3]), torch.Size([7]), torch.Size([2, 2])]
    from real.mcore.internals import layouts

    # Models of earlier tests, which nobody removed, remember as well.
    mocker.patch.object(layouts, "_num_memoizing", 0)
    mocker.patch.object(GlobalLayout, "build", layouts._released_build)
    released = GlobalLayout.__dict__["build"]
    built = [GlobalLayout.build(shapes, dp_size=size) for size in (2, 4)]
    undo = internals.memoize_layouts()
    also_undo = internals.memoize_layouts()
    remembered = [GlobalLayout.build(shapes, dp_size=size) for size in (2, 4)]
    assert GlobalLayout.build(tuple(shapes), dp_size=2) is remembered[0]
    undo()
    undo()
    assert GlobalLayout.build(shapes, dp_size=2) is remembered[0]
    also_undo()
    assert remembered == built
    assert GlobalLayout.__dict__["build"] is released


def test_what_installation_makes_goes_with_its_last_reference(run_ranks: RunRanks) -> None:
    """Hooks, scheduler and units are in no reference cycle, whatever the model is in."""

    def body(rank: int, records: Records) -> object:
        from real.mcore.jobs import FsdpJob

        job = FsdpJob(SMALL)
        job.forward_backward(0)
        handle = job.model.install()
        ours = {
            "handle": weakref.ref(handle),
            "scheduler": weakref.ref(handle.scheduler),
            "unit": weakref.ref(handle.scheduler.units["decoder.layers.0"]),
        }
        del handle
        gc.collect()
        gc.disable()
        try:
            job.model.remove()
            return [name for name, reference in ours.items() if reference() is not None]
        finally:
            gc.enable()

    assert run_ranks(SMALL, body) == [[]] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"transformer_impl": "transformer_engine", "delay_wgrad_compute": True},
        {"overlap_moe_expert_parallel_comm": False, "fine_grained_hooks": True},
    ],
    ids=["combined", "delayed", "plain"],
)
def test_a_dropped_model_goes_at_once_with_its_hooks_on(
    run_ranks: RunRanks, keys: dict[str, object], request: pytest.FixtureRequest
) -> None:
    """Its storage must not wait for the garbage collector, nor for a call of remove().

    Asked in a process of its own, where no other test has left anything.

    MFSDP v2 alone refers from parameter to group to module and back; its hooks on parameters even
    hide that from the collector.
    """
    if _ALONE not in os.environ:
        again = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider"]
        done = subprocess.run(
            [*again, request.node.nodeid],
            cwd=request.config.rootpath,
            env={**os.environ, _ALONE: "1"},
            capture_output=True,
            text=True,
        )
        assert (done.returncode, "1 passed" in done.stdout) == (0, True), done.stdout
        return
    scenario = SMALL.changed(**keys)

    def body(rank: int, records: Records) -> object:
        from real.mcore.jobs import FsdpJob

        job = FsdpJob(scenario)
        job.forward_backward(0)
        job.optimizer_step()
        gone = {
            "wrapper": weakref.ref(job.model),
            "root": weakref.ref(job.model.module),
            "layer": weakref.ref(job.model.module.decoder.layers[0]),
            "scheduler": weakref.ref(job.model.scheduler),
        }
        gc.collect()
        gc.disable()
        try:
            del job
            return [name for name, reference in gone.items() if reference() is not None]
        finally:
            gc.enable()

    assert run_ranks(scenario, body) == [[]] * 2


@pytest.mark.slow
def test_a_model_trains_under_mfsdps_own_hooks_after_removal(run_ranks: RunRanks) -> None:
    """And under ours again: the gradients of experts are divided once each time."""
    plain_hooks = OWN_HOOKS.changed(fine_grained_hooks=True)

    def body(rank: int, records: Records) -> object:
        from real.mcore.jobs import FsdpJob

        def gradients_of_a_step(job: FsdpJob) -> dict[str, torch.Tensor]:
            job.forward_backward(0)
            gradients = job.gradients()
            job._optimizer.zero_grad()
            return gradients

        expected = gradients_of_a_step(FsdpJob(plain_hooks))
        job = FsdpJob(OWN_HOOKS)
        seen = {"own": gradients_of_a_step(job)}
        job.model.install()
        seen["installed"] = gradients_of_a_step(job)
        job.model.remove()
        job.model.remove()
        seen["removed"] = gradients_of_a_step(job)
        job.model.install()
        seen["again"] = gradients_of_a_step(job)
        for stage, gradients in seen.items():
            for name, gradient in gradients.items():
                torch.testing.assert_close(
                    gradient, expected[name], rtol=1e-2, atol=1e-4, msg=f"{stage}: {name}"
                )
        return list(seen)

    assert run_ranks(OWN_HOOKS, body) == [["own", "installed", "removed", "again"]] * 2
