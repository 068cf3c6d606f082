"""The minimal decoder in PyTorch, assembled from a ``ModelSpec``: every architecture that a spec can say.

Dimension suffixes: B batch, T tokens, V vocabulary, D width.
Parameter names are canonical: the JAX twin and the census use the same.
"""

import math
from typing import get_args

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from accounting.spec import Attention, Block, Experts, FeedForward, LatentAttention, ModelSpec
from model.torch_attention import AttentionKind, AttentionLayer, Kept, SoftmaxAttention
from model.torch_experts import ExpertsLayer, RouterLayer
from model.torch_latent import LatentAttentionLayer
from model.torch_layers import FeedForwardLayer, NormLayer, build_norm
from model.torch_rotary import RotaryTables, rotary_table

INITIAL_STD = 0.02  # GPT-2 (Radford et al. 2019), whose residual projections are divided by sqrt(2 L) (section 2.3)


def build_attention(spec: Attention | LatentAttention, width: int, context: int, kind: AttentionKind) -> nn.Module:
    """The attention of a spec."""
    if isinstance(spec, LatentAttention):
        return LatentAttentionLayer(spec, width, context, kind)
    return AttentionLayer(spec, width, context, kind)


def build_feed_forward(spec: FeedForward | Experts, width: int) -> nn.Module:
    """The feed-forward of a spec."""
    return ExpertsLayer(spec, width) if isinstance(spec, Experts) else FeedForwardLayer(spec, width)


class DecoderBlock(nn.Module):
    """x + post(attention(pre(x))), then the same around the feed-forward: (B, T, D)."""

    def __init__(self, spec: Block, width: int, context: int, kind: AttentionKind) -> None:
        super().__init__()
        self.attention_norm = build_norm(spec.attention_norm, width)
        self.attention = build_attention(spec.attention, width, context, kind)
        self.attention_post_norm = build_norm(spec.attention_post_norm, width)
        self.feed_forward_norm = build_norm(spec.feed_forward_norm, width)
        self.feed_forward = build_feed_forward(spec.feed_forward, width)
        self.feed_forward_post_norm = build_norm(spec.feed_forward_post_norm, width)

    def forward(self, x_BTD: Tensor, tables: RotaryTables, kept: Kept | None = None) -> Tensor:
        x_BTD = x_BTD + self.attention_post_norm(self.attention(self.attention_norm(x_BTD), tables, kept))
        out_BTD: Tensor = x_BTD + self.feed_forward_post_norm(self.feed_forward(self.feed_forward_norm(x_BTD)))
        return out_BTD


class Decoder(nn.Module):
    """Tokens (B, T) to logits (B, T, V). A tied head is the token table: the same Parameter object.

    ``attention``: ``eager`` writes the scores out and keeps a mask, ``fused`` leaves both to PyTorch's kernel
    where it can. ``recompute``: the backward pass runs each block again, and nothing inside it is kept. After
    ``to_empty`` call ``initialise``, which also fills the buffers and ties the head again, and load weights after that.
    """

    def __init__(self, spec: ModelSpec, *, attention: AttentionKind = "fused", recompute: bool = False) -> None:
        super().__init__()
        if attention not in get_args(AttentionKind):
            raise ValueError(f"attention: expected one of {get_args(AttentionKind)}, got {attention!r}")
        self.spec, self.recompute = spec, recompute
        self.embedding = nn.Embedding(spec.vocab, spec.width)
        self.position = nn.Embedding(spec.context, spec.width) if spec.learned_positions else None
        self.blocks = nn.ModuleList(DecoderBlock(block, spec.width, spec.context, attention) for block in spec.blocks)
        self.norm = build_norm(spec.final_norm, spec.width)
        self.head = nn.Linear(spec.width, spec.vocab, bias=False, device="meta" if spec.tied else None)
        self.initialise()

    @torch.no_grad()
    def initialise(self) -> None:
        """Tie the head, fill the buffers, and draw the weights as GPT-2 does, from torch's global generator."""
        if self.spec.tied:
            self.head.weight = self.embedding.weight
        modules = list(self.modules())
        residual = {module.output for module in modules if isinstance(module, SoftmaxAttention)}
        residual |= {module.down for module in modules if isinstance(module, FeedForwardLayer)}
        for module in modules:
            if isinstance(module, nn.Linear | nn.Embedding):
                depth = 2 * len(self.blocks) if module in residual else 1
                nn.init.normal_(module.weight, std=INITIAL_STD / math.sqrt(depth))
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
            if isinstance(module, NormLayer | SoftmaxAttention | RouterLayer):
                module.initialise()

    def keep(self, *, expanded: bool = False) -> list[Kept]:
        """What the layers keep of no token yet; ``expanded``: latent attention keeps every head's key and value."""
        return [Kept(block.attention.window, expanded) for block in self.spec.blocks]

    def forward(self, tokens_BT: Tensor, kept: list[Kept] | None = None) -> Tensor:
        """Logits (B, T, V) for token ids (B, T), int64, after those that are ``kept``, which they join.

        ValueError for more tokens than the context, and for what is kept where blocks run again.
        """
        recompute = self.recompute and torch.is_grad_enabled()
        if recompute and kept:
            raise ValueError("a block that runs again would keep its tokens twice: recompute goes without a cache")
        start = kept[0].met if kept else 0
        tokens = start + tokens_BT.shape[1]
        if tokens > self.spec.context:
            raise ValueError(f"a sequence of {tokens} tokens is longer than the context of {self.spec.context}")
        x_BTD = self.embedding(tokens_BT)
        position_T = torch.arange(start, tokens, device=tokens_BT.device)
        if self.spec.embedding_scale is not None:
            x_BTD = x_BTD * self.spec.embedding_scale
        if self.position is not None:
            x_BTD = x_BTD + self.position(position_T)
        rotaries = {block.attention.rotary for block in self.spec.blocks if block.attention.rotary is not None}
        tables = {rotary: rotary_table(rotary, position_T, x_BTD.dtype) for rotary in rotaries}
        for index, block in enumerate(self.blocks):
            layer = kept[index] if kept else None
            if recompute:
                x_BTD = checkpoint(block, x_BTD, tables, layer, use_reentrant=False)
            else:
                x_BTD = block(x_BTD, tables, layer)
        logits_BTV: Tensor = self.head(self.norm(x_BTD))
        if (cap := self.spec.logit_softcap) is not None:
            logits_BTV = cap * torch.tanh(logits_BTV / cap)
        return logits_BTV
