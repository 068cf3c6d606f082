"""The bill of a decoder: every tensor that it holds and every product that it forms.

``take(spec)`` lists them once; every count of this package is a sum over that list.
Names are canonical: the decoders of ``model`` use the same ones.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from fractions import Fraction
from functools import lru_cache
from math import prod
from typing import Literal

from accounting.spec import Attention, Block, Experts, FeedForward, LatentAttention, ModelSpec, Norm


class Part(StrEnum):
    """What a tensor is for. Every offset of a linear map is a bias, whatever it belongs to."""

    EMBEDDING = "embedding"
    POSITION = "position"
    ATTENTION = "attention"
    FEED_FORWARD = "feed-forward"
    ROUTER = "router"
    NORM = "norm"
    BIAS = "bias"
    HEAD = "head"


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """A tensor of the decoder, or ``copies`` equal ones that stand side by side.

    ``name`` is canonical, with ``{expert}`` in it where ``copies`` is more than the tensor
    alone. ``active`` of the copies serve one token. ``multiplies``: a token is multiplied
    by it as a matrix; a lookup, a gain and an offset are not.
    """

    name: str
    shape: tuple[int, ...]
    part: Part
    layer: int | None = None
    copies: int = 1
    active: int = 1
    multiplies: bool = False

    @property
    def size(self) -> int:
        """Scalars in one copy."""
        return prod(self.shape)

    @property
    def scalars(self) -> int:
        """Scalars in all copies."""
        return self.size * self.copies

    @property
    def active_scalars(self) -> int:
        """Scalars in the copies that one token passes through."""
        return self.size * self.active

    @property
    def uses(self) -> Fraction:
        """How often one token multiplies by each copy, on average: 0, 1, or k/E."""
        return Fraction(self.active, self.copies) if self.multiplies else Fraction(0)

    def expand(self) -> Iterator["Weight"]:
        """Each copy as a tensor of its own."""
        if "{expert}" not in self.name:
            yield self
            return
        for expert in range(self.copies):
            yield replace(self, name=self.name.format(expert=expert), copies=1, active=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A matrix product of two activations in every head of a layer's attention.

    ``scores`` multiplies queries by keys, ``mixture`` the weights by values; for each pair
    of positions it takes ``heads * width`` multiply-adds. ``window``: how far back a pair
    may reach, the token included (None: to the start).
    """

    kind: Literal["scores", "mixture"]
    layer: int
    heads: int
    width: int
    window: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Census:
    """The weights (learned), the buffers (kept with them, not learned) and the products."""

    weights: tuple[Weight, ...]
    buffers: tuple[Weight, ...]
    products: tuple[Product, ...]

    def where(self, chosen: Callable[[Weight], bool]) -> "Census":
        """The weights and buffers that ``chosen`` accepts, without the products."""
        return Census(
            weights=tuple(filter(chosen, self.weights)), buffers=tuple(filter(chosen, self.buffers)), products=()
        )


#: The buffer of a block that is kept with its weights and never learned.
SELECTION_BIAS = "feed_forward.router.selection_bias"


def of(model: ModelSpec | Census) -> Census:
    """The census of a spec, or the one that is handed over."""
    return model if isinstance(model, Census) else take(model)


@lru_cache(maxsize=8)
def take(spec: ModelSpec) -> Census:
    """The census of a decoder, in the order in which a token meets its tensors."""
    table = (spec.vocab, spec.width)
    weights = [Weight(name="embedding.weight", shape=table, part=Part.EMBEDDING, multiplies=spec.tied)]
    if spec.learned_positions:
        weights.append(Weight(name="position.weight", shape=(spec.context, spec.width), part=Part.POSITION))
    buffers: list[Weight] = []
    products: list[Product] = []
    bills = {block: tuple(_block(spec.width, block)) for block in set(spec.blocks)}
    for layer, block in enumerate(spec.blocks):
        for weight in bills[block]:
            here = replace(weight, name=f"blocks.{layer}.{weight.name}", layer=layer)
            (buffers if weight.name == SELECTION_BIAS else weights).append(here)
        heads, window = block.attention.heads, block.attention.window
        scores, mixture = block.attention.score_width, block.attention.value_width
        products += [
            Product(kind="scores", layer=layer, heads=heads, width=scores, window=window),
            Product(kind="mixture", layer=layer, heads=heads, width=mixture, window=window),
        ]
    weights += _norm("norm", spec.width, spec.final_norm)
    if not spec.tied:
        weights.append(Weight(name="head.weight", shape=table, part=Part.HEAD, multiplies=True))
    return Census(weights=tuple(weights), buffers=tuple(buffers), products=tuple(products))


