"""A forked copy hands back its result or its error, and never outlives the original."""

from __future__ import annotations

import multiprocessing.connection
import os
import signal

import pytest
import torch

from sim.session.aside import Aside, can_fork
from sim.world import ErrorKind, WorldError

pytestmark = pytest.mark.skipif(not can_fork(), reason="needs fork and a second core")


def test_result_comes_back_and_side_effects_do_not() -> None:
    seen: list[int] = []
    aside = Aside(lambda: seen.append(1) or os.getpid())
    assert aside.result() != os.getpid()
    assert seen == []
    aside.stop()


def test_tensors_come_back_with_their_values() -> None:
    loss, weight = torch.tensor(1.5), torch.arange(6.0).view(2, 3).t()
    aside = Aside(lambda: {"loss": loss, "weights": [weight]})
    result = aside.result()
    aside.stop()  # nothing of the copy is needed any more
    assert torch.equal(result["loss"], loss)
    assert torch.equal(result["weights"][0], weight)


def test_error_comes_back_whole() -> None:
    def fail() -> None:
        raise WorldError(
            "Problem.", kind=ErrorKind.FAILED, rank=1, standing=["rank 0: running"], replay="again"
        )

    aside = Aside(fail)
    with pytest.raises(WorldError, match="Replay: again"):
        aside.result()
    aside.stop()


def test_death_of_the_copy_is_an_error() -> None:
    aside = Aside(lambda: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(RuntimeError, match="got exit -9"):
        aside.result()
    aside.stop()


def test_stop_ends_a_copy_that_waits_for_ever() -> None:
    aside = Aside(signal.pause)
    aside.stop()
    assert aside._process.exitcode == -signal.SIGKILL


def test_copy_ends_with_the_original() -> None:
    """The end of its lifeline is the end of the copy, even while it waits for ever."""
    aside = Aside(signal.pause)
    assert aside._lifeline is not None
    os.close(aside._lifeline)
    aside._lifeline = None
    aside._process.join(10)
    assert aside._process.exitcode == 1


def test_a_copy_needs_no_worker_of_the_original() -> None:
    """Torch's pool does not survive a fork: whoever hands it work waits without end."""
    value = torch.ones(512, 512, dtype=torch.bfloat16)

    def product() -> float:
        return float(torch.nn.functional.linear(value, value)[0, 0])

    product()  # starts the pool
    aside = Aside(product)
    assert multiprocessing.connection.wait([aside], timeout=20)
    assert aside.result() == 512.0
