"""OLMo 2 and 3 of the Allen Institute for AI."""

from collections.abc import Sequence
from dataclasses import replace

from accounting.families.base import Count, LayerType, Positive, WindowedConfig, pattern
from accounting.spec import Attention, Block, Experts, FeedForward


class Olmo3(WindowedConfig, kw_only=True):
    """``model_type`` olmo3 (2025): three layers with a window, then one that sees everything.

    The norms stand after attention and feed-forward, and over all of a query and a key.
    A scaling of the rotary positions concerns the layers without a window, and so does
    ``rope_theta``: the others rotate by the default.
    """

    classes = frozenset({"Olmo3ForCausalLM"})
    default_theta = 500_000.0
    sections_by_kind = True

    num_key_value_heads: Count | None = None
    rms_norm_eps: Positive = 1e-5
    attention_bias: bool = False

    def default_kinds(self) -> Sequence[LayerType]:
        return pattern(self.num_hidden_layers, every=4)

    def theta(self, kind: LayerType) -> float:
        return self.default_theta if kind == "sliding_attention" else super().theta(kind)

    def attention(self, kind: LayerType) -> Attention:
        bias = self.attention_bias
        return replace(super().attention(kind), bias=bias, output_bias=bias, qk_norm=self.norm, qk_norm_span="full")

    def block(self, attention: Attention, feed_forward: FeedForward | Experts) -> Block:
        return Block(
            attention=attention,
            feed_forward=feed_forward,
            attention_post_norm=self.norm,
            feed_forward_post_norm=self.norm,
        )


class Olmo2(Olmo3, kw_only=True):
    """``model_type`` olmo2 (arXiv 2501.00656): OLMo 3 before the windows."""

    classes = frozenset({"Olmo2ForCausalLM"})
    default_theta = 10_000.0
    sections_by_kind = False

    layer_types: None = None
    sliding_window: None = None

    def default_kinds(self) -> Sequence[LayerType]:
        return ["full_attention"] * self.num_hidden_layers
