"""GPT-2 (Radford et al., 2019)."""

from accounting.families.base import (
    ACTIVATIONS,
    ActivationName,
    Config,
    Count,
    Extra,
    Layers,
    Positive,
    Width,
    quotient,
)
from accounting.spec import Attention, Block, FeedForward, ModelSpec, Norm, SpecError


class Gpt2(Config, kw_only=True):
    """``model_type`` gpt2."""

    classes = frozenset({"GPT2LMHeadModel"})
    names = {"heads": "n_head", "heads * head_dim": "n_embd", "context": "n_positions", "feed_forward.width": "n_inner"}
    only = {"add_cross_attention": False}

    vocab_size: Width
    n_positions: Width
    n_embd: Width
    n_layer: Layers
    n_head: Count
    n_ctx: Width | None = None
    n_inner: Width | None = None
    activation_function: ActivationName = "gelu_new"
    layer_norm_epsilon: Positive = 1e-5
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    add_cross_attention: bool = False
    tie_word_embeddings: bool = True

    @property
    def norm(self) -> Norm:
        """The norm that the whole model has."""
        return Norm(kind="layer", eps=self.layer_norm_epsilon, bias=True)

    def block(self, layer: int) -> Block:
        """A layer: its attention's scale may depend on its number."""
        head_dim = quotient("n_head", self.n_head, "n_embd", self.n_embd)
        scale = None if self.scale_attn_weights else 1.0
        if self.scale_attn_by_inverse_layer_idx:
            scale = (scale or head_dim**-0.5) / (layer + 1)
        return Block(
            attention=Attention(
                heads=self.n_head, kv_heads=self.n_head, head_dim=head_dim, bias=True, output_bias=True, scale=scale
            ),
            feed_forward=FeedForward(
                width=self.n_inner or 4 * self.n_embd,
                activation=ACTIVATIONS[self.activation_function],
                gated=False,
                bias=True,
            ),
            attention_norm=self.norm,
            feed_forward_norm=self.norm,
        )

    def spec(self) -> ModelSpec:
        if self.n_ctx not in (None, self.n_positions):
            raise SpecError("n_ctx", f"expected n_positions {self.n_positions}, got {self.n_ctx}")
        return ModelSpec(
            vocab=self.vocab_size,
            width=self.n_embd,
            context=self.n_positions,
            blocks=tuple(self.block(layer) for layer in range(self.n_layer)),
            final_norm=self.norm,
            tied=self.tie_word_embeddings,
            learned_positions=True,
        )

    def extras(self, spec: ModelSpec) -> list[Extra]:
        mask = Extra(
            name="mask_buffers",
            scalars=len(spec.blocks) * spec.context**2,
            note="a causal mask of context x context in each layer, in the published files",
        )
        return [mask, *super().extras(spec)]
