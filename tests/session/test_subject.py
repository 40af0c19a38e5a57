"""What is trained is found by name, and nothing else in the session names it."""

from __future__ import annotations

import pytest

from real.config import Scenario, ScenarioError
from real.reference import Reference
from sim.session.subject import MFSDP2, find_subject, reference_subject


def test_a_subject_is_found_by_name() -> None:
    assert find_subject("mfsdp2") is MFSDP2
    with pytest.raises(ScenarioError) as caught:
        find_subject("mfsdp3")
    assert str(caught.value) == "Expected a target among mfsdp2; got 'mfsdp3'."


def test_a_reference_knows_no_hybrid_mesh() -> None:
    """A group of one optimizer instance would mislead Megatron's data parallel."""
    hybrid = Scenario(world_size=8, num_distributed_optimizer_instances=2)
    adapted = reference_subject(Reference.DDP).adapt(hybrid)
    assert adapted == hybrid.changed(num_distributed_optimizer_instances=1)
    assert MFSDP2.adapt(hybrid) == hybrid
