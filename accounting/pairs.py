"""Pairs of positions that attention multiplies, exactly and by name.

A rule takes the length of a sequence and a layer's window (None: to the start) and returns
the pairs of a query and a key. Which rule a count used belongs to the count.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

Pairs = Callable[[int, int | None], int]


def causal(seq: int, _window: int | None = None) -> int:
    """Each token with itself and all before it, in every layer: S (S + 1) / 2."""
    return seq * (seq + 1) // 2


def full(seq: int, _window: int | None = None) -> int:
    """Each token with each: S^2, what a kernel without causal skipping executes."""
    return seq * seq


def model(seq: int, window: int | None = None) -> int:
    """What the layer does: causal, or within its window, the sum of min(i + 1, W)."""
    if window is None or window >= seq:
        return causal(seq)
    return causal(window) + (seq - window) * window


def windowed(size: int) -> Pairs:
    """A window of ``size``, the token included, in every layer."""
    if size < 1:
        raise ValueError(f"window: expected at least 1, got {size}")

    def pairs(seq: int, _window: int | None = None) -> int:
        return model(seq, size)

    return pairs


def packed(lengths: Sequence[int], rule: Pairs = model) -> Pairs:
    """Documents packed into one sequence, each by ``rule`` and none seeing another."""
    if any(length < 1 for length in lengths):
        raise ValueError("packed documents: expected lengths of at least 1")

    def pairs(seq: int, window: int | None = None) -> int:
        if sum(lengths) != seq:
            raise ValueError(f"packed documents: {sum(lengths)} tokens do not fill a sequence of {seq}")
        return sum(rule(length, window) for length in lengths)

    return pairs


def cached(cache: int, rule: Pairs = model) -> Pairs:
    """New tokens after ``cache`` that are kept: each with the cache and with those before it.

    By ``full`` with all new ones too. A token of the cache has met its own pairs already.
    """
    if cache < 0:
        raise ValueError(f"cache: expected at least 0, got {cache}")

    def pairs(seq: int, window: int | None = None) -> int:
        if rule is full:
            return seq * (cache + seq)
        return rule(cache + seq, window) - rule(cache, window)

    return pairs


NAMED: Mapping[str, Pairs] = MappingProxyType({"model": model, "causal": causal, "full": full})
