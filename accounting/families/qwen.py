"""Qwen 2 and 3."""

from collections.abc import Sequence
from dataclasses import replace

from accounting.families.base import Count, LayerType, Natural, Width, WindowedConfig
from accounting.spec import Attention, Experts, FeedForward, Router, SpecError


class Qwen2(WindowedConfig, kw_only=True):
    """``model_type`` qwen2 (arXiv 2407.10671, 2412.15115): biases on query, key and value.

    ``sliding_window`` is in force only with ``use_sliding_window``, and where ``layer_types``
    does not say otherwise only from layer ``max_window_layers`` on.
    """

    classes = frozenset({"Qwen2ForCausalLM"})
    only = {"use_mrope": False}

    use_sliding_window: bool = False
    max_window_layers: Natural = 28
    use_mrope: bool = False

    def window(self) -> int | None:
        return self.sliding_window if self.use_sliding_window else None

    def default_kinds(self) -> Sequence[LayerType]:
        windowed = self.window() is not None
        return [
            "sliding_attention" if windowed and layer >= self.max_window_layers else "full_attention"
            for layer in range(self.num_hidden_layers)
        ]

    def attention(self, kind: LayerType) -> Attention:
        return replace(super().attention(kind), bias=True)


class HeadNormed(Qwen2, kw_only=True):
    """Qwen 3's attention (arXiv 2505.09388): a norm on the query and key of each head, no biases."""

    only = {**Qwen2.only, "qkv_bias": False, "use_qk_norm": True}

    attention_bias: bool = False
    qkv_bias: bool = False
    use_qk_norm: bool = True

    def attention(self, kind: LayerType) -> Attention:
        bias = self.attention_bias
        return replace(super().attention(kind), bias=bias, output_bias=bias, qk_norm=self.norm)


class Qwen3(HeadNormed, kw_only=True):
    """``model_type`` qwen3 (arXiv 2505.09388): the dense models."""

    classes = frozenset({"Qwen3ForCausalLM"})

    head_dim: Width = 128


class Qwen3Moe(HeadNormed, kw_only=True):
    """``model_type`` qwen3_moe (arXiv 2505.09388): experts on every layer that is not named as dense."""

    classes = frozenset({"Qwen3MoeForCausalLM"})
    names = {**HeadNormed.names, "experts": "num_experts"}

    moe_intermediate_size: Width
    num_experts: Count | None = None
    num_local_experts: Count | None = None
    num_experts_per_tok: Count
    norm_topk_prob: bool = False
    decoder_sparse_step: Count = 1
    mlp_only_layers: frozenset[Natural] = frozenset()

    @property
    def experts(self) -> int:
        """The number of experts, under either of its two names."""
        given = {self.num_experts, self.num_local_experts} - {None}
        if len(given) != 1:
            raise SpecError("num_experts", "missing" if not given else "expected what num_local_experts says")
        return next(count for count in given if count is not None)

    def kinds(self) -> Sequence[LayerType]:
        """One kind for all layers: transformers builds one mask, whatever ``layer_types`` says."""
        kind: LayerType = "full_attention" if self.window() is None else "sliding_attention"
        kinds = [kind] * self.num_hidden_layers
        if self.layer_types not in (None, kinds):
            raise SpecError("layer_types", f"expected {kind} on every layer, as use_sliding_window and the window say")
        return kinds

    def feed_forward(self, layer: int) -> FeedForward | Experts:
        if layer in self.mlp_only_layers or (layer + 1) % self.decoder_sparse_step:
            return self.gated(self.intermediate_size)
        return Experts(
            experts=self.experts,
            active=self.num_experts_per_tok,
            expert=self.gated(self.moe_intermediate_size),
            router=Router(normalize=self.norm_topk_prob),
        )
