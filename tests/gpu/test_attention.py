"""The flash kernel of a GPU is counted, and writes no scores."""

import pytest
import torch
from torch.nn.attention import SDPBackend

from tests.gpu import steps

pytestmark = pytest.mark.gpu

HEADS, SEQ = 2, 8192


def qkv():
    return steps.qkv(heads=HEADS, seq=SEQ, head_dim=64, device="cuda", dtype=torch.bfloat16)


def peak_bytes(run):
    """The most that a call holds on the device beyond what was there."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return torch.cuda.max_memory_allocated() - before


def test_backward_is_twice_forward_and_two_and_a_half_times_as_executed():
    """Four gradient products for two forward ones, and the scores once more where recomputation is asked for."""
    counted = steps.flash_flops(*qkv())
    assert counted.forward == 4 * HEADS * SEQ * SEQ * 64
    assert (counted.backward, counted.executed_backward) == (2 * counted.forward, 5 * counted.forward // 2)


def test_flash_does_not_write_the_scores():
    """Forward and backward fit into less than the scores' bytes; the plain kernel's forward does not."""
    scores = HEADS * SEQ * SEQ * torch.bfloat16.itemsize
    q, k, v = qkv()
    assert peak_bytes(lambda: steps.attention(q, k, v).sum().backward()) < scores
    assert peak_bytes(lambda: steps.attention(q, k, v, SDPBackend.MATH)) >= scores
