"""What the gpu tests compute, at toy size on the CPU: only a GPU's own numbers are left to them."""

import json
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from torch.nn import functional as F

from accounting import conventions, flops, hardware, pairs, params
from accounting.authorities import timing
from model.recipes import d2l_gpt
from model.torch_decoder import Decoder
from tests.gpu import steps

TOY = d2l_gpt(vocab=11, width=32, heads=2, layers=2)
BATCH, SEQ = 2, 8
RATE = steps.Rate(name="toy", batch=2, seq=8, dtype="bfloat16", device="NVIDIA H200", flops=10**12, seconds=1 / 64)


def test_the_profiled_step():
    """Its products are 6 N D, and attention is left out by name."""
    profiled = steps.profiled(TOY, batch=BATCH, seq=SEQ, device="cpu")
    assert profiled.matmul == conventions.six_nd(params.count(TOY).matmul, BATCH * SEQ)
    assert profiled.elementwise > 0
    assert profiled.left_out and all("attention" in name for name in profiled.left_out)


def test_no_step_adds_to_the_gradients_of_another(monkeypatch):
    """Each starts without any, as a training step does."""
    decoder, found = Decoder(TOY), []
    monkeypatch.setattr(steps, "Decoder", lambda _: decoder)
    decoder.register_forward_pre_hook(lambda *_: found.append({type(weight.grad) for weight in decoder.parameters()}))
    step = steps.training_step(TOY, batch=BATCH, seq=SEQ, device="cpu")
    step()
    step()
    assert found == [{type(None)}] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_timed_step(dtype, monkeypatch):
    """It is a step in the dtype asked for, at the model's FLOPs, on a device that has no peak."""
    seen, cross_entropy = set(), F.cross_entropy

    def spy(logits, labels):
        seen.add(logits.dtype)
        return cross_entropy(logits, labels)

    monkeypatch.setattr(F, "cross_entropy", spy)
    rate = steps.rate("toy", TOY, batch=BATCH, seq=SEQ, device="cpu", dtype=dtype)
    assert seen == {dtype}
    assert (rate.dtype, rate.device) == (str(dtype).removeprefix("torch."), "cpu")
    assert rate.flops == flops.training(TOY, seq=SEQ, batch=BATCH).total
    assert rate.achieved == rate.flops / Fraction(rate.seconds) > 0
    assert rate.utilisation is None and str(rate).endswith("no peak known")


def test_utilisation_is_of_the_peak_of_the_device_and_dtype():
    """64 TFLOP/s, of a peak that is the chip's own; of a chip or a dtype that nobody knows there is none."""
    assert RATE.achieved == 64 * hardware.TERA
    assert RATE.utilisation == Fraction(64 * hardware.TERA, hardware.find("h200-sxm").peak("bfloat16"))
    assert str(RATE).startswith("toy, 2 x 8, bfloat16, NVIDIA H200: 15.6 ms, 64 TFLOP/s, MFU 6.")
    assert replace(RATE, device="NVIDIA H20").utilisation is None
    assert replace(RATE, dtype="float64").utilisation is None


def test_records_are_appended_by_device(tmp_path):
    """Each device has a file of its own, and what it holds already stays."""
    first, second = steps.record(RATE, tmp_path), steps.record(replace(RATE, seconds=0.25), tmp_path)
    assert first == second == tmp_path / "nvidia-h200" / "steps.json"
    entries = json.loads(first.read_text())
    assert [(entry["seconds"], entry["achieved"]) for entry in entries] == [(1 / 64, 64e12), (0.25, 4e12)]
    assert (entries[0]["utilisation"], entries[0]["torch"]) == (float(RATE.utilisation), torch.__version__)
    other = steps.record(replace(RATE, device="cpu"), tmp_path)
    assert [entry["utilisation"] for entry in json.loads(other.read_text())] == [None]


def test_flash_attention_is_causal():
    """The first query sees the first key alone, so that its output is the first value."""
    query, key, value = steps.qkv(heads=2, seq=5, head_dim=16, device="cpu", dtype=torch.float32)
    assert torch.equal(steps.attention(query, key, value)[:, :, 0], value[:, :, 0])


def test_flash_attention_is_counted():
    """Backward is twice forward, and two and a half times with the scores that the kernel computes again."""
    counted = steps.flash_flops(*steps.qkv(heads=2, seq=32, head_dim=16, device="cpu", dtype=torch.float32))
    assert counted.forward == 2 * 2 * 2 * 16 * pairs.full(32)
    assert (counted.backward, counted.executed_backward) == (2 * counted.forward, 5 * counted.forward // 2)


def test_products_are_timed_by_their_flops():
    """A product of n x n matrices is 2 n^3 FLOPs, and the wait is the caller's."""
    waits = []
    timed = steps.products((4, 8), device="cpu", dtype=torch.float32, wait=waits.append)
    assert set(timed) == {2 * 4**3, 2 * 8**3}
    assert [len(result) for result in waits] == [4] * 23 + [8] * 23


def test_rates_are_work_over_time(monkeypatch):
    """The best of the products, a copy's bytes read and written, and a step, each over its least time."""
    seconds, results = iter([1.0, 0.5, 0.25, 0.125]), []

    def measure(run, **_):
        results.append(run())
        return timing.Timing(next(seconds), 9.0, 1)

    monkeypatch.setattr(timing, "measure", measure)
    assert steps.product_rate((4, 8), device="cpu", dtype=torch.float32) == 2 * 8**3 / Fraction(1, 2)
    assert steps.bandwidth(1 << 10, device="cpu") == 4 << 10 and 2 * results[-1].nbytes == 1 << 10
    assert steps.rate("toy", TOY, batch=BATCH, seq=SEQ, device="cpu", dtype=torch.float32).seconds == 0.125


def test_the_priced_forward_pass():
    """On a CPU no product is missing at either width, and the analysis holds more than dots."""
    odd, even = (
        steps.priced(steps.with_feed_forward(TOY, width), batch=BATCH, seq=SEQ, platform="cpu") for width in (85, 88)
    )
    forward = flops.forward(steps.with_feed_forward(TOY, 85), seq=SEQ, batch=BATCH, pairs=pairs.full).total
    assert odd.dots == forward < odd.analysed
    product = 2 * BATCH * SEQ * TOY.width * 85 * len(TOY.blocks)
    assert even.dots - odd.dots == 3 * product * 3 // 85  # three matrices, each three columns wider
    assert round(steps.products_missed(odd, even, product)) == 0
    lacking = replace(odd, analysed=odd.analysed - product)
    assert round(steps.products_missed(lacking, even, product)) == 1
