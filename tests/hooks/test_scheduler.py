"""What the scheduler makes units and streams do at each hook point, as complete lists.

The notation is explained in conftest.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from real.hooks import ContractError, IllegalStep

if TYPE_CHECKING:
    from tests.hooks.conftest import Bench

ONE = {"": ["w"], "a": ["a.w", "a.b"]}
THREE = {"": ["w"], "a": ["a.w"], "b": ["b.w"], "c": ["c.w"]}


# -- forward --------------------------------------------------------------------------------


def test_forward_gathers_on_demand_and_releases_after_the_layer(bench: Bench) -> None:
    """One gather and one wait however many submodules ask."""
    scheduler = bench.scheduler(ONE)
    for module in ["a.norm", "a.linear", "a.norm"]:
        scheduler.pre_forward("a", module)
    scheduler.release_forward(["a"], "end of layer")
    assert bench.take() == ["ag<-compute", "U+ a", "compute<-a", "U- a"]
    assert bench.phases(scheduler) == {"": "resting", "a": "resting"}


def test_a_second_release_does_nothing(bench: Bench) -> None:
    """The schedule releases a layer whose last node has released it already."""
    scheduler = bench.scheduler(ONE)
    scheduler.pre_forward("a", "a.linear")
    scheduler.release_forward(["a"], "first")
    bench.take()
    scheduler.release_forward(["a"], "second")
    assert bench.take() == []


def test_each_stream_waits_once_for_each_gather(bench: Bench) -> None:
    """A stream that has not joined a gather would read storage that is still being filled."""
    scheduler = bench.scheduler(ONE)
    for stream in ["compute", "comm", "compute", "comm"]:
        with bench.on(stream):
            scheduler.pre_forward("a", "a.linear")
    scheduler.release_forward(["a"], "end of layer")
    with bench.on("comm"):
        scheduler.pre_forward("a", "a.linear")
    assert bench.take() == [
        "ag<-compute",
        "U+ a",
        "compute<-a",
        "comm<-a",
        "U- a",
        "U+ a",
        "comm<-a",
    ]


def test_the_wait_for_one_gather_is_never_taken_for_the_wait_for_another(bench: Bench) -> None:
    """The later gather of b implies nothing about a stream that joined only a."""
    scheduler = bench.scheduler(THREE)
    scheduler.pre_forward("a", "a.linear")
    scheduler.pre_forward("b", "b.linear")
    scheduler.pre_forward("a", "a.linear")
    assert bench.take() == ["ag<-compute", "U+ a", "compute<-a", "U+ b", "compute<-b"]


def test_the_all_gather_stream_forks_once_after_each_fence(bench: Bench) -> None:
    """The optimizer writes weights between the fence and the next gather, at no other time."""
    scheduler = bench.scheduler(THREE)
    for name in ["a", "b"]:
        scheduler.pre_forward(name, name)
        scheduler.release_forward([name], "end of layer")
    scheduler.finish_grad_sync()
    for name in ["b", "c"]:
        scheduler.pre_forward(name, name)
        scheduler.release_forward([name], "end of layer")
    assert bench.take() == [
        *["ag<-compute", "U+ a", "compute<-a", "U- a"],
        *["U+ b", "compute<-b", "U- b"],
        "compute<-rs",
        *["ag<-compute", "U+ b", "compute<-b", "U- b"],
        *["U+ c", "compute<-c", "U- c"],
    ]


def test_the_root_forks_at_each_of_its_gathers(bench: Bench) -> None:
    """It begins every microbatch, and a caller may have written weights before it."""
    scheduler = bench.scheduler(ONE)
    scheduler.pre_forward("a", "a.linear")
    scheduler.pre_forward("", "embedding")
    assert bench.take() == [
        *["ag<-compute", "U+ a", "compute<-a"],
        *["ag<-compute", "U+ root", "compute<-root"],
    ]


def test_the_fork_waits_for_the_stream_that_asks(bench: Bench) -> None:
    """It is the one that has seen the optimizer's writes."""
    scheduler = bench.scheduler(ONE)
    with bench.on("comm"):
        scheduler.pre_forward("a", "a.linear")
    assert bench.take() == ["ag<-comm", "U+ a", "comm<-a"]


# -- backward -------------------------------------------------------------------------------


