"""Bytes that a forward pass keeps for its backward pass, tensor by tensor, and the published closed form.

These are the tensors of this project's decoder in PyTorch, all weights training: what another
implementation keeps is another number. Its parameters, masks and tokens are not among them, nor
what the loss keeps of the logits.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from accounting.memory import DTYPE_BYTES
from accounting.spec import Attention, Block, FeedForward, ModelSpec, Norm

Kind = Literal["eager", "fused"]
Recompute = Literal["none", "full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation:
    """A tensor that is kept: what it is, the layer that keeps it (None: outside them), and its bytes."""

    name: str
    layer: int | None
    bytes: int


class UnpredictedError(ValueError):
    """No rule says what a component of the spec keeps."""


def kept(
    spec: ModelSpec, *, seq: int, batch: int = 1, attention: Kind = "fused", recompute: Recompute = "none"
) -> tuple[Activation, ...]:
    """The tensors that are kept in float32 for ``batch`` sequences of ``seq`` tokens, in order.

    ``attention``: ``eager`` keeps the softmax of every pair, ``fused`` a sum for each query.
    ``recompute`` full keeps what each layer is given, and runs it again. Raises
    UnpredictedError for sinks, a softcap, latent attention, experts, and a clamped feed-forward.
    """
    if seq < 1 or batch < 1:
        raise ValueError(f"expected at least 1 token of at least 1 sequence, got {seq} of {batch}")
    walk = _Walk(spec, seq, batch, attention)
    return tuple(walk.recomputed() if recompute == "full" else walk.everything())


def total(
    spec: ModelSpec, *, seq: int, batch: int = 1, attention: Kind = "fused", recompute: Recompute = "none"
) -> int:
    """Bytes of ``kept``."""
    return sum(each.bytes for each in kept(spec, seq=seq, batch=batch, attention=attention, recompute=recompute))


def score_bytes(spec: ModelSpec, *, seq: int, batch: int = 1, dtype: str = "float32") -> int:
    """Bytes of one layer's scores written out, B H T^2: the full square, masked or not; the largest layer's."""
    heads = max(block.attention.heads for block in spec.blocks)
    return batch * heads * seq * seq * DTYPE_BYTES[dtype]


def mask_bytes(spec: ModelSpec, *, attention: Kind = "fused") -> int:
    """Bytes of the causal masks that the decoder holds: eager attention has context^2 booleans a layer, fused none."""
    return len(spec.blocks) * spec.context**2 if attention == "eager" else 0


def korthikanti(spec: ModelSpec, *, seq: int, batch: int = 1) -> int:
    """S B H L (34 + 5 A S / H): bytes in two-byte numbers with dropout masks, nothing recomputed.

    Korthikanti et al. 2022, arXiv 2205.05198, equation 2: a GPT of width H with A heads and a
    feed-forward of 4 H. It leaves out what stands outside the layers.
    """
    return sum(seq * batch * (34 * spec.width + 5 * block.attention.heads * seq) for block in spec.blocks)


def _check(block: Block) -> tuple[Attention, FeedForward]:
    """The two components of a block, which are predicted."""
    attention, feed_forward = block.attention, block.feed_forward
    if not isinstance(attention, Attention) or attention.sinks or attention.softcap is not None:
        raise UnpredictedError("only multi-head and grouped-query attention is predicted, without sinks or a cap")
    if not isinstance(feed_forward, FeedForward):
        raise UnpredictedError("experts are not predicted, only a plain or gated feed-forward")
    if feed_forward.clamp is not None or feed_forward.gain != 1 or feed_forward.up_offset:
        raise UnpredictedError("a feed-forward with a clamp, a gain or an offset is not predicted")
    return attention, feed_forward


class _Walk:
    """Follows a token through the decoder, and yields what each operator keeps."""

    def __init__(self, spec: ModelSpec, seq: int, batch: int, attention: Kind) -> None:
        self.spec, self.seq, self.batch, self.kind = spec, seq, batch, attention
        self.tokens = seq * batch
        self.parts = [_check(block) for block in spec.blocks]
        self.layer: int | None = None

    def keep(self, name: str, scalars: int, dtype: str = "float32") -> Activation:
        return Activation(name=name, layer=self.layer, bytes=scalars * DTYPE_BYTES[dtype])

    def everything(self) -> Iterator[Activation]:
        yield from self.inputs()
        for layer, (block, (attention, feed_forward)) in enumerate(zip(self.spec.blocks, self.parts, strict=True)):
            self.layer = layer
            yield from self.before("attention", block.attention_norm)
            yield from self.attention(attention)
            yield from self.norm("attention_post_norm", block.attention_post_norm, self.spec.width, written=False)
            yield from self.before("feed_forward", block.feed_forward_norm)
            yield from self.feed_forward(feed_forward)
            yield from self.norm("feed_forward_post_norm", block.feed_forward_post_norm, self.spec.width, written=False)
        self.layer = None
        yield from self.outputs()

    def recomputed(self) -> Iterator[Activation]:
        yield from self.inputs()
        for layer in range(len(self.spec.blocks)):
            self.layer = layer
            yield self.keep("input", self.tokens * self.spec.width)
        self.layer = None
        yield from self.outputs()

    def inputs(self) -> Iterator[Activation]:
        """Learned positions are looked up by number; the tables of a rotation serve all layers that share it."""
        if self.spec.learned_positions:
            yield Activation(name="positions", layer=None, bytes=8 * self.seq)
        for rotary in dict.fromkeys(block.attention.rotary for block in self.spec.blocks):
            if rotary is not None:
                yield self.keep("rotary.cosines", self.seq * rotary.dim)
                yield self.keep("rotary.sines", self.seq * rotary.dim)

    def outputs(self) -> Iterator[Activation]:
        yield from self.before("head", self.spec.final_norm)
        if self.spec.logit_softcap is not None:
            yield self.keep("logits.tanh", self.tokens * self.spec.vocab)

    def before(self, name: str, norm: Norm | None) -> Iterator[Activation]:
        """What the matrices of a sublayer are given: the sum so far, or its norm."""
        if norm is None:
            yield self.keep(f"{name}.input", self.tokens * self.spec.width)
        else:
            yield from self.norm(f"{name}_norm", norm, self.spec.width, written=True)

    def norm(self, name: str, norm: Norm | None, span: int, *, written: bool, groups: int = 1) -> Iterator[Activation]:
        """A norm over ``span`` numbers, ``groups`` times a token; ``written``: what follows keeps its output."""
        if norm is None:
            return
        vectors = self.tokens * groups
        yield self.keep(f"{name}.input", vectors * span)
        yield self.keep(f"{name}.deviation", vectors)
        if norm.kind == "layer":
            yield self.keep(f"{name}.mean", vectors)
        else:
            yield self.keep(f"{name}.normalised", vectors * span)
        if norm.unit_offset:
            yield self.keep(f"{name}.gain", span)
        if written:
            yield self.keep(f"{name}.output", vectors * span)

    def attention(self, spec: Attention) -> Iterator[Activation]:
        queries, keys = self.tokens * spec.heads * spec.head_dim, self.tokens * spec.kv_heads * spec.head_dim
        for name, heads in (("query_norm", spec.heads), ("key_norm", spec.kv_heads)):
            per_head = spec.qk_norm_span == "head"
            span, groups = (spec.head_dim, heads) if per_head else (heads * spec.head_dim, 1)
            yield from self.norm(name, spec.qk_norm, span, written=False, groups=groups)
        yield self.keep("attention.query", queries)
        if self.kind == "eager":
            # Keys and values are repeated for each query head, and what is mixed is gathered for the projection.
            yield self.keep("attention.key", queries)
            yield self.keep("attention.value", queries)
            yield self.keep("attention.softmax", self.tokens * spec.heads * self.seq)
        else:
            yield self.keep("attention.key", keys)
            yield self.keep("attention.value", keys)
            yield self.keep("attention.log_sum", self.tokens * spec.heads)
            if spec.window is not None and spec.window < self.seq:
                yield self.keep("attention.mask", self.seq * self.seq)
        yield self.keep("attention.mixed", queries)

    def feed_forward(self, spec: FeedForward) -> Iterator[Activation]:
        inner = self.tokens * spec.width
        # The gradient of a relu is known from what it gives.
        if spec.activation != "relu":
            yield self.keep("feed_forward.preactivation", inner)
        if spec.gated:
            yield self.keep("feed_forward.gate", inner)
            yield self.keep("feed_forward.up", inner)
        yield self.keep("feed_forward.inner", inner)
