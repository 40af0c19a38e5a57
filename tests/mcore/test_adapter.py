"""What Megatron's schedule, training loop and user code call on the adapter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from real.config import Scenario

SMALL = Scenario(num_layers=2, num_microbatches=2, world_size=2, train_iters=1)

RunRanks = Callable[..., list[Any]]
Records = list[dict[str, Any]]


def full_bytes(model: Any) -> dict[str, int]:  # noqa: ANN401 - the adapter, imported late
    """Returns the bytes of full storage of every unit."""
    from real.mcore import internals

    return {
        name: sum(
            group._unsharded_model_weight.local_buffer.untyped_storage().nbytes()
            for group in unit.module._parameter_groups
        )
        for name, unit in internals.collect_units(model.module).items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", ["none", "both"])
def test_every_unit_is_sharded_and_empty_after_each_step(
    run_ranks: RunRanks, prefetch: str
) -> None:
    """What stays unsharded costs memory and takes the next update on the wrong tensors."""

    def body(rank: int, records: Records) -> object:
        from real.mcore.jobs import FsdpJob

        job = FsdpJob(SMALL.changed(prefetch=prefetch))
        seen = []
        for step in range(2):
            job.forward_backward(step)
            phases = {u.lifecycle.phase.value for u in job.model.scheduler.units.values()}
            events = [u.unit.unshard_event for u in job.model.scheduler.units.values()]
            seen.append((phases, any(events), set(full_bytes(job.model).values())))
            job.optimizer_step()
        return seen

    assert run_ranks(SMALL, body) == [[({"resting"}, False, {0})] * 2] * 2


def test_public_unshard_and_reshard(run_ranks: RunRanks) -> None:
    """A caller outside of the schedule reads full weights between the two calls."""

    def body(rank: int, records: Records) -> object:
        from real.mcore.jobs import FsdpJob

        job = FsdpJob(SMALL)
        model, name = job.model, "decoder.layers.0"
        main = job.weights()
        before = full_bytes(model)
        for _ in range(2):
            model.unshard(name)
        during = full_bytes(model)
        read = {
            parameter: torch.equal(weight.float(), main[parameter].bfloat16().float())
            for parameter, weight in model.scheduler.units[name].unit.trainable_parameters.items()
        }
        for _ in range(2):
            model.reshard(name)
        gathered = [r["gathered"] for r in records if r["op"] == "unshard"]
        return before, during, full_bytes(model), all(read.values()), len(read), gathered

    for before, during, after, is_equal, num_read, gathered in run_ranks(SMALL, body):
        assert set(before.values()) == {0}
        assert [name for name, size in during.items() if size] == ["decoder.layers.0"]
        assert after == before
        assert is_equal
        assert num_read > 3
        assert gathered == [True, False]


def test_public_post_backward_hooks_run_once_for_each_microbatch(run_ranks: RunRanks) -> None:
    """After the reduction was launched, with the unit's module."""

    def body(rank: int, records: Records) -> object:
        from real.mcore.jobs import FsdpJob

        job = FsdpJob(SMALL)
        calls: list[tuple[str, bool]] = []
        for name in ("decoder.layers.1", "decoder.layers.1.mlp.experts"):
            module = job.model.module.get_submodule(name)
            job.model.register_post_backward_hook(
                name, lambda m, name=name, module=module: calls.append((name, m is module))
            )
        removed = job.model.register_post_backward_hook("", lambda _: calls.append(("", False)))
        removed.remove()
        job.forward_backward(0)
        return calls

    of_one_microbatch = [("decoder.layers.1.mlp.experts", True), ("decoder.layers.1", True)]
    assert run_ranks(SMALL, body) == [of_one_microbatch * 2] * 2


def test_no_sync_restores_what_it_found(run_ranks: RunRanks) -> None:
    """Nested, and after an error: the next step would otherwise never reduce its outer axis."""

    def body(rank: int, records: Records) -> object:
        from real.mcore.jobs import FsdpJob

        model = FsdpJob(SMALL).model
        seen: list[bool] = []

        def note() -> None:
            seen.append(model._context.is_last_microbatch)

        note()
        with model.no_sync():
            note()
            with model.no_sync():
                note()
            note()
        note()
        try:
            with model.no_sync():
                raise KeyError
        except KeyError:
            note()
        return seen

    assert run_ranks(SMALL, body) == [[True, False, False, False, True, True]] * 2


def test_no_sync_is_what_megatron_calls(run_ranks: RunRanks) -> None:
    """Only the last reduction of a window is marked last."""

    def body(rank: int, records: Records) -> object:
        from real.mcore.jobs import FsdpJob

        scenario = SMALL.changed(num_microbatches=3)
        FsdpJob(scenario).forward_backward(0)
        return [r["last"] for r in records if r["op"] == "reduce" and r["unit"] == ""]

    assert run_ranks(SMALL, body) == [[False, False, True]] * 2


def test_a_release_of_what_is_no_unit_is_refused(run_ranks: RunRanks) -> None:
    """The schedule would otherwise release nothing, silently."""

    def body(rank: int, records: Records) -> object:
        from real.mcore.jobs import FsdpJob

        model = FsdpJob(SMALL).model
        with pytest.raises(ValueError, match="Expected an FSDP unit to release, got Identity"):
            model.post_forward_release_module(torch.nn.Identity())
        return True

    assert run_ranks(SMALL, body) == [True] * 2


def test_the_scheduler_is_there_only_while_hooks_are(run_ranks: RunRanks) -> None:
    """Without them a public call would gather what nobody releases."""

    def body(rank: int, records: Records) -> object:
        from real.mcore.jobs import FsdpJob

        model = FsdpJob(SMALL).model
        model.remove()
        with pytest.raises(RuntimeError, match=r"Cannot schedule units before install\(\)"):
            model.unshard("decoder.layers.0")
        return True

    assert run_ranks(SMALL, body) == [True] * 2


# -- state ------------------------------------------------------------------------------------


def test_a_loaded_state_gives_the_saved_weights_and_the_saved_loss(run_ranks: RunRanks) -> None:
    """Model weights follow the main weights that were loaded."""

    def body(rank: int, records: Records) -> object:
        from real.mcore.jobs import FsdpJob

        job = FsdpJob(SMALL)
        module = job.model.module
        saved = {
            name: value.clone() if isinstance(value, torch.Tensor) else value
            for name, value in module.state_dict().items()
        }
        before, loss = job.weights(), job.forward_backward(0)
        job.optimizer_step()
        changed = job.weights()
        module.load_state_dict(saved)
        after = job.weights()
        return (
            any(not torch.equal(before[name], changed[name]) for name in before),
            [name for name in before if not torch.equal(before[name], after[name])],
            job.forward_backward(0) == loss,
        )

    assert run_ranks(SMALL, body) == [(True, [], True)] * 2


def test_a_state_cannot_be_assigned(run_ranks: RunRanks) -> None:
    """Assigned tensors would be known to no buffer."""

    def body(rank: int, records: Records) -> object:
        from real.mcore.jobs import FsdpJob

        module = FsdpJob(SMALL).model.module
        weights = dict(module.named_parameters())
        state = module.state_dict()
        with pytest.raises(ValueError, match="got assign=True"):
            module.load_state_dict(state, assign=True)
        return all(weights[name] is weight for name, weight in module.named_parameters())

    assert run_ranks(SMALL, body) == [True] * 2