def test_backward_reshards_before_it_reduces(bench: Bench) -> None:
    """Full weights and the packed gradient buffer together would be the peak of memory."""
    scheduler = bench.scheduler(ONE)
    scheduler.pre_backward("a", "a.linear")
    bench.accumulate(scheduler, "a", "a.w")
    scheduler.pre_backward("a", "a.norm")
    bench.accumulate(scheduler, "a", "a.b")
    assert bench.take() == ["ag<-compute", "U+ a", "compute<-a", "U- a", "RS a"]
    assert bench.phases(scheduler) == {"": "resting", "a": "resting"}


def test_a_weight_of_two_nodes_reduces_after_its_second_gradient(bench: Bench) -> None:
    """Each node's backward is an autograd pass of its own and accumulates once."""
    scheduler = bench.scheduler({"": ["w"]}, fires={"w": 2})
    scheduler.pre_backward("", "output_layer")
    bench.accumulate(scheduler, "", "w")
    assert bench.take() == ["ag<-compute", "U+ root", "compute<-root"]
    bench.accumulate(scheduler, "", "w")
    assert bench.take() == ["U- root", "RS root"]
    assert bench.units[""].reduced == [{"w": [2.0, 2.0]}]


def test_gradients_are_divided_before_they_are_reduced(bench: Bench) -> None:
    """Experts have summed the tokens of all expert-parallel ranks already."""
    scheduler = bench.scheduler(ONE, divisors={"a": 4})
    for name, parameters in [("a", ["a.w", "a.b"]), ("", ["w"])]:
        scheduler.pre_backward(name, name)
        bench.accumulate(scheduler, name, *parameters)
    assert bench.units["a"].reduced == [{"a.w": [0.25, 0.25], "a.b": [0.25, 0.25]}]
    assert bench.units[""].reduced == [{"w": [1.0, 1.0]}]


def test_post_backward_hooks_run_in_order_after_the_reduction(bench: Bench) -> None:
    """They may wait for it; a hook that was removed does not run."""
    scheduler = bench.scheduler(ONE)
    modules: list[nn.Module] = []

    def note(text: str, module: nn.Module) -> None:
        bench.log.append(text)
        modules.append(module)

    scheduler.register_post_backward_hook("a", lambda module: note("first", module))
    removed = scheduler.register_post_backward_hook("a", lambda module: note("removed", module))
    scheduler.register_post_backward_hook("a", lambda module: note("second", module))
    scheduler.register_post_backward_hook("", lambda module: note("root", module))
    removed.remove()
    scheduler.pre_backward("a", "a.linear")
    bench.take()
    bench.accumulate(scheduler, "a", "a.w", "a.b")
    assert bench.take() == ["U- a", "RS a", "first", "second"]
    assert modules == [bench.units["a"].module] * 2


def test_a_post_backward_hook_may_remove_itself(bench: Bench) -> None:
    """The usual way to run once."""
    scheduler = bench.scheduler(ONE)

    def once(module: nn.Module) -> None:
        bench.log.append("once")
        handle.remove()

    handle = scheduler.register_post_backward_hook("a", once)
    for _ in range(2):
        scheduler.pre_backward("a", "a.linear")
        bench.accumulate(scheduler, "a", "a.w", "a.b")
    assert bench.take().count("once") == 1


def test_a_reduction_without_a_fence_owner_names_the_unit(bench: Bench) -> None:
    """Nobody would wait for it before the optimizer reads the gradients."""
    scheduler = bench.scheduler(ONE, fence_owner=None)
    scheduler.pre_backward("a", "a.linear")
    with pytest.raises(RuntimeError, match=r"Cannot reduce FSDP unit 'a' .* finish_grad_sync"):
        bench.accumulate(scheduler, "a", "a.w", "a.b")
    assert "RS a" not in bench.take()


def test_a_gradient_after_completion_is_an_illegal_step(bench: Bench) -> None:
    """It would be lost: its unit has been reduced."""
    scheduler = bench.scheduler(ONE)
    scheduler.pre_backward("a", "a.linear")
    bench.accumulate(scheduler, "a", "a.w", "a.b")
    bench.take()
    with pytest.raises(IllegalStep, match=r"'gradient' by a\.w of FSDP unit 'a'.*'resting'"):
        bench.accumulate(scheduler, "a", "a.w")
    assert bench.take() == []


def test_a_late_gradient_is_illegal_while_the_next_forward_is_open(bench: Bench) -> None:
    """An open forward says nothing about the backward."""
    scheduler = bench.scheduler(ONE)
    scheduler.pre_backward("a", "a.linear")
    bench.accumulate(scheduler, "a", "a.w", "a.b")
    scheduler.pre_forward("a", "a.linear")
    with pytest.raises(IllegalStep, match="'forward'"):
        bench.accumulate(scheduler, "a", "a.w")


