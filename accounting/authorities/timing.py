"""Wall-clock time of a callable, with the device waited for at both ends.

Without the wait a launch is timed and not the work: 0.03 ms for a product that takes 1.36 ms.
"""

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

#: Work must spread so far before its time says anything, and its time then grow by so much at least.
LEAST_SPREAD = 16.0
LEAST_GROWTH = 2.0


class FlatTimingError(RuntimeError):
    """Time that does not follow the work, as where launches are timed and not what they start."""


@dataclass(frozen=True)
class Timing:
    """Seconds of one call, over ``rounds`` timed calls. The minimum is the one to compare: noise only adds."""

    minimum_seconds: float
    median_seconds: float
    rounds: int


def wait(result: object) -> None:
    """Return once the work is done: that of every JAX array in ``result``, and all that torch's accelerator has.

    A JAX computation is known by its result alone, so that a callable has to return it. Neither framework is loaded.
    """
    if (jax := sys.modules.get("jax")) is not None:
        jax.block_until_ready(result)
    if (torch := sys.modules.get("torch")) is not None and torch.accelerator.is_available():
        torch.accelerator.synchronize()


def measure(
    run: Callable[[], object],
    *,
    rounds: int = 5,
    warmup: int = 1,
    wait: Callable[[object], None] = wait,
    clock: Callable[[], float] = time.perf_counter,
) -> Timing:
    """Time ``run`` ``rounds`` times, after ``warmup`` calls that compile, allocate and fill caches.

    ValueError without a round, or a call to warm up.
    """
    if rounds < 1 or warmup < 1:
        raise ValueError(f"timing takes a round and a warm-up call at least, not {rounds} and {warmup}")
    for _ in range(warmup):
        wait(run())
    seconds = []
    for _ in range(rounds):
        start = clock()
        wait(run())
        seconds.append(clock() - start)
    return Timing(min(seconds), statistics.median(seconds), rounds)


def refuse_flat(timings: Mapping[float, Timing]) -> None:
    """Raise FlatTimingError where time stays where it was while work grows: ``timings`` is by work, in any unit.

    ValueError where the work spreads by less than a factor of 16, over which a launch may well cost more than it.
    """
    least, most = min(timings), max(timings)
    if most < LEAST_SPREAD * least:
        raise ValueError(f"work from {least:g} to {most:g} spreads by less than a factor of {LEAST_SPREAD:g}")
    growth = timings[most].minimum_seconds / timings[least].minimum_seconds
    if growth < LEAST_GROWTH:
        raise FlatTimingError(f"{most / least:g} times the work takes {growth:.2g} times as long")
