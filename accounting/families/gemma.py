"""Gemma 3 of Google (arXiv 2503.19786), its text model."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import msgspec

from accounting.families.base import (
    ACTIVATIONS,
    ActivationName,
    Count,
    Layers,
    LayerType,
    Positions,
    Positive,
    Width,
    WindowedConfig,
    pattern,
)
from accounting.spec import Activation, Attention, Block, Experts, FeedForward, ModelSpec, Norm, SpecError


class Gemma3(WindowedConfig, kw_only=True):
    """``model_type`` gemma3_text: four norms a layer; five layers with a window, then one without.

    The published files leave out what equals the configuration class's default, sizes too.
    A scaling of the rotary positions concerns the layers without a window, and so does
    ``rope_theta``: the others rotate by ``rope_local_base_freq``.
    """

    classes = frozenset({"Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"})
    # transformers keeps attn_logit_softcapping, and bounds no scores by it.
    only = {"use_bidirectional_attention": False, "attn_logit_softcapping": None}
    default_theta = 1_000_000.0
    sections_by_kind = True

    vocab_size: Width = 262_208
    hidden_size: Width = 2304
    intermediate_size: Width = 9216
    num_hidden_layers: Layers = 26
    num_attention_heads: Count = 8
    num_key_value_heads: Count = 4
    head_dim: Width = 256
    # The family calls it hidden_activation, and refuses the other name.
    hidden_act: None = None  # type: ignore[assignment]
    hidden_activation: ActivationName = "gelu_pytorch_tanh"
    max_position_embeddings: Positions = 131_072
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    query_pre_attn_scalar: Positive = 256.0
    rope_local_base_freq: Positive = 10_000.0
    sliding_window_pattern: Count | None = None
    saved_sliding_window_pattern: Count | None = msgspec.field(default=None, name="_sliding_window_pattern")
    attn_logit_softcapping: Positive | None = None
    final_logit_softcapping: Positive | None = None
    use_bidirectional_attention: bool = False

    @property
    def norm(self) -> Norm:
        return Norm(eps=self.rms_norm_eps, unit_offset=True)

    @property
    def activation(self) -> Activation:
        return ACTIVATIONS[self.hidden_activation]

    def default_kinds(self) -> Sequence[LayerType]:
        every = self.sliding_window_pattern or 6
        if self.saved_sliding_window_pattern not in (None, every):
            raise SpecError("_sliding_window_pattern", f"expected {every} where layer_types is not given")
        return pattern(self.num_hidden_layers, every=every)

    def theta(self, kind: LayerType) -> float:
        return self.rope_local_base_freq if kind == "sliding_attention" else super().theta(kind)

    def attention(self, kind: LayerType) -> Attention:
        bias = self.attention_bias
        return replace(
            super().attention(kind),
            bias=bias,
            output_bias=bias,
            qk_norm=self.norm,
            scale=self.query_pre_attn_scalar**-0.5,
        )

    def block(self, attention: Attention, feed_forward: FeedForward | Experts) -> Block:
        return Block(
            attention=attention,
            feed_forward=feed_forward,
            attention_norm=self.norm,
            attention_post_norm=self.norm,
            feed_forward_norm=self.norm,
            feed_forward_post_norm=self.norm,
        )

    def decoder(self, blocks: Sequence[Block], **others: Any) -> ModelSpec:
        scale = float(self.hidden_size) ** 0.5
        return super().decoder(blocks, embedding_scale=scale, logit_softcap=self.final_logit_softcapping, **others)


class Gemma3Multimodal(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``model_type`` gemma3: the text model in ``text_config``, beside a vision tower."""

    #: How the names of the tower's tensors begin, and of its projector's.
    beside: ClassVar[tuple[str, ...]] = ("vision_tower.", "multi_modal_projector.")

    text_config: dict[str, Any]
    architectures: list[str] | None = None
    quantization_config: dict[str, Any] | None = None
    mlx_quantization: dict[str, Any] | None = msgspec.field(default=None, name="quantization")
    vision_config: dict[str, Any] | None = None
    mm_tokens_per_image: Count | None = None
    tie_word_embeddings: bool = True
