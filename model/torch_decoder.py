"""The minimal decoder in PyTorch, assembled from a ``ModelSpec``: every dense architecture that a spec can say.

Dimension suffixes: B batch, T tokens, V vocabulary, D width, N query heads, K key/value heads,
H head_dim, S any span that is normalised. A linear weight is stored (out, in).
Parameter names are canonical: the JAX twin and the census use the same.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accounting.spec import Activation, Attention, Block, Experts, FeedForward, LatentAttention, ModelSpec, Norm
from model.torch_rotary import RotaryTables, rotary_table, rotate

AttentionKind = Literal["eager", "fused"]

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,  # arXiv 1606.08415, section 2
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}

INITIAL_STD = 0.02  # GPT-2 (Radford et al. 2019), whose residual projections are divided by sqrt(2 L) (section 2.3)


class NormLayer(nn.Module):
    """LayerNorm (arXiv 1607.06450) or RMSNorm (arXiv 1910.07467, equation 4) over the last axis: (..., S)."""

    def __init__(self, spec: Norm, width: int) -> None:
        super().__init__()
        self.spec = spec
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width)) if spec.bias else None

    def initialise(self) -> None:
        """The identity gain, and no offset."""
        nn.init.constant_(self.weight, 0.0 if self.spec.unit_offset else 1.0)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        gain_S = 1 + self.weight if self.spec.unit_offset else self.weight
        if self.spec.kind == "layer":
            return F.layer_norm(x, gain_S.shape, gain_S, self.bias, self.spec.eps)
        return F.rms_norm(x, gain_S.shape, gain_S, self.spec.eps)


def build_norm(spec: Norm | None, width: int) -> nn.Module:
    """The norm of a spec; the identity, with no parameters, for None."""
    return nn.Identity() if spec is None else NormLayer(spec, width)


def causal_mask(tokens: int, window: int | None, device: torch.device) -> Tensor:
    """(T, T), true where a query (row) sees a key (column): itself and what precedes it, ``window`` in all."""
    mask_TT = torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril()
    return mask_TT if window is None else mask_TT.triu(1 - window)


def eager_attention(q_BNTH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, mask_TT: Tensor, scale: float) -> Tensor:
    """softmax(scale q k') v in three steps (arXiv 1706.03762, equation 1): (B, N, T, H)."""
    group = q_BNTH.shape[1] // k_BKTH.shape[1]
    k_BNTH, v_BNTH = k_BKTH.repeat_interleave(group, 1), v_BKTH.repeat_interleave(group, 1)
    scores_BNTT = (q_BNTH @ k_BNTH.transpose(-2, -1)) * scale
    return torch.where(mask_TT, scores_BNTT, -math.inf).softmax(-1) @ v_BNTH


def fused_attention(q_BNTH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, window: int | None, scale: float) -> Tensor:
    """The same in one call of PyTorch's: (B, N, T, H). Only a window that cuts something costs a mask."""
    tokens, grouped = q_BNTH.shape[2], q_BNTH.shape[1] != k_BKTH.shape[1]
    mask_TT = None if window is None or window >= tokens else causal_mask(tokens, window, q_BNTH.device)
    return F.scaled_dot_product_attention(
        q_BNTH, k_BKTH, v_BKTH, mask_TT, is_causal=mask_TT is None, scale=scale, enable_gqa=grouped
    )


class AttentionLayer(nn.Module):
    """Multi-head (arXiv 1706.03762, section 3.2.2) or grouped-query attention (arXiv 2305.13245, section 2.2).

    ``eager`` keeps GPT-2's persistent buffer ``mask``, (context, context), of what a token may attend to.
    """

    mask: Tensor

    def __init__(self, spec: Attention, width: int, context: int, kind: AttentionKind) -> None:
        super().__init__()
        self.spec, self.kind = spec, kind
        self.scale = spec.head_dim**-0.5 if spec.scale is None else spec.scale
        query_span, key_span = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        per_head = spec.qk_norm_span == "head"
        self.query = nn.Linear(width, query_span, bias=spec.bias)
        self.key = nn.Linear(width, key_span, bias=spec.bias)
        self.value = nn.Linear(width, key_span, bias=spec.bias)
        self.output = nn.Linear(query_span, width, bias=spec.output_bias)
        self.query_norm = build_norm(spec.qk_norm, spec.head_dim if per_head else query_span)
        self.key_norm = build_norm(spec.qk_norm, spec.head_dim if per_head else key_span)
        if kind == "eager":
            self.register_buffer("mask", torch.empty(context, context, dtype=torch.bool))

    def initialise(self) -> None:
        """Fill the mask."""
        if self.kind == "eager":
            self.mask.copy_(causal_mask(len(self.mask), self.spec.window, self.mask.device))

    def split_heads(self, x_BTS: Tensor, norm: nn.Module) -> Tensor:
        """(B, T, heads H) to (B, heads, T, H), normalised over the whole span before or over each head after."""
        if self.spec.qk_norm_span == "full":
            x_BTS = norm(x_BTS)
        x_BTNH = torch.unflatten(x_BTS, -1, (-1, self.spec.head_dim))
        if self.spec.qk_norm_span == "head":
            x_BTNH = norm(x_BTNH)
        return x_BTNH.transpose(1, 2)

    def forward(self, x_BTD: Tensor, tables: RotaryTables) -> Tensor:
        q_BNTH = self.split_heads(self.query(x_BTD), self.query_norm)
        k_BKTH = self.split_heads(self.key(x_BTD), self.key_norm)
        v_BKTH = torch.unflatten(self.value(x_BTD), -1, (-1, self.spec.head_dim)).transpose(1, 2)
        if (rotary := self.spec.rotary) is not None:
            q_BNTH, k_BKTH = (rotate(heads, rotary, tables[rotary]) for heads in (q_BNTH, k_BKTH))
        if self.kind == "eager":
            tokens = x_BTD.shape[1]
            mixed_BNTH = eager_attention(q_BNTH, k_BKTH, v_BKTH, self.mask[:tokens, :tokens], self.scale)
        else:
            mixed_BNTH = fused_attention(q_BNTH, k_BKTH, v_BKTH, self.spec.window, self.scale)
        out_BTD: Tensor = self.output(mixed_BNTH.transpose(1, 2).flatten(2))
        return out_BTD


def build_attention(spec: Attention | LatentAttention, width: int, context: int, kind: AttentionKind) -> AttentionLayer:
    """The attention of a spec; ValueError for a component that this decoder does not build."""
    if isinstance(spec, LatentAttention):
        raise ValueError("this decoder does not build LatentAttention, only Attention")
    if spec.sinks or spec.softcap is not None:
        raise ValueError("this decoder does not build attention sinks or an attention softcap")
    return AttentionLayer(spec, width, context, kind)


class FeedForwardLayer(nn.Module):
    """down(act(up x)), or when gated down(act(gate x) * up x) (arXiv 2002.05202, equation 6): (B, T, D)."""

    def __init__(self, spec: FeedForward, width: int) -> None:
        super().__init__()
        self.spec = spec
        self.gate = nn.Linear(width, spec.width, bias=spec.bias) if spec.gated else None
        self.up = nn.Linear(width, spec.width, bias=spec.bias)
        self.down = nn.Linear(spec.width, width, bias=spec.bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        up = self.up(x_BTD)
        act = ACTIVATIONS[self.spec.activation]
        out_BTD: Tensor = self.down(act(up) if self.gate is None else act(self.gate(x_BTD)) * up)
        return out_BTD


def build_feed_forward(spec: FeedForward | Experts, width: int) -> FeedForwardLayer:
    """The feed-forward of a spec; ValueError for a component that this decoder does not build."""
    if isinstance(spec, Experts):
        raise ValueError("this decoder does not build Experts, only FeedForward")
    if spec.clamp is not None or spec.gain != 1.0:
        raise ValueError("this decoder does not build a feed-forward with a clamp or a gain")
    return FeedForwardLayer(spec, width)


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

    def forward(self, x_BTD: Tensor, tables: RotaryTables) -> Tensor:
        x_BTD = x_BTD + self.attention_post_norm(self.attention(self.attention_norm(x_BTD), tables))
        out_BTD: Tensor = x_BTD + self.feed_forward_post_norm(self.feed_forward(self.feed_forward_norm(x_BTD)))
        return out_BTD


class Decoder(nn.Module):
    """Tokens (B, T) to logits (B, T, V). A tied head is the token table: the same Parameter object.

    ``attention``: ``eager`` writes the scores out and keeps a mask, ``fused`` leaves both to PyTorch's kernel.
    Raises ValueError for a component that it does not build. After ``to_empty`` call ``initialise``, which also
    fills the masks and ties the head again, and load weights after that.
    """

    def __init__(self, spec: ModelSpec, *, attention: AttentionKind = "fused") -> None:
        super().__init__()
        if attention not in get_args(AttentionKind):
            raise ValueError(f"attention: expected one of {get_args(AttentionKind)}, got {attention!r}")
        self.spec = spec
        self.embedding = nn.Embedding(spec.vocab, spec.width)
        self.position = nn.Embedding(spec.context, spec.width) if spec.learned_positions else None
        self.blocks = nn.ModuleList(DecoderBlock(block, spec.width, spec.context, attention) for block in spec.blocks)
        self.norm = build_norm(spec.final_norm, spec.width)
        self.head = nn.Linear(spec.width, spec.vocab, bias=False, device="meta" if spec.tied else None)
        self.initialise()

    @torch.no_grad()
    def initialise(self) -> None:
        """Tie the head, fill the masks, and draw the weights as GPT-2 does, from torch's global generator."""
        if self.spec.tied:
            self.head.weight = self.embedding.weight
        modules = list(self.modules())
        residual = {module.output for module in modules if isinstance(module, AttentionLayer)}
        residual |= {module.down for module in modules if isinstance(module, FeedForwardLayer)}
        for module in modules:
            if isinstance(module, nn.Linear | nn.Embedding):
                depth = 2 * len(self.blocks) if module in residual else 1
                nn.init.normal_(module.weight, std=INITIAL_STD / math.sqrt(depth))
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
            if isinstance(module, NormLayer | AttentionLayer):
                module.initialise()

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Logits (B, T, V) for token ids (B, T), int64; ValueError for more tokens than the context."""
        tokens, device = tokens_BT.shape[1], tokens_BT.device
        if tokens > self.spec.context:
            raise ValueError(f"a sequence of {tokens} tokens is longer than the context of {self.spec.context}")
        x_BTD = self.embedding(tokens_BT)
        if self.spec.embedding_scale is not None:
            x_BTD = x_BTD * self.spec.embedding_scale
        if self.position is not None:
            x_BTD = x_BTD + self.position(torch.arange(tokens, device=device))
        rotaries = {block.attention.rotary for block in self.spec.blocks if block.attention.rotary is not None}
        tables = {rotary: rotary_table(rotary, tokens, device, x_BTD.dtype) for rotary in rotaries}
        for block in self.blocks:
            x_BTD = block(x_BTD, tables)
        logits_BTV: Tensor = self.head(self.norm(x_BTD))
        if (cap := self.spec.logit_softcap) is not None:
            logits_BTV = cap * torch.tanh(logits_BTV / cap)
        return logits_BTV
