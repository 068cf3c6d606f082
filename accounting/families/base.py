"""What the readers share: the fields of a config, and how they become a spec.

A reader is a struct of the fields that its family's ``config.json`` may hold. A field
without a default must be there. A default is that of the family's configuration class in
Hugging Face's transformers, and a size has one only where published files leave it out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, get_args

import msgspec

from accounting.spec import (
    MAX_COUNT,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_WIDTH,
    Activation,
    Attention,
    Block,
    Experts,
    FeedForward,
    ModelSpec,
    Norm,
    Rotary,
    RotaryScaling,
    SpecError,
)

Width = Annotated[int, msgspec.Meta(ge=1, le=MAX_WIDTH)]
Count = Annotated[int, msgspec.Meta(ge=1, le=MAX_COUNT)]
Layers = Annotated[int, msgspec.Meta(ge=1, le=MAX_LAYERS)]
Positions = Annotated[int, msgspec.Meta(ge=1, le=MAX_POSITIONS)]
Natural = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
LayerType = Literal["full_attention", "sliding_attention"]
ActivationName = Literal["gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu", "swish"]
RopeType = Literal["default", "linear", "llama3", "yarn"]

ACTIVATIONS: dict[ActivationName, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Extra:
    """Scalars that a file may hold besides the decoder: never part of a count."""

    name: str
    scalars: int
    note: str


def quotient(field: str, divisor: int, of: str, total: int) -> int:
    """``total`` divided among ``divisor``, which must leave nothing over."""
    if total % divisor:
        raise SpecError(field, f"expected a divisor of {of} {total}, got {divisor}")
    return total // divisor


def pattern(layers: int, every: int) -> Sequence[LayerType]:
    """Windows everywhere but on each layer whose number, from one, is a multiple of ``every``."""
    return ["sliding_attention" if (layer + 1) % every else "full_attention" for layer in range(layers)]


class Config(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What every family's reader has in common."""

    #: The family's causal language models, as ``architectures`` names them.
    classes: ClassVar[frozenset[str]]
    #: The config's field for a field of the spec, where the spec refuses a value.
    names: ClassVar[dict[str, str]] = {}
    #: Fields that are understood at one value and change the decoder at any other.
    only: ClassVar[dict[str, Any]] = {}

    architectures: list[str] | None = None
    quantization_config: dict[str, Any] | None = None
    #: MLX's name for the section, which may stand there under both.
    mlx_quantization: dict[str, Any] | None = msgspec.field(default=None, name="quantization")

    def check(self) -> None:
        """Refuse a config of this family that describes something else."""
        if self.mlx_quantization not in (None, self.quantization_config or self.mlx_quantization):
            raise SpecError("quantization", "expected what quantization_config says")
        for field, value in self.only.items():
            if getattr(self, field) not in (None, value):
                raise SpecError(field, f"expected {value!r}, another value is not implemented")
        for name in self.architectures or ():
            if name not in self.classes:
                raise SpecError("architectures", f"expected {' or '.join(sorted(self.classes))}, got {name!r}")

    def spec(self) -> ModelSpec:
        """The decoder that the config describes."""
        raise NotImplementedError

    def extras(self, spec: ModelSpec) -> list[Extra]:
        """What a file of this model may hold besides the decoder."""
        if not spec.tied:
            return []
        note = "a second copy of the tied table, in files saved without sharing"
        return [Extra(name="tied_head_copy", scalars=spec.vocab * spec.width, note=note)]

    def prediction(self) -> tuple[Block, ...]:
        """The blocks that predict further tokens, which a file may hold behind the decoder's own."""
        return ()

    @property
    def quantized(self) -> dict[str, Any] | None:
        """The section that says how the weights are quantised."""
        return self.quantization_config or self.mlx_quantization

    @property
    def quantization(self) -> str | None:
        """The method by which the published weights are quantised."""
        if self.quantized is None:
            return None
        return str(self.quantized.get("quant_method") or "unnamed")

    def spares(self, module: str) -> bool:
        """Whether the quantisation leaves out modules of this kind, which its scales then lack."""
        spared = (self.quantization_config or {}).get("modules_to_not_convert") or ()
        return any(module in str(name) for name in spared)

    def not_counted(self) -> list[str]:
        """What the config describes and no number covers."""
        return [f"quantization_config: scales and zero points of {self.quantization}"] if self.quantization else []