# -- two microbatches in flight -------------------------------------------------------------


def test_a_forward_release_keeps_a_unit_whose_backward_is_open(bench: Bench) -> None:
    """The backward of the other microbatch still reads the weights."""
    scheduler = bench.scheduler(ONE)
    scheduler.pre_backward("a", "a.linear")
    scheduler.pre_forward("a", "a.linear")
    scheduler.release_forward(["a"], "end of layer")
    assert bench.take() == ["ag<-compute", "U+ a", "compute<-a"]
    bench.accumulate(scheduler, "a", "a.w", "a.b")
    assert bench.take() == ["U- a", "RS a"]


def test_the_end_of_a_backward_keeps_a_unit_whose_forward_is_open(bench: Bench) -> None:
    """Gradients are reduced at once; the weights stay for the other microbatch's forward."""
    scheduler = bench.scheduler(ONE)
    scheduler.pre_backward("a", "a.linear")
    scheduler.pre_forward("a", "a.linear")
    bench.accumulate(scheduler, "a", "a.w", "a.b")
    assert bench.take() == ["ag<-compute", "U+ a", "compute<-a", "RS a"]
    scheduler.release_forward(["a"], "end of layer")
    assert bench.take() == ["U- a"]


def test_the_root_is_kept_from_its_forward_until_its_backward_ends(bench: Bench) -> None:
    """The schedule names no point between the two at which it could be released."""
    scheduler = bench.scheduler(ONE)
    scheduler.pre_forward("", "embedding")
    scheduler.pre_forward("", "output_layer")
    scheduler.pre_backward("", "output_layer")
    scheduler.pre_forward("", "embedding")  # of the next microbatch
    assert bench.take() == ["ag<-compute", "U+ root", "compute<-root"]
    bench.accumulate(scheduler, "", "w")
    assert bench.take() == ["U- root", "RS root"]
    assert bench.phases(scheduler)[""] == "resting"


# -- prefetch -------------------------------------------------------------------------------


def forward_and_backward(bench: Bench, prefetch: str) -> tuple[list[str], list[str]]:
    """One microbatch over three units; returns what forward and what backward did."""
    scheduler = bench.scheduler(THREE, prefetch=prefetch)
    for name in "abc":
        scheduler.pre_forward(name, name)
        scheduler.release_forward([name], "end of layer")
    forward = bench.take()
    for name in "cba":
        scheduler.pre_backward(name, name)
        bench.accumulate(scheduler, name, f"{name}.w")
    backward = bench.take()
    scheduler.finish_grad_sync()
    return forward, backward


ON_DEMAND_FORWARD = [
    *["ag<-compute", "U+ a", "compute<-a", "U- a"],
    *["U+ b", "compute<-b", "U- b"],
    *["U+ c", "compute<-c", "U- c"],
]
AHEAD_FORWARD = [
    *["ag<-compute", "U+ a", "compute<-a", "U+ b", "U- a"],
    *["compute<-b", "U+ c", "U- b"],
    *["compute<-c", "U- c"],
]
ON_DEMAND_BACKWARD = [
    *["U+ c", "compute<-c", "U- c", "RS c"],
    *["U+ b", "compute<-b", "U- b", "RS b"],
    *["U+ a", "compute<-a", "U- a", "RS a"],
]
AHEAD_BACKWARD = [
    *["U+ c", "compute<-c", "U+ b", "U- c", "RS c"],
    *["compute<-b", "U+ a", "U- b", "RS b"],
    *["compute<-a", "U- a", "RS a"],
]


@pytest.mark.parametrize(
    ("prefetch", "expected"),
    [
        ("none", (ON_DEMAND_FORWARD, ON_DEMAND_BACKWARD)),
        ("forward", (AHEAD_FORWARD, ON_DEMAND_BACKWARD)),
        ("both", (AHEAD_FORWARD, AHEAD_BACKWARD)),
    ],
    ids=["none", "forward", "both"],
)
def test_prefetch_gathers_one_unit_ahead(
    bench: Bench, prefetch: str, expected: tuple[list[str], list[str]]
) -> None:
    """The gather is issued with the one before; the wait stays with the consumer."""
    assert forward_and_backward(bench, prefetch) == expected


