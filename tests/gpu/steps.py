"""What the gpu tests build and measure, on whichever device they are given."""

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from accounting import flops, hardware
from accounting.authorities import timing, torch_counter, torch_profiler, xla
from accounting.authorities.timing import Timing
from accounting.authorities.torch_profiler import ProfiledFlops
from accounting.spec import ModelSpec
from model import jax_decoder
from model.torch_decoder import Decoder

BASELINES = Path(__file__).parents[2] / "fixtures" / "baselines"


def training_step(
    spec: ModelSpec, *, batch: int, seq: int, device: str, dtype: torch.dtype = torch.float32
) -> Callable[[], None]:
    """A call that runs forward and backward over random tokens, without an optimizer."""
    with torch.device(device):
        decoder = Decoder(spec).to(dtype)
        tokens, labels = torch.randint(spec.vocab, (2, batch, seq))

    def step() -> None:
        decoder.zero_grad()
        F.cross_entropy(decoder(tokens).flatten(0, 1), labels.flatten()).backward()

    return step


def profiled(spec: ModelSpec, *, batch: int, seq: int, device: str) -> ProfiledFlops:
    """What the profiler attributes to a training step, attention left out."""
    step = training_step(spec, batch=batch, seq=seq, device=device)
    step()
    return torch_profiler.count(step, allow=("attention",))


@dataclass(frozen=True, kw_only=True)
class Rate:
    """The time of one training step of ``batch`` sequences of ``seq`` tokens, and the FLOPs of its model."""

    name: str
    batch: int
    seq: int
    dtype: str
    device: str
    flops: int
    seconds: float

    @property
    def achieved(self) -> Fraction:
        """Model FLOPs a second."""
        tokens = self.batch * self.seq
        per_token, per_second = Fraction(self.flops, tokens), tokens / Fraction(self.seconds)
        return hardware.achieved(per_token, per_second, count=1, scope="device")

    @property
    def utilisation(self) -> Fraction | None:
        """MFU; None for a chip whose peak is not known."""
        chip = hardware.find(self.device)
        peak = chip and chip.peak(self.dtype)
        return self.achieved / peak if peak else None

    def __str__(self) -> str:
        share = "no peak known" if self.utilisation is None else f"MFU {float(self.utilisation):.2%}"
        return (
            f"{self.name}, {self.batch} x {self.seq}, {self.dtype}, {self.device}: {self.seconds * 1e3:.3g} ms,"
            f" {float(self.achieved) / 1e12:.3g} TFLOP/s, {share}"
        )


def rate(name: str, spec: ModelSpec, *, batch: int, seq: int, device: str, dtype: torch.dtype) -> Rate:
    """Time a training step on a device, waiting for it."""
    step = training_step(spec, batch=batch, seq=seq, device=device, dtype=dtype)
    return Rate(
        name=name,
        batch=batch,
        seq=seq,
        dtype=str(dtype).removeprefix("torch."),
        device=torch.cuda.get_device_name() if device == "cuda" else device,
        flops=flops.training(spec, seq=seq, batch=batch).total,
        seconds=timing.measure(step, rounds=20, warmup=3).minimum_seconds,
    )


def record(rate: Rate, folder: Path = BASELINES) -> Path:
    """Append a rate to the list of its device's own file, and return the file."""
    slug = re.sub(r"\W+", "-", rate.device.lower())
    path = folder / slug / "steps.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    rates = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    share = None if rate.utilisation is None else float(rate.utilisation)
    rates.append(asdict(rate) | {"achieved": float(rate.achieved), "utilisation": share, "torch": torch.__version__})
    path.write_text(json.dumps(rates, indent=2) + "\n", encoding="utf-8")
    return path


@dataclass(frozen=True, kw_only=True)
class AttentionFlops:
    """FLOPs of the flash kernel: forward, and backward without and with the scores that it computes again."""

    forward: int
    backward: int
    executed_backward: int


def qkv(*, heads: int, seq: int, head_dim: int, device: str, dtype: torch.dtype) -> list[Tensor]:
    """Random queries, keys and values of one sequence: (1, heads, seq, head_dim) each."""
    shape = (1, heads, seq, head_dim)
    return [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3)]


def attention(q: Tensor, k: Tensor, v: Tensor, backend: SDPBackend = SDPBackend.FLASH_ATTENTION) -> Tensor:
    """Causal attention by one of PyTorch's kernels; RuntimeError where it does not take such tensors."""
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def flash_flops(q: Tensor, k: Tensor, v: Tensor) -> AttentionFlops:
    """What torch's counter says of the flash kernel."""

    def both() -> None:
        attention(q, k, v).square().sum().backward()

    forward = torch_counter.count(lambda: attention(q, k, v))
    return AttentionFlops(
        forward=forward,
        backward=torch_counter.count(both) - forward,
        executed_backward=torch_counter.count(both, recomputed=True) - forward,
    )


def products(
    sizes: Iterable[int], *, device: str, dtype: torch.dtype, wait: Callable[[object], None] = timing.wait
) -> dict[float, Timing]:
    """The time of a product of two square matrices of each size, by its FLOPs."""
    timings: dict[float, Timing] = {}
    for size in sizes:
        left, right = torch.randn((2, size, size), device=device, dtype=dtype)
        timings[2 * size**3] = timing.measure(partial(torch.mm, left, right), rounds=20, warmup=3, wait=wait)
    return timings


def product_rate(sizes: Iterable[int], *, device: str, dtype: torch.dtype) -> Fraction:
    """FLOP/s of square products, at the size that does best."""
    timings = products(sizes, device=device, dtype=dtype)
    return max(Fraction(work) / Fraction(timed.minimum_seconds) for work, timed in timings.items())


def bandwidth(moved: int, *, device: str) -> Fraction:
    """Bytes a second of a copy that reads and writes ``moved`` bytes in all."""
    source = torch.zeros(moved // 2, dtype=torch.uint8, device=device)
    timed = timing.measure(partial(torch.empty_like(source).copy_, source), rounds=20, warmup=3)
    return Fraction(moved) / Fraction(timed.minimum_seconds)


@dataclass(frozen=True, kw_only=True)
class Priced:
    """A compiled forward pass: what XLA's analysis says, and the dots of its trace."""

    analysed: int
    dots: int


def with_feed_forward(spec: ModelSpec, width: int) -> ModelSpec:
    """The same decoder with this feed-forward width in every block."""
    blocks = (replace(block, feed_forward=replace(block.feed_forward, width=width)) for block in spec.blocks)
    return replace(spec, blocks=tuple(blocks))


def priced(spec: ModelSpec, *, batch: int, seq: int, platform: str) -> Priced:
    """Price a forward pass as compiled for a platform of JAX, custom calls included, without running it."""
    with jax.default_device(jax.devices(platform)[0]):
        params = jax.eval_shape(partial(jax_decoder.init, spec), jax.random.key(0))
        tokens = jax.ShapeDtypeStruct((batch, seq), jnp.int32)
        run = partial(jax_decoder.forward, spec)
        compiled = jax.jit(run).lower(params, tokens).compile()
        return Priced(
            analysed=int(xla.read(compiled.cost_analysis())["flops"]), dots=xla.dot_flops(run, params, tokens)
        )


def products_missed(odd: Priced, even: Priced, product: int) -> float:
    """How many products of ``product`` FLOPs the analysis of ``odd`` lacks, beyond what that of ``even`` does.

    Elementwise work, which an analysis has and dots do not, is the same in both to within some of its percents.
    """
    return ((even.analysed - even.dots) - (odd.analysed - odd.dots)) / product
