"""Llama, and the two of Mistral AI that keep its shape."""

from collections.abc import Sequence
from dataclasses import replace

from accounting.families.base import Count, GroupedConfig, LayerType, Positions, Positive
from accounting.spec import Attention, Experts, FeedForward


class Llama(GroupedConfig, kw_only=True):
    """``model_type`` llama (Touvron et al., arXiv 2302.13971; Grattafiori et al., arXiv 2407.21783)."""

    classes = frozenset({"LlamaForCausalLM"})

    num_key_value_heads: Count | None = None
    attention_bias: bool = False
    mlp_bias: bool = False

    def attention(self, kind: LayerType) -> Attention:
        return replace(super().attention(kind), bias=self.attention_bias, output_bias=self.attention_bias)

    def gated(self, width: int) -> FeedForward:
        return replace(super().gated(width), bias=self.mlp_bias)


class Mistral(GroupedConfig, kw_only=True):
    """``model_type`` mistral (Jiang et al., arXiv 2310.06825): a window on every layer."""

    classes = frozenset({"MistralForCausalLM"})

    sliding_window: Positions | None = 4096

    def kinds(self) -> Sequence[LayerType]:
        return ["sliding_attention"] * self.num_hidden_layers

    def window(self) -> int | None:
        return self.sliding_window


class Mixtral(Mistral, kw_only=True):
    """``model_type`` mixtral (Jiang et al., arXiv 2401.04088): eight experts, two of them active."""

    classes = frozenset({"MixtralForCausalLM"})
    names = {**GroupedConfig.names, "experts": "num_local_experts"}
    default_theta = 1_000_000.0

    rms_norm_eps: Positive = 1e-5
    sliding_window: Positions | None = None
    num_local_experts: Count
    num_experts_per_tok: Count

    def feed_forward(self, layer: int) -> Experts:
        return Experts(
            experts=self.num_local_experts,
            active=self.num_experts_per_tok,
            expert=self.gated(self.intermediate_size),
        )