def test_an_unused_prefetch_cannot_leak_past_the_fence(bench: Bench) -> None:
    """A unit that stays unsharded takes the optimizer's update on the wrong tensors."""
    scheduler = bench.scheduler(THREE, prefetch="forward")
    scheduler.pre_forward("a", "a")
    scheduler.release_forward(["a"], "end of layer")
    with pytest.raises(RuntimeError, match=r"still unsharded: b \(forward\)\.$"):
        scheduler.finish_grad_sync()


def test_an_unused_backward_prefetch_is_closed_at_the_fence(bench: Bench) -> None:
    """No consumer came for it on this rank, so its gradients are zero on this rank."""
    scheduler = bench.scheduler(THREE, prefetch="both")
    scheduler.pre_backward("b", "b")
    bench.accumulate(scheduler, "b", "b.w")
    bench.take()
    scheduler.finish_grad_sync()
    assert bench.take() == ["U- a", "RS a", "compute<-rs"]
    assert bench.units["a"].reduced == [{"a.w": [0.0, 0.0]}]


# -- the schedule's edges -------------------------------------------------------------------


def test_unused_parameters_are_reduced_as_zeros_at_the_edge(bench: Bench) -> None:
    """Every rank must reduce the same units, whatever its tokens were."""
    scheduler = bench.scheduler(ONE)
    scheduler.pre_backward("a", "a.linear")
    bench.accumulate(scheduler, "a", "a.w")
    assert "RS a" not in bench.take()
    scheduler.release_backward(["", "a"], "post_backward")
    assert bench.take() == ["U- a", "RS a"]
    assert bench.units["a"].reduced == [{"a.w": [1.0, 1.0], "a.b": [0.0, 0.0]}]


def test_the_edge_leaves_complete_and_untouched_units_alone(bench: Bench) -> None:
    """It is called for every unit, after the countdown has done its work."""
    scheduler = bench.scheduler(ONE)
    scheduler.pre_backward("a", "a.linear")
    bench.accumulate(scheduler, "a", "a.w", "a.b")
    bench.take()
    scheduler.release_backward(["", "a"], "post_backward")
    assert bench.take() == []


def test_a_use_after_the_last_gradient_is_refused_at_the_edge(bench: Bench) -> None:
    """A hook on a module without parameters ran late; it would cost a gather and a reduction."""
    scheduler = bench.scheduler(ONE)
    scheduler.pre_backward("a", "a.linear")
    bench.accumulate(scheduler, "a", "a.w", "a.b")
    scheduler.pre_backward("a", "a.identity")
    with pytest.raises(RuntimeError, match=r"no use of FSDP unit 'a' .*, got it unsharded again"):
        scheduler.release_backward(["a"], "release of a")
    assert bench.take().count("RS a") == 1


def test_the_next_microbatch_may_leave_every_parameter_unused(bench: Bench) -> None:
    """Its forward tells it from a late use, where no edge comes between two microbatches."""
    scheduler = bench.scheduler(ONE)
    for parameters in [["a.w", "a.b"], []]:
        scheduler.pre_forward("a", "a.linear")
        scheduler.release_forward(["a"], "end of layer")
        scheduler.pre_backward("a", "a.linear")
        bench.accumulate(scheduler, "a", *parameters)
    scheduler.finish_grad_sync()
    assert bench.units["a"].reduced == [
        {"a.w": [1.0, 1.0], "a.b": [1.0, 1.0]},
        {"a.w": [0.0, 0.0], "a.b": [0.0, 0.0]},
    ]


def test_a_frozen_unit_is_released_at_the_edge_and_never_reduced(bench: Bench) -> None:
    """No gradient will ever close its backward."""
    scheduler = bench.scheduler({"": ["w"], "frozen": []})
    scheduler.pre_backward("frozen", "frozen.linear")
    scheduler.release_backward(["frozen"], "release of frozen")
    assert bench.take() == ["ag<-compute", "U+ frozen", "compute<-frozen", "U- frozen"]


def test_a_gradient_without_its_hook_is_refused_at_the_edge(bench: Bench) -> None:
    """Zeros would overwrite what a lost hook did not report."""
    scheduler = bench.scheduler(ONE)
    scheduler.pre_backward("a", "a.linear")
    bench.accumulate(scheduler, "a", "a.w")
    bench.units["a"].trainable_parameters["a.b"].grad = torch.ones(2)
    with pytest.raises(RuntimeError, match=r"completion hook for the gradient of 'a\.b' in"):
        scheduler.release_backward(["a"], "post_backward")
    assert "RS a" not in bench.take()


