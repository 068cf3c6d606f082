"""The clock: what is warmed up, what is waited for, and what is refused."""

import sys
import time
from types import SimpleNamespace

import pytest

from accounting.authorities import timing
from accounting.authorities.timing import FlatTimingError, Timing


def test_a_round_is_a_call_and_the_wait_for_it():
    """The clock starts after the last wait and stops after the next, and no warm-up call is timed."""
    log, ticks = [], iter([0.0, 5.0, 10.0, 11.0, 20.0, 23.0])

    def clock():
        log.append("clock")
        return next(ticks)

    def run():
        log.append("run")
        return "result"

    measured = timing.measure(run, rounds=3, warmup=2, wait=log.append, clock=clock)
    assert measured == Timing(minimum_seconds=1.0, median_seconds=3.0, rounds=3)
    assert log == ["run", "result"] * 2 + ["clock", "run", "result", "clock"] * 3


def test_jax_results_are_waited_for():
    """Work that is still under way when the call returns is in its time."""
    pytest.importorskip("jax")
    late = SimpleNamespace(block_until_ready=lambda: time.sleep(0.01))
    assert timing.measure(lambda: {"logits": [late]}, rounds=2).minimum_seconds >= 0.01


@pytest.mark.parametrize("present", [True, False])
def test_the_accelerator_of_torch_is_waited_for(present, monkeypatch):
    """Where there is one, and after every call."""
    import torch

    waits = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: present)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: waits.append("wait"))
    timing.measure(lambda: None, rounds=3, warmup=2)
    assert waits == ["wait"] * (5 if present else 0)


def test_a_framework_that_is_not_loaded_stays_so(monkeypatch):
    """Timing plain Python loads neither of them."""
    for framework in "jax", "torch":
        monkeypatch.delitem(sys.modules, framework, raising=False)
    assert timing.measure(lambda: None).rounds == 5
    assert not {"jax", "torch"} & set(sys.modules)


@pytest.mark.parametrize("counts", [{"rounds": 0}, {"warmup": 0}])
def test_a_round_and_a_warm_up_are_the_least(counts):
    """A first call compiles and allocates, and is no measurement."""
    with pytest.raises(ValueError, match="a round and a warm-up call at least"):
        timing.measure(lambda: None, **counts)


def seconds(*minima):
    return [Timing(minimum, 9.0, 5) for minimum in minima]


def test_time_that_does_not_follow_the_work_is_refused():
    """64 times the work in 1.5 times the time is the time of a launch; in twice it may be work."""
    with pytest.raises(FlatTimingError, match=r"64 times the work takes 1\.5 times as long"):
        timing.refuse_flat(dict(zip((64, 1, 8), seconds(1.5, 1.0, 0.9), strict=True)))
    timing.refuse_flat(dict(zip((1, 64), seconds(1.0, 2.0), strict=True)))


def test_too_narrow_a_spread_of_work_says_nothing():
    """Fifteen times the work may take as long for good reasons."""
    with pytest.raises(ValueError, match="from 1 to 15 spreads by less than a factor of 16"):
        timing.refuse_flat(dict(zip((1, 15), seconds(1.0, 1.0), strict=True)))
