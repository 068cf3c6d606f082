"""What a decoder is: frozen dataclasses, validated when made.

The field's symbols and the names they have here:

========  ==========================================  =========================
symbol    meaning                                     name
========  ==========================================  =========================
V         vocabulary size                             ``ModelSpec.vocab``
d         width of the residual stream                ``ModelSpec.width``
L         number of blocks                            ``len(ModelSpec.blocks)``
n_q       query heads                                 ``heads``
n_kv      key/value heads                             ``kv_heads``
d_h       numbers a head                              ``head_dim``
d_ff      inner width of a feed-forward               ``FeedForward.width``
E, k      experts, experts active for a token         ``experts``, ``active``
W         window of positions, the token included     ``window``
========  ==========================================  =========================

A spec describes the computation and nothing else: a checkpoint's packing, names
and extra tensors belong to ``accounting.naming`` and ``accounting.huggingface``.
"""

import math
from dataclasses import dataclass
from types import NoneType
from typing import Any, Literal, get_args

MAX_WIDTH = 2**24
MAX_COUNT = 2**16
MAX_LAYERS = 10_000
MAX_POSITIONS = 2**31 - 1

Activation = Literal["gelu", "gelu_tanh", "relu", "silu"]
NormKind = Literal["layer", "rms"]
ScalingKind = Literal["linear", "llama3", "yarn"]
Span = Literal["head", "full"]
Score = Literal["softmax", "sigmoid"]
Order = Literal["score_first", "top_k_first"]


class SpecError(ValueError):
    """A field of a spec has a value that no decoder can have.

    ``field`` names the field, ``problem`` says what was expected of it.
    """

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


def _size(field: str, value: object, largest: int) -> None:
    if type(value) is not int:
        raise SpecError(field, f"expected an integer, got {type(value).__name__}")
    if not 1 <= value <= largest:
        raise SpecError(field, f"expected an integer from 1 to {largest:,}, got {value:,}")


def _choice(field: str, value: object, choices: Any) -> None:
    if value not in get_args(choices):
        raise SpecError(field, f"expected one of {', '.join(get_args(choices))}, got {value!r}")


def _finite(field: str, value: float | None) -> None:
    if value is not None:
        _instance(field, value, int, float)
        if not -math.inf < value < math.inf:
            raise SpecError(field, f"expected a finite number, got {value}")


def _positive(field: str, value: float | None) -> None:
    _finite(field, value)
    if value is not None and value <= 0:
        raise SpecError(field, f"expected a positive number, got {value}")


def _instance(field: str, value: object, *kinds: type) -> None:
    """The value has one of the types; a truth value is not taken for a number."""
    if not isinstance(value, kinds) or (type(value) is bool and bool not in kinds):
        names = " or ".join("nothing" if kind is NoneType else kind.__name__ for kind in kinds)
        raise SpecError(field, f"expected {names}, got {type(value).__name__}")