def test_a_weight_with_too_few_gradients_is_refused_at_the_edge(bench: Bench) -> None:
    """Its declared count is wrong or one of its nodes did not run."""
    scheduler = bench.scheduler(ONE, fires={"a.w": 2})
    scheduler.pre_backward("a", "a.linear")
    bench.accumulate(scheduler, "a", "a.w", "a.b")
    with pytest.raises(RuntimeError, match=r"every declared gradient of a\.w in FSDP unit 'a'"):
        scheduler.release_backward(["a"], "post_backward")


def test_the_edge_arms_the_countdown_again(bench: Bench) -> None:
    """What came before the edge belongs to the microbatch that has ended."""
    scheduler = bench.scheduler(ONE)
    for _ in range(2):
        scheduler.pre_backward("a", "a.linear")
        bench.accumulate(scheduler, "a", "a.w")
        scheduler.release_backward(["a"], "post_backward")
    assert bench.units["a"].reduced == [{"a.w": [1.0, 1.0], "a.b": [0.0, 0.0]}] * 2


def test_the_fence_repeated_only_waits_again(bench: Bench) -> None:
    """Megatron calls it once; a caller who wants to be sure calls it twice."""
    scheduler = bench.scheduler(ONE)
    scheduler.pre_backward("a", "a.linear")
    bench.accumulate(scheduler, "a", "a.w", "a.b")
    bench.take()
    scheduler.finish_grad_sync()
    scheduler.finish_grad_sync()
    assert bench.take() == ["compute<-rs", "compute<-rs"]


def test_the_fence_closes_an_open_backward_before_it_waits(bench: Bench) -> None:
    """A wait before the last reduction would not cover it."""
    scheduler = bench.scheduler(ONE)
    scheduler.pre_backward("a", "a.linear")
    bench.accumulate(scheduler, "a", "a.w")
    bench.take()
    scheduler.finish_grad_sync()
    assert bench.take() == ["U- a", "RS a", "compute<-rs"]


def test_the_fence_names_every_unit_that_does_not_rest(bench: Bench) -> None:
    """The optimizer would clear full gradients where it should clear shards."""
    scheduler = bench.scheduler(THREE)
    scheduler.pre_forward("", "embedding")
    scheduler.pre_forward("b", "b")
    with pytest.raises(RuntimeError, match=r"unsharded: <root> \(forward\), b \(forward\)\.$"):
        scheduler.finish_grad_sync()
    assert "compute<-rs" not in bench.take()


def test_the_fence_names_a_unit_that_somebody_else_gathered(bench: Bench) -> None:
    """Its phase says resting, its storage does not."""
    scheduler = bench.scheduler(ONE)
    bench.units["a"].unshard()
    with pytest.raises(RuntimeError, match=r"still unsharded: a \(resting\)"):
        scheduler.finish_grad_sync()


# -- the end of the node that completes a unit ----------------------------------------------


def test_a_complete_unit_is_left_alone_when_its_node_ends(bench: Bench) -> None:
    """Its last gradient has reduced it inside the node."""
    scheduler = bench.scheduler(ONE)
    for _ in range(2):
        scheduler.pre_backward("a", "a.linear")
        bench.accumulate(scheduler, "a", "a.w", "a.b")
        bench.take()
        scheduler.end_backward(["a"], "end of node")
        assert bench.take() == []


def test_unused_parameters_are_reduced_when_the_node_ends(bench: Bench) -> None:
    """Not at the layer's release, which comes after gathers of other units."""
    scheduler = bench.scheduler(ONE)
    scheduler.pre_backward("a", "a.linear")
    bench.accumulate(scheduler, "a", "a.w")
    bench.take()
    scheduler.end_backward(["a"], "end of node")
    assert bench.take() == ["U- a", "RS a"]
    assert bench.units["a"].reduced == [{"a.w": [1.0, 1.0], "a.b": [0.0, 0.0]}]
    scheduler.release_backward(["a"], "end of layer")
    assert bench.take() == []


def test_a_unit_that_did_not_run_backward_is_gathered_and_reduced_all_the_same(
    bench: Bench,
) -> None:
    """Other ranks have gathered it, and the one after it, inside the node."""
    scheduler = bench.scheduler(THREE, prefetch="both")
    scheduler.end_backward(["b"], "end of node")
    assert bench.take() == ["ag<-compute", "U+ b", "compute<-b", "U+ a", "U- b", "RS b"]