class RopeParameters(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The section ``rope_scaling``, or ``rope_parameters`` of newer files."""

    rope_type: RopeType | None = None
    type: RopeType | None = None
    rope_theta: Positive | None = None
    factor: Positive | None = None
    original_max_position_embeddings: Positions | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: Positive | None = None
    truncate: bool = True
    finetuned: bool = False
    partial_rotary_factor: float = 1.0

    def scaling(self, context: int) -> RotaryScaling | None:
        """The scaling of a model of ``context`` positions."""
        if self.partial_rotary_factor != 1.0:
            raise SpecError("partial_rotary_factor", "expected 1.0, another value is not implemented")
        kind = self.rope_type or self.type or "default"
        if kind == "default":
            return None
        if self.factor is None:
            raise SpecError("rope_scaling.factor", f"missing, {kind} scaling needs it")
        low, high = self.low_freq_factor, self.high_freq_factor
        if kind == "llama3" and (low is None or high is None or not low < high):
            raise SpecError("rope_scaling", "expected low_freq_factor below high_freq_factor")
        return RotaryScaling(
            kind=kind,
            factor=self.factor,
            original_context=self.original_max_position_embeddings or context,
            low_frequency_factor=low or 1.0,
            high_frequency_factor=high or 4.0,
            beta_fast=self.beta_fast,
            beta_slow=self.beta_slow,
            mscale=self.mscale,
            mscale_all_dim=self.mscale_all_dim,
            attention_factor=self.attention_factor,
            truncate=self.truncate,
        )


def _section(fields: Any) -> RopeParameters:
    """A section of ``rope_parameters``."""
    try:
        return msgspec.convert(fields, RopeParameters)
    except msgspec.ValidationError as error:
        raise SpecError("rope_parameters", str(error)) from None


class RotaryConfig(Config, kw_only=True):
    """A family with rotary positions and RMSNorm."""

    names = {
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "heads * head_dim": "num_attention_heads * head_dim",
        "rotary.base": "rope_theta",
        "rotary.dim": "head_dim",
        "window": "sliding_window",
        "active": "num_experts_per_tok",
    }
    default_theta: ClassVar[float] = 10_000.0
    #: Whether ``rope_parameters`` has a section for each kind of layer; ``rope_scaling``, and ``rope_theta``
    #: beside it, then concern the layers without a window alone.
    sections_by_kind: ClassVar[bool] = False

    vocab_size: Width
    hidden_size: Width
    num_hidden_layers: Layers
    num_attention_heads: Count
    max_position_embeddings: Positions
    rms_norm_eps: Positive = 1e-6
    rope_theta: Positive | None = None
    rope_scaling: RopeParameters | None = None
    rope_parameters: dict[str, Any] | None = None
    tie_word_embeddings: bool = False

    @property
    def norm(self) -> Norm:
        """The norm that the whole model has."""
        return Norm(eps=self.rms_norm_eps)

    def theta(self, kind: LayerType) -> float:
        """The rotary base of a layer, where its section does not give one."""
        return self.rope_theta or self.default_theta

    def check(self) -> None:
        super().check()
        given, kinds = self.rope_parameters or {}, get_args(LayerType)
        if self.sections_by_kind and not given.keys() <= set(kinds):
            raise SpecError("rope_parameters", f"expected a section for each kind of layer: {' and '.join(kinds)}")
        if not self.sections_by_kind and given.keys() & set(kinds):
            raise SpecError("rope_parameters", "expected one section for all layers, got one for each kind")
        if self.rope_scaling is None:
            return
        if given and (self.sections_by_kind or _section(given) != self.rope_scaling):
            raise SpecError("rope_scaling", "expected no more than rope_parameters says, which is given too")
        if self.sections_by_kind and self.rope_scaling.rope_type is None and self.rope_scaling.type is not None:
            raise SpecError("rope_scaling.type", "expected the name rope_type, the only one that the family reads")

    def section(self, kind: LayerType) -> RopeParameters:
        """The section for a layer of this kind."""
        if self.rope_scaling is not None:
            concerned = kind == "full_attention" or not self.sections_by_kind
            return self.rope_scaling if concerned else RopeParameters()
        given = self.rope_parameters or {}
        return _section(given.get(kind, {}) if self.sections_by_kind else given)

    def rotary(self, dim: int, kind: LayerType = "full_attention", *, interleaved: bool = False) -> Rotary:
        """The rotation of a layer of this kind, over ``dim`` numbers of a head."""
        section = self.section(kind)
        return Rotary(
            base=section.rope_theta or self.theta(kind),
            dim=dim,
            interleaved=interleaved,
            scaling=section.scaling(self.max_position_embeddings),
        )

    def decoder(self, blocks: Sequence[Block], **others: Any) -> ModelSpec:
        """The spec around these blocks."""
        return ModelSpec(
            vocab=self.vocab_size,
            width=self.hidden_size,
            context=self.max_position_embeddings,
            blocks=tuple(blocks),
            final_norm=self.norm,
            tied=self.tie_word_embeddings,
            **others,
        )


class GroupedConfig(RotaryConfig, kw_only=True):
    """A family with grouped-query attention and gated feed-forwards: Llama, and its variations."""

    intermediate_size: Width
    num_key_value_heads: Count | None
    head_dim: Width | None = None
    hidden_act: ActivationName = "silu"

    @property
    def activation(self) -> Activation:
        """The activation of the feed-forward's gate."""
        return ACTIVATIONS[self.hidden_act]

    def kinds(self) -> Sequence[LayerType]:
        """Which layers see everything and which a window."""
        return ["full_attention"] * self.num_hidden_layers

    def window(self) -> int | None:
        """The window of the layers that have one."""
        return None

    def attention(self, kind: LayerType) -> Attention:
        """The attention of a layer of this kind."""
        heads, width = self.num_attention_heads, self.hidden_size
        head_dim = self.head_dim or quotient("num_attention_heads", heads, "hidden_size", width)
        return Attention(
            heads=heads,
            kv_heads=self.num_key_value_heads or heads,
            head_dim=head_dim,
            window=self.window() if kind == "sliding_attention" else None,
            rotary=self.rotary(head_dim, kind),
        )

    def gated(self, width: int) -> FeedForward:
        """The family's gated feed-forward, at a width."""
        return FeedForward(width=width, activation=self.activation, gated=True)

    def feed_forward(self, layer: int) -> FeedForward | Experts:
        """The feed-forward of a layer."""
        return self.gated(self.intermediate_size)

    def block(self, attention: Attention, feed_forward: FeedForward | Experts) -> Block:
        """A layer with its norms, which stand before attention and feed-forward."""
        return Block(
            attention=attention,
            feed_forward=feed_forward,
            attention_norm=self.norm,
            feed_forward_norm=self.norm,
        )

    def spec(self) -> ModelSpec:
        kinds = self.kinds()
        if len(kinds) != self.num_hidden_layers:
            raise SpecError("layer_types", f"expected {self.num_hidden_layers} entries, got {len(kinds)}")
        attention = {kind: self.attention(kind) for kind in dict.fromkeys(kinds)}
        return self.decoder([self.block(attention[kind], self.feed_forward(layer)) for layer, kind in enumerate(kinds)])


class WindowedConfig(GroupedConfig, kw_only=True):
    """A family whose layers may have windows, listed in ``layer_types`` or by a rule."""

    layer_types: list[LayerType] | None = None
    sliding_window: Positions | None = 4096

    def kinds(self) -> Sequence[LayerType]:
        return self.default_kinds() if self.layer_types is None else self.layer_types

    def default_kinds(self) -> Sequence[LayerType]:
        """The kinds of the layers where the config does not list them."""
        raise NotImplementedError

    def window(self) -> int | None:
        if self.sliding_window is None:
            raise SpecError("sliding_window", "expected an integer, got null, and there are layers with a window")
        return self.sliding_window