def _product(field: str, *factors: int) -> None:
    """A width that is a product (heads times head_dim) stays within the bound of a width."""
    total = 1
    for factor in factors:
        total *= factor
    _size(field, total, MAX_WIDTH)


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """LayerNorm or RMSNorm over a vector; ``bias`` is LayerNorm's offset.

    ``unit_offset``: the gain that multiplies is 1 + weight (Gemma).
    """

    kind: NormKind = "rms"
    eps: float = 1e-6
    bias: bool = False
    unit_offset: bool = False

    def __post_init__(self) -> None:
        _choice("norm.kind", self.kind, NormKind)
        _positive("norm.eps", self.eps)
        _instance("norm.bias", self.bias, bool)
        _instance("norm.unit_offset", self.unit_offset, bool)
        if self.bias and self.kind == "rms":
            raise SpecError("norm.bias", "RMSNorm has no offset")


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryScaling:
    """How rotary frequencies are stretched for contexts longer than the trained one.

    ``linear`` divides them by ``factor``; ``llama3`` does so only for long wavelengths
    (Llama 3.1); ``yarn`` ramps between the two and rescales attention (arXiv 2309.00071).
    ``mscale_all_dim`` is DeepSeek's: latent attention multiplies its scores by the square of
    0.1 ``mscale_all_dim`` ln(factor) + 1.
    """

    kind: ScalingKind
    factor: float
    original_context: int
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        _choice("rotary.scaling.kind", self.kind, ScalingKind)
        _size("rotary.scaling.original_context", self.original_context, MAX_POSITIONS)
        for field in (
            "factor",
            "low_frequency_factor",
            "high_frequency_factor",
            "beta_fast",
            "beta_slow",
            "attention_factor",
        ):
            _positive(f"rotary.scaling.{field}", getattr(self, field))
        _finite("rotary.scaling.mscale", self.mscale)
        _finite("rotary.scaling.mscale_all_dim", self.mscale_all_dim)
        _instance("rotary.scaling.truncate", self.truncate, bool)
        if self.kind == "llama3" and self.low_frequency_factor >= self.high_frequency_factor:
            raise SpecError("rotary.scaling.low_frequency_factor", "expected less than high_frequency_factor")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """Rotary positions on the first ``dim`` numbers of a head (arXiv 2104.09864).

    ``interleaved``: the pairs are neighbours, not the two halves of ``dim``.
    """

    base: float
    dim: int
    interleaved: bool = False
    scaling: RotaryScaling | None = None

    def __post_init__(self) -> None:
        _size("rotary.dim", self.dim, MAX_WIDTH)
        if self.dim % 2:
            raise SpecError("rotary.dim", f"expected an even number of rotated dimensions, got {self.dim}")
        _finite("rotary.base", self.base)
        if self.base <= 1:
            raise SpecError("rotary.base", f"expected a number above 1, got {self.base}")
        _instance("rotary.interleaved", self.interleaved, bool)
        _instance("rotary.scaling", self.scaling, RotaryScaling, NoneType)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Multi-head, grouped-query (arXiv 2305.13245) or multi-query attention, causal.

    ``bias`` is on the query, key and value projections, ``output_bias`` on the last one.
    ``qk_norm`` normalises queries and keys, each head by itself or the whole projection
    (``qk_norm_span``). ``window`` counts the token itself. ``sinks``: a learned logit a head.
    ``scale`` multiplies the scores (None: head_dim ** -1/2); ``softcap`` bounds them.
    """

    heads: int
    kv_heads: int
    head_dim: int
    bias: bool = False
    output_bias: bool = False
    qk_norm: Norm | None = None
    qk_norm_span: Span = "head"
    window: int | None = None
    sinks: bool = False
    rotary: Rotary | None = None
    scale: float | None = None
    softcap: float | None = None

    def __post_init__(self) -> None:
        _size("heads", self.heads, MAX_COUNT)
        _size("kv_heads", self.kv_heads, MAX_COUNT)
        _size("head_dim", self.head_dim, MAX_WIDTH)
        _product("heads * head_dim", self.heads, self.head_dim)
        if self.heads % self.kv_heads:
            raise SpecError("kv_heads", f"expected a divisor of the {self.heads} query heads, got {self.kv_heads}")
        if self.window is not None:
            _size("window", self.window, MAX_POSITIONS)
        for field in ("bias", "output_bias", "sinks"):
            _instance(field, getattr(self, field), bool)
        _instance("qk_norm", self.qk_norm, Norm, NoneType)
        _choice("qk_norm_span", self.qk_norm_span, Span)
        _positive("scale", self.scale)
        _positive("softcap", self.softcap)
        _instance("rotary", self.rotary, Rotary, NoneType)
        if self.rotary is not None and self.rotary.dim > self.head_dim:
            raise SpecError("rotary.dim", f"expected at most head_dim {self.head_dim}, got {self.rotary.dim}")

    @property
    def score_width(self) -> int:
        """Numbers that one query and one key share in a score."""
        return self.head_dim

    @property
    def value_width(self) -> int:
        """Numbers in one head's value."""
        return self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention: keys and values pass through a ``kv_rank`` bottleneck.

    A query and a key have ``nope_head_dim`` numbers without positions and ``rope_head_dim``
    rotated ones, the rotated part of the key shared by all heads. ``query_rank`` None: the
    query projection is one matrix. Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.
    """

    heads: int
    kv_rank: int
    nope_head_dim: int
    rope_head_dim: int
    value_head_dim: int
    rotary: Rotary
    query_rank: int | None = None
    bias: bool = False
    norm: Norm = Norm()
    window: None = None

    def __post_init__(self) -> None:
        _size("heads", self.heads, MAX_COUNT)
        for field in ("kv_rank", "nope_head_dim", "rope_head_dim", "value_head_dim"):
            _size(field, getattr(self, field), MAX_WIDTH)
        if self.query_rank is not None:
            _size("query_rank", self.query_rank, MAX_WIDTH)
        _product("heads * (nope_head_dim + rope_head_dim)", self.heads, self.score_width)
        _product("heads * (nope_head_dim + value_head_dim)", self.heads, self.nope_head_dim + self.value_head_dim)
        _instance("bias", self.bias, bool)
        _instance("norm", self.norm, Norm)
        _instance("window", self.window, NoneType)
        _instance("rotary", self.rotary, Rotary)
        if self.rotary.dim != self.rope_head_dim:
            raise SpecError("rotary.dim", f"expected rope_head_dim {self.rope_head_dim}, got {self.rotary.dim}")

    @property
    def score_width(self) -> int:
        """Numbers that one query and one key share in a score."""
        return self.nope_head_dim + self.rope_head_dim

    @property
    def value_width(self) -> int:
        """Numbers in one head's value."""
        return self.value_head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedForward:
    """Two matrices (up, down), or three when ``gated``: SwiGLU with silu, GeGLU with gelu.

    gpt-oss has a gated one with silu and three dials: ``clamp`` bounds the gate from above
    and the up projection on both sides before they meet, ``gain`` multiplies the argument of
    the silu's sigmoid, and ``up_offset`` is added to the up projection.
    """

    width: int
    activation: Activation
    gated: bool
    bias: bool = False
    clamp: float | None = None
    gain: float = 1.0
    up_offset: float = 0.0

    def __post_init__(self) -> None:
        _size("feed_forward.width", self.width, MAX_WIDTH)
        _choice("feed_forward.activation", self.activation, Activation)
        _instance("feed_forward.gated", self.gated, bool)
        _instance("feed_forward.bias", self.bias, bool)
        _positive("feed_forward.clamp", self.clamp)
        _positive("feed_forward.gain", self.gain)
        _finite("feed_forward.up_offset", self.up_offset)
        if not self.gated and (self.clamp is not None or self.gain != 1 or self.up_offset):
            raise SpecError("feed_forward.gated", "a clamp, a gain and an offset need a gate")
        if self.activation != "silu" and self.gain != 1:
            raise SpecError("feed_forward.gain", f"expected 1 with {self.activation}, only a silu has a gain")


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """How a token chooses its experts and weighs them.

    ``order``: scores over all experts and then the top k, or the top k logits and then
    scores over these. ``normalize`` divides the chosen scores by their sum; ``scale``
    multiplies them after. ``selection_bias`` is a persistent buffer that is added when
    choosing, never when weighing (arXiv 2408.15664). ``groups``: the experts are split
    evenly and only ``top_groups`` groups compete.
    """

    score: Score = "softmax"
    order: Order = "score_first"
    normalize: bool = True
    scale: float = 1.0
    bias: bool = False
    selection_bias: bool = False
    groups: int = 1
    top_groups: int = 1

    def __post_init__(self) -> None:
        _choice("router.score", self.score, Score)
        _choice("router.order", self.order, Order)
        _positive("router.scale", self.scale)
        for field in ("normalize", "bias", "selection_bias"):
            _instance(f"router.{field}", getattr(self, field), bool)
        _size("router.groups", self.groups, MAX_COUNT)
        _size("router.top_groups", self.top_groups, MAX_COUNT)
        if self.top_groups > self.groups:
            raise SpecError("router.top_groups", f"expected at most {self.groups} groups, got {self.top_groups}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts in a feed-forward's place: ``active`` of ``experts`` a token.

    ``shared`` runs for every token, beside the routed ones.
    """

    experts: int
    active: int
    expert: FeedForward
    router: Router = Router()
    shared: FeedForward | None = None

    def __post_init__(self) -> None:
        _size("experts", self.experts, MAX_COUNT)
        _size("active", self.active, MAX_COUNT)
        _instance("expert", self.expert, FeedForward)
        _instance("router", self.router, Router)
        _instance("shared", self.shared, FeedForward, NoneType)
        if self.active > self.experts:
            raise SpecError("active", f"expected at most the {self.experts} experts, got {self.active}")
        if self.experts % self.router.groups:
            raise SpecError(
                "router.groups", f"expected a divisor of the {self.experts} experts, got {self.router.groups}"
            )
        if self.active > self.experts // self.router.groups * self.router.top_groups:
            raise SpecError("active", f"expected no more than the experts of {self.router.top_groups} groups")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One layer: x + post(attention(pre(x))), then the same around the feed-forward.

    A norm that is None is the identity: GPT and Llama have the two ``pre`` norms, OLMo 2
    the two ``post`` norms, Gemma 3 all four.
    """

    attention: Attention | LatentAttention
    feed_forward: FeedForward | Experts
    attention_norm: Norm | None = None
    attention_post_norm: Norm | None = None
    feed_forward_norm: Norm | None = None
    feed_forward_post_norm: Norm | None = None

    def __post_init__(self) -> None:
        _instance("attention", self.attention, Attention, LatentAttention)
        _instance("feed_forward", self.feed_forward, FeedForward, Experts)
        for field in ("attention_norm", "attention_post_norm", "feed_forward_norm", "feed_forward_post_norm"):
            _instance(field, getattr(self, field), Norm, NoneType)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder-only language model.

    ``context`` is the longest sequence it is made for; ``learned_positions``: a table of
    ``context`` rows is added to the token vectors. ``tied``: the output head is the token
    table. ``embedding_scale`` multiplies the token vectors, ``logit_softcap`` bounds the
    logits.
    """

    vocab: int
    width: int
    context: int
    blocks: tuple[Block, ...]
    final_norm: Norm
    tied: bool
    learned_positions: bool = False
    embedding_scale: float | None = None
    logit_softcap: float | None = None

    def __post_init__(self) -> None:
        _size("vocab", self.vocab, MAX_WIDTH)
        _size("width", self.width, MAX_WIDTH)
        _size("context", self.context, MAX_WIDTH if self.learned_positions else MAX_POSITIONS)
        _instance("blocks", self.blocks, tuple)
        _size("layers", len(self.blocks), MAX_LAYERS)
        for block in self.blocks:
            _instance("blocks", block, Block)
        _instance("final_norm", self.final_norm, Norm)
        _instance("tied", self.tied, bool)
        _instance("learned_positions", self.learned_positions, bool)
        _positive("embedding_scale", self.embedding_scale)
        _positive("logit_softcap", self.logit_softcap)
