"""gpt-oss of OpenAI (arXiv 2508.10925)."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from accounting import census
from accounting.families.base import (
    Count,
    Extra,
    LayerType,
    Positions,
    Positive,
    RopeParameters,
    Width,
    WindowedConfig,
    pattern,
)
from accounting.spec import Attention, Experts, ModelSpec, Router, SpecError

MXFP4_BLOCK = 32


class GptOss(WindowedConfig, kw_only=True):
    """``model_type`` gpt_oss: sinks, biases everywhere, experts with a clamped SwiGLU."""

    classes = frozenset({"GptOssForCausalLM"})
    names = {**WindowedConfig.names, "experts": "num_local_experts"}
    default_theta = 150_000.0

    rms_norm_eps: Positive = 1e-5
    head_dim: Width = 64
    # The experts have the clamped SwiGLU, whatever this says.
    hidden_act: Literal["silu", "swish"] = "silu"
    sliding_window: Positions | None = 128
    attention_bias: bool = True
    num_local_experts: Count
    num_experts_per_tok: Count
    experts_per_token: Count | None = None
    swiglu_limit: Positive = 7.0
    swiglu_alpha: Positive = 1.702

    def default_kinds(self) -> Sequence[LayerType]:
        return pattern(self.num_hidden_layers, every=2)

    def section(self, kind: LayerType) -> RopeParameters:
        if self.rope_scaling is None and self.rope_parameters is None:
            return RopeParameters(rope_type="yarn", factor=32.0, original_max_position_embeddings=4096, truncate=False)
        return super().section(kind)

    def attention(self, kind: LayerType) -> Attention:
        bias = self.attention_bias
        return replace(super().attention(kind), bias=bias, output_bias=bias, sinks=True)

    def feed_forward(self, layer: int) -> Experts:
        if self.experts_per_token not in (None, self.num_experts_per_tok):
            raise SpecError("experts_per_token", f"expected num_experts_per_tok {self.num_experts_per_tok}")
        expert = self.gated(self.intermediate_size)
        return Experts(
            experts=self.num_local_experts,
            active=self.num_experts_per_tok,
            expert=replace(expert, bias=True, clamp=self.swiglu_limit, gain=self.swiglu_alpha, up_offset=1.0),
            router=Router(order="top_k_first", bias=True),
        )

    def extras(self, spec: ModelSpec) -> list[Extra]:
        extras = super().extras(spec)
        if self.scaled:
            scales = sum(
                weight.copies * weight.shape[0] * -(-weight.shape[1] // MXFP4_BLOCK)
                for weight in census.take(spec).weights
                if "{expert}" in weight.name and weight.multiplies
            )
            note = f"a scale for each {MXFP4_BLOCK} weights along an expert's input"
            extras.append(Extra(name="mxfp4_scales", scalars=scales, note=note))
        return extras

    def not_counted(self) -> list[str]:
        return [] if self.scaled else super().not_counted()

    @property
    def scaled(self) -> bool:
        """Whether the experts are stored as MXFP4, and nothing else is."""
        return self.quantization == "mxfp4" and not self.spares("experts")