def test_a_prefetched_unit_that_did_not_run_backward_still_prefetches_the_next(
    bench: Bench,
) -> None:
    """An open interval is not enough: on other ranks its consumer has come."""
    scheduler = bench.scheduler(THREE, prefetch="both")
    scheduler.pre_backward("c", "c")
    bench.accumulate(scheduler, "c", "c.w")
    bench.take()
    scheduler.end_backward(["c", "b"], "end of node")
    assert bench.take() == ["U+ a", "U- b", "RS b"]


def test_the_end_of_the_first_use_gathers_what_nothing_has_asked_for(bench: Bench) -> None:
    """And nothing else: where the node has read the unit, it is gathered."""
    scheduler = bench.scheduler(THREE)
    scheduler.pre_backward("a", "a")
    bench.take()
    scheduler.end_of_first_use(["a", "b"], "end of node")
    assert bench.take() == ["U+ b", "compute<-b"]


def test_a_frozen_unit_is_not_touched_when_the_node_ends(bench: Bench) -> None:
    """It is not reduced, and its layer releases it."""
    scheduler = bench.scheduler({"": ["w"], "a": []})
    scheduler.pre_backward("a", "a.linear")
    bench.take()
    scheduler.end_backward(["a"], "end of node")
    assert bench.take() == []
    assert bench.phases(scheduler)["a"] == "backward"


def test_a_use_after_the_end_of_the_node_is_refused_at_the_edge(bench: Bench) -> None:
    """Zeros complete a unit as gradients do."""
    scheduler = bench.scheduler(ONE)
    scheduler.end_backward(["a"], "end of node")
    scheduler.pre_backward("a", "a.late")
    with pytest.raises(ContractError, match="got it unsharded again") as raised:
        scheduler.release_backward(["a"], "end of layer")
    assert (raised.value.rule, raised.value.unit) == ("I3", "a")


@pytest.mark.parametrize("point", ["release_backward", "end_backward"])
def test_a_pending_delayed_gradient_is_never_taken_for_zero(bench: Bench, point: str) -> None:
    """Zeros would be reduced, and the gradient itself would come too late."""
    scheduler = bench.scheduler(ONE, delayed=["a.w"])
    scheduler.pre_backward("a", "a.linear")
    bench.accumulate(scheduler, "a", "a.b")
    with pytest.raises(ContractError, match=r"delayed weight gradient of 'a\.w'") as raised:
        getattr(scheduler, point)(["a"], "end of layer")
    assert (raised.value.rule, raised.value.unit) == ("I7", "a")
    assert bench.units["a"].reduced == []


# -- public calls ---------------------------------------------------------------------------


def test_public_unshard_gathers_once_and_waits(bench: Bench) -> None:
    """A caller outside of the schedule owes no stream wait of its own."""
    scheduler = bench.scheduler(ONE)
    scheduler.unshard("a")
    scheduler.unshard("a")
    scheduler.reshard("a")
    scheduler.reshard("a")
    assert bench.take() == ["ag<-compute", "U+ a", "compute<-a", "U- a"]


def test_public_reshard_keeps_a_unit_whose_backward_is_open(bench: Bench) -> None:
    """It ends the caller's use and nobody else's."""
    scheduler = bench.scheduler(ONE)
    scheduler.pre_backward("a", "a.linear")
    scheduler.unshard("a")
    scheduler.reshard("a")
    assert "U- a" not in bench.take()


# -- the plain schedule ---------------------------------------------------------------------


def test_a_whole_module_releases_its_units_after_its_forward(bench: Bench) -> None:
    """Under the plain schedule nobody else says when."""
    scheduler = bench.scheduler(THREE)
    scheduler.pre_forward("a", "a.linear")
    scheduler.pre_forward("b", "b.linear")
    bench.take()
    scheduler.post_forward(["a", "b"], "a")
    assert bench.take() == ["U- a", "U- b"]


def test_a_recomputed_forward_belongs_to_the_backward(bench: Bench) -> None:
    """It gathers what it needs; it neither prefetches, nor releases, nor opens the forward."""
    scheduler = bench.scheduler(THREE, prefetch="both")

    def recompute(grad: torch.Tensor) -> None:
        scheduler.pre_forward("a", "a.linear")
        scheduler.post_forward(["a"], "a")

    leaf = torch.ones(1, requires_grad=True)
    output = leaf * 2
    output.register_hook(recompute)
    output.backward()
    assert bench.take() == ["ag<-compute", "U+ a", "compute<-a"]
    assert bench.phases(scheduler) == {
        "": "resting",
        "a": "backward",
        "b": "resting",
        "c": "resting",
    }
    bench.accumulate(scheduler, "a", "a.w")
    assert bench.take() == ["U- a", "RS a"]
