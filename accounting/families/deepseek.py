"""DeepSeek-V3 (arXiv 2412.19437), and Kimi K2 (arXiv 2507.20534), which has its architecture."""

from accounting import census
from accounting.families.base import ACTIVATIONS, ActivationName, Count, Extra, Natural, Positive, RotaryConfig, Width
from accounting.spec import Block, Experts, FeedForward, LatentAttention, ModelSpec, Norm, Router, SpecError

LATENT_NORM = Norm(eps=1e-6)  # whatever rms_norm_eps says: the published code gives these norms none


class DeepseekV3(RotaryConfig, kw_only=True):
    """``model_type`` deepseek_v3 and kimi_k2: latent attention, and experts chosen by sigmoid scores."""

    classes = frozenset({"DeepseekV3ForCausalLM", "KimiK2ForCausalLM"})
    names = {
        **RotaryConfig.names,
        "experts": "n_routed_experts",
        "router.groups": "n_group",
        "router.top_groups": "topk_group",
        "rotary.dim": "qk_rope_head_dim",
        "feed_forward.width": "n_shared_experts * moe_intermediate_size",
        "heads * (nope_head_dim + rope_head_dim)": "num_attention_heads * (qk_nope_head_dim + qk_rope_head_dim)",
        "heads * (nope_head_dim + value_head_dim)": "num_attention_heads * (qk_nope_head_dim + v_head_dim)",
    }
    only = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}

    intermediate_size: Width
    moe_intermediate_size: Width
    num_key_value_heads: Count | None = None
    head_dim: Width | None = None
    qk_head_dim: Width | None = None
    kv_lora_rank: Width
    q_lora_rank: Width | None
    qk_nope_head_dim: Width
    qk_rope_head_dim: Width
    v_head_dim: Width
    n_routed_experts: Count
    n_shared_experts: Natural
    num_experts_per_tok: Count
    first_k_dense_replace: Natural
    n_group: Count = 8
    topk_group: Count = 4
    norm_topk_prob: bool = True
    routed_scaling_factor: Positive = 2.5
    hidden_act: ActivationName = "silu"
    attention_bias: bool = False
    rope_interleave: bool = True
    scoring_func: str = "sigmoid"
    topk_method: str = "noaux_tc"
    moe_layer_freq: int = 1
    num_nextn_predict_layers: Natural = 0
    num_mtp_layers: Natural | None = None

    def gated(self, width: int) -> FeedForward:
        """SwiGLU at a width."""
        return FeedForward(width=width, activation=ACTIVATIONS[self.hidden_act], gated=True)

    def experts(self) -> Experts:
        """The mixture of every layer after the dense ones."""
        shared = self.n_shared_experts * self.moe_intermediate_size
        return Experts(
            experts=self.n_routed_experts,
            active=self.num_experts_per_tok,
            expert=self.gated(self.moe_intermediate_size),
            shared=self.gated(shared) if shared else None,
            router=Router(
                score="sigmoid",
                normalize=self.norm_topk_prob,
                scale=self.routed_scaling_factor,
                selection_bias=True,
                groups=self.n_group,
                top_groups=self.topk_group,
            ),
        )

    def block(self, feed_forward: FeedForward | Experts) -> Block:
        """A layer with this feed-forward."""
        return Block(
            attention=LatentAttention(
                heads=self.num_attention_heads,
                kv_rank=self.kv_lora_rank,
                query_rank=self.q_lora_rank,
                nope_head_dim=self.qk_nope_head_dim,
                rope_head_dim=self.qk_rope_head_dim,
                value_head_dim=self.v_head_dim,
                rotary=self.rotary(self.qk_rope_head_dim, interleaved=self.rope_interleave),
                bias=self.attention_bias,
                norm=LATENT_NORM,
            ),
            feed_forward=feed_forward,
            attention_norm=self.norm,
            feed_forward_norm=self.norm,
        )

    def spec(self) -> ModelSpec:
        if self.num_key_value_heads not in (None, self.num_attention_heads):
            raise SpecError("num_key_value_heads", f"expected num_attention_heads {self.num_attention_heads}")
        if self.num_mtp_layers not in (None, self.num_nextn_predict_layers):
            raise SpecError("num_mtp_layers", f"expected num_nextn_predict_layers {self.num_nextn_predict_layers}")
        # transformers saves two widths that follow from others: of a head's rotated part and of a query.
        whole = self.qk_nope_head_dim + self.qk_rope_head_dim
        for field, width in (("head_dim", self.qk_rope_head_dim), ("qk_head_dim", whole)):
            if getattr(self, field) not in (None, width):
                raise SpecError(field, f"expected {width}, which follows from qk_rope_head_dim and qk_nope_head_dim")
        dense = min(self.first_k_dense_replace, self.num_hidden_layers)
        sparse = self.num_hidden_layers - dense
        return self.decoder(
            (self.block(self.gated(self.intermediate_size)),) * dense + (self.block(self.experts()),) * sparse
        )

    def extras(self, spec: ModelSpec) -> list[Extra]:
        return [*super().extras(spec), *self.prediction_extras(), *self.quantization_extras(spec)]

    def prediction_extras(self) -> list[Extra]:
        """Layers that predict further tokens: training material, not the decoder's."""
        layers = self.num_nextn_predict_layers
        if not layers:
            return []
        block = self.prediction_block()
        scalars = sum(tensor.scalars for tensor in (*block.weights, *block.buffers))
        width = self.hidden_size
        return [
            Extra(
                name="prediction_layers",
                scalars=layers * (scalars + 2 * width * width + 3 * width),
                note="a block with its router's bias, a projection of 2d to d and three norms for each token ahead",
            ),
            Extra(
                name="prediction_layer_tables",
                scalars=layers * 2 * self.vocab_size * width,
                note="a copy of the token table and of the head in each prediction layer",
            ),
        ]

    @property
    def scaled_block(self) -> tuple[int, int] | None:
        """The rows and columns that share a scale, where every linear weight of a layer is scaled so."""
        match self.quantization_config:
            case {"quant_method": "fp8", "weight_block_size": [int(rows), int(columns)]} if rows > 0 < columns:
                return None if self.spares("") else (rows, columns)
            case _:
                return None

    def quantization_extras(self, spec: ModelSpec) -> list[Extra]:
        """One scale for each block of a linear weight in the layers, prediction layers too."""
        if self.scaled_block is None:
            return []
        rows, columns = self.scaled_block
        layers = [census.take(spec), *[self.prediction_block()] * self.num_nextn_predict_layers]
        scales = sum(
            weight.copies * -(-weight.shape[0] // rows) * -(-weight.shape[1] // columns)
            for layer in layers
            for weight in layer.weights
            if weight.layer is not None and weight.multiplies and weight.part is not census.Part.ROUTER
        )
        return [Extra(name="fp8_scales", scalars=scales, note=f"one for each {rows} x {columns} of a linear weight")]

    def prediction(self) -> tuple[Block, ...]:
        return (self.block(self.experts()),) * self.num_nextn_predict_layers

    def prediction_block(self) -> census.Census:
        """The bill of a prediction layer's block."""
        one = census.take(self.decoder([self.block(self.experts())]))
        return one.where(lambda tensor: tensor.layer is not None)

    def not_counted(self) -> list[str]:
        return super().not_counted() if self.scaled_block is None else []
