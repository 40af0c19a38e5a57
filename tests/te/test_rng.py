"""`CudaRNGStatesTracker` over the host's random state."""

import pytest
import torch

from sim.te.rng import CudaRNGStatesTracker


@pytest.fixture(autouse=True)
def _host_state_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_rng_state", torch.get_rng_state)
    monkeypatch.setattr(torch.cuda, "set_rng_state", torch.set_rng_state)
    monkeypatch.setattr(torch.cuda, "manual_seed", torch.manual_seed)


def test_fork_draws_from_its_own_state_and_keeps_its_progress() -> None:
    torch.manual_seed(5)
    expected = torch.rand(4).tolist()
    tracker = CudaRNGStatesTracker()
    torch.manual_seed(1)
    outside = torch.get_rng_state()
    tracker.add("experts", 5)
    drawn = []
    for _ in range(2):
        with tracker.fork("experts"):
            drawn += torch.rand(2).tolist()
    assert drawn == expected
    assert torch.equal(torch.get_rng_state(), outside)


def test_fork_restores_the_state_after_an_error() -> None:
    tracker = CudaRNGStatesTracker()
    tracker.add("experts", 5)
    outside = torch.get_rng_state()

    def fail_inside() -> None:
        with tracker.fork("experts"):
            torch.rand(1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert torch.equal(torch.get_rng_state(), outside)


def test_names_and_seeds_are_used_once() -> None:
    tracker = CudaRNGStatesTracker()
    tracker.add("experts", 5)
    with pytest.raises(RuntimeError, match="seed 5 already exists"):
        tracker.add("other", 5)
    with pytest.raises(RuntimeError, match="state experts already exists"):
        tracker.add("experts", 6)
    with pytest.raises(KeyError, match="state other is not added"), tracker.fork("other"):
        pass
