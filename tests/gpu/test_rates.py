"""How fast a GPU runs the documents' steps, and what of its peak that is."""

import pytest
import torch

from accounting import hardware
from accounting.authorities import timing
from accounting.authorities.timing import FlatTimingError
from accounting.ledger import case
from model.recipes import RECIPES, d2l_gpt
from tests.gpu import steps

pytestmark = pytest.mark.gpu

GROWING = (256, 1024, 4096)  # a launch and a product of milliseconds
LARGE = (2048, 4096, 8192)
LAPTOP = "NVIDIA GeForce RTX 4060 Laptop GPU"


@pytest.mark.parametrize(
    ("name", "batch", "seq", "dtype"),
    [
        ("d2l-default", 64, 128, torch.float32),  # the document's own step
        ("d2l-default", 32, 128, torch.bfloat16),
        ("d2l-default", 64, 128, torch.bfloat16),
        ("d2l-gpt2", 4, 1024, torch.bfloat16),
    ],
    ids=str,
)
def test_utilisation_is_a_share(name, batch, seq, dtype, report):
    """A step achieves at most the peak of its chip; of an unknown chip its rate alone is reported."""
    rate = steps.rate(name, RECIPES[name], batch=batch, seq=seq, device="cuda", dtype=dtype)
    report(rate)
    assert rate.achieved > 0
    assert rate.utilisation is None or rate.utilisation <= 1


@pytest.mark.claim("d2l.check.small_underfeeds")
def test_utilisation_rises_with_width_and_batch(claim, report):
    """A wider model, and a larger batch, achieve more FLOP/s of the same GPU."""

    def achieved(width, batch):
        spec = d2l_gpt(width=width, heads=width // 32)
        rate = steps.rate(f"width {width}", spec, batch=batch, seq=128, device="cuda", dtype=torch.bfloat16)
        report(rate)
        return float(rate.achieved) / hardware.TERA

    wider = [achieved(width, 16) for width in (128, 512, 2048)]
    larger = [achieved(256, batch) for batch in (1, 16, 256)]
    claim.holds(
        wider == sorted(set(wider)) and larger == sorted(set(larger)),
        f"TFLOP/s by width {[round(rate, 2) for rate in wider]}, by batch {[round(rate, 2) for rate in larger]}",
    )


@pytest.mark.parametrize(
    (),
    [
        case(f"d2l.{claim}")
        for claim in ("flops.one_minute", "check.step_ms", "check.achieved", "check.order_below_peak")
    ],
)
def test_a_figure_of_a_gpu_without_a_name(claim):
    """The document does not say which GPU it ran on, and the time of another one says nothing about its own."""
    claim.unrun("gpu")


@pytest.mark.parametrize("ridge", [case("count.days.laptop_rate", False), case("count.intensity.ridge_laptop", True)])
def test_a_figure_of_the_laptop(claim, ridge):
    """The laptop that the document names runs square products at the printed rate, and its ridge follows."""
    if torch.cuda.get_device_name() != LAPTOP:
        claim.unrun("gpu")
    rate = steps.product_rate(LARGE, device="cuda", dtype=torch.bfloat16)
    claim.measured(hardware.ridge(rate, steps.bandwidth(2**31, device="cuda")) if ridge else rate)


def test_time_follows_the_work():
    """Growing products take longer where the device is waited for."""
    timing.refuse_flat(steps.products(GROWING, device="cuda", dtype=torch.bfloat16))


def test_without_the_wait_a_launch_is_timed():
    """The same products unwaited for take less time, the same at every size, and are refused."""
    waited = steps.products(GROWING, device="cuda", dtype=torch.bfloat16)
    launched = steps.products(GROWING, device="cuda", dtype=torch.bfloat16, wait=lambda _: None)
    largest = max(waited)
    assert launched[largest].minimum_seconds < waited[largest].minimum_seconds
    with pytest.raises(FlatTimingError):
        timing.refuse_flat(launched)