def _linear(name: str, out: int, into: int, part: Part, bias: bool) -> Iterator[Weight]:
    yield Weight(name=f"{name}.weight", shape=(out, into), part=part, multiplies=True)
    if bias:
        yield Weight(name=f"{name}.bias", shape=(out,), part=Part.BIAS)


def _norm(name: str, width: int, norm: Norm | None) -> Iterator[Weight]:
    if norm is None:
        return
    yield Weight(name=f"{name}.weight", shape=(width,), part=Part.NORM)
    if norm.bias:
        yield Weight(name=f"{name}.bias", shape=(width,), part=Part.NORM)


def _block(width: int, block: Block) -> Iterator[Weight]:
    yield from _norm("attention_norm", width, block.attention_norm)
    if isinstance(block.attention, LatentAttention):
        yield from _latent_attention(width, block.attention)
    else:
        yield from _attention(width, block.attention)
    yield from _norm("attention_post_norm", width, block.attention_post_norm)
    yield from _norm("feed_forward_norm", width, block.feed_forward_norm)
    if isinstance(block.feed_forward, Experts):
        yield from _experts(width, block.feed_forward)
    else:
        yield from _feed_forward("feed_forward", width, block.feed_forward)
    yield from _norm("feed_forward_post_norm", width, block.feed_forward_post_norm)


def _attention(width: int, attention: Attention) -> Iterator[Weight]:
    queries = attention.heads * attention.head_dim
    keys = attention.kv_heads * attention.head_dim
    for name, out in (("query", queries), ("key", keys), ("value", keys)):
        yield from _linear(f"attention.{name}", out, width, Part.ATTENTION, attention.bias)
    yield from _linear("attention.output", width, queries, Part.ATTENTION, attention.output_bias)
    for name, span in (("query_norm", queries), ("key_norm", keys)):
        span = attention.head_dim if attention.qk_norm_span == "head" else span
        yield from _norm(f"attention.{name}", span, attention.qk_norm)
    if attention.sinks:
        yield Weight(name="attention.sinks", shape=(attention.heads,), part=Part.ATTENTION)


def _latent_attention(width: int, attention: LatentAttention) -> Iterator[Weight]:
    heads, bias = attention.heads, attention.bias
    queries = heads * attention.score_width
    if attention.query_rank is None:
        yield from _linear("attention.query", queries, width, Part.ATTENTION, bias=False)
    else:
        yield from _linear("attention.query_down", attention.query_rank, width, Part.ATTENTION, bias)
        yield from _norm("attention.query_norm", attention.query_rank, attention.norm)
        yield from _linear("attention.query_up", queries, attention.query_rank, Part.ATTENTION, bias=False)
    compressed = attention.kv_rank + attention.rope_head_dim
    expanded = heads * (attention.nope_head_dim + attention.value_head_dim)
    yield from _linear("attention.kv_down", compressed, width, Part.ATTENTION, bias)
    yield from _norm("attention.kv_norm", attention.kv_rank, attention.norm)
    yield from _linear("attention.kv_up", expanded, attention.kv_rank, Part.ATTENTION, bias=False)
    yield from _linear("attention.output", width, heads * attention.value_head_dim, Part.ATTENTION, bias)


def _feed_forward(name: str, width: int, feed_forward: FeedForward) -> Iterator[Weight]:
    inner, bias = feed_forward.width, feed_forward.bias
    if feed_forward.gated:
        yield from _linear(f"{name}.gate", inner, width, Part.FEED_FORWARD, bias)
    yield from _linear(f"{name}.up", inner, width, Part.FEED_FORWARD, bias)
    yield from _linear(f"{name}.down", width, inner, Part.FEED_FORWARD, bias)


def _experts(width: int, layer: Experts) -> Iterator[Weight]:
    yield from _linear("feed_forward.router", layer.experts, width, Part.ROUTER, layer.router.bias)
    if layer.router.selection_bias:
        yield Weight(name=SELECTION_BIAS, shape=(layer.experts,), part=Part.ROUTER)
    for weight in _feed_forward("feed_forward.experts.{expert}", width, layer.expert):
        yield replace(weight, copies=layer.experts, active=layer.active)
    if layer.shared is not None:
        yield from _feed_forward("feed_forward.shared", width, layer.shared)
