"""The minimal decoder in PyTorch, assembled from a ``ModelSpec``: every dense architecture that a spec can say.

Dimension suffixes: B batch, T tokens, U tokens that they may see, M tokens of the whole batch, V vocabulary, D width,
N query heads, K key/value heads, H head_dim, F features that come out, S any span that goes in. A linear weight is
stored (out, in).
Parameter names are canonical: the JAX twin and the census use the same.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from accounting.spec import Activation, Attention, Block, Experts, FeedForward, LatentAttention, ModelSpec, Norm
from model.torch_rotary import RotaryTables, rotary_table, rotate

AttentionKind = Literal["eager", "fused"]

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,  # arXiv 1606.08415, section 2
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}

ALIGNED = 8  # numbers in a row that fill whole vectors: 32 bytes in float32, and cuBLAS asks for 16 bytes in bfloat16
INITIAL_STD = 0.02  # GPT-2 (Radford et al. 2019), whose residual projections are divided by sqrt(2 L) (section 2.3)


class WideLinear(nn.Linear):
    """An affine map to a width that need not be aligned, such as the 683 of a SwiGLU: (B, T, F).

    BLAS writes rows that begin off a vector's bounds at two thirds of its speed. There, features come first in memory,
    so that rows are as long as the batch has tokens, and what is returned is a view.
    """

    def forward(self, x_BTS: Tensor) -> Tensor:
        if self.out_features % ALIGNED == 0:
            return super().forward(x_BTS)
        x_SM = x_BTS.flatten(0, 1).t()
        y_FM = self.weight @ x_SM if self.bias is None else torch.addmm(self.bias[:, None], self.weight, x_SM)
        y_BTF: Tensor = y_FM.t().unflatten(0, x_BTS.shape[:2])
        return y_BTF


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


def causal_mask(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """(T, U), true where a query (row), one of the last, sees a key (column): itself and before, ``window`` in all."""
    mask_TU = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    return mask_TU if window is None else mask_TU.triu(1 - window + keys - queries)


def eager_attention(q_BNTH: Tensor, k_BKUH: Tensor, v_BKUH: Tensor, mask_TU: Tensor, scale: float) -> Tensor:
    """softmax(scale q k') v in three steps (arXiv 1706.03762, equation 1): (B, N, T, H)."""
    group = q_BNTH.shape[1] // k_BKUH.shape[1]
    k_BNUH, v_BNUH = k_BKUH.repeat_interleave(group, 1), v_BKUH.repeat_interleave(group, 1)
    scores_BNTU = (q_BNTH @ k_BNUH.transpose(-2, -1)) * scale
    return torch.where(mask_TU, scores_BNTU, -math.inf).softmax(-1) @ v_BNUH


def fused_attention(q_BNTH: Tensor, k_BKUH: Tensor, v_BKUH: Tensor, window: int | None, scale: float) -> Tensor:
    """The same in one call of PyTorch's: (B, N, T, H). Only what is not plainly causal costs a mask."""
    queries, keys = q_BNTH.shape[2], k_BKUH.shape[2]
    plain = queries == keys and (window is None or window >= keys)
    mask_TU = None if plain else causal_mask(queries, keys, window, q_BNTH.device)
    return F.scaled_dot_product_attention(
        q_BNTH, k_BKUH, v_BKUH, mask_TU, is_causal=plain, scale=scale, enable_gqa=q_BNTH.shape[1] != k_BKUH.shape[1]
    )


class Kept:
    """Keys and values of the tokens that a layer has met and a later one may see: (B, K, U, H) each."""

    def __init__(self, window: int | None) -> None:
        self.window, self.met = window, 0
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def extend(self, k_BKTH: Tensor, v_BKTH: Tensor) -> tuple[Tensor, Tensor]:
        """With those of more tokens; what no later token sees is let go."""
        self.met += k_BKTH.shape[2]
        if self.keys is not None and self.values is not None:
            k_BKTH, v_BKTH = torch.cat((self.keys, k_BKTH), 2), torch.cat((self.values, v_BKTH), 2)
        self.keys, self.values = (self.newest(x_BKUH) for x_BKUH in (k_BKTH, v_BKTH))
        return k_BKTH, v_BKTH

    def newest(self, x_BKUH: Tensor) -> Tensor:
        """What the window leaves, in memory of its own: a view would keep all."""
        if self.window is None or self.window >= x_BKUH.shape[2]:
            return x_BKUH.contiguous()
        return x_BKUH[:, :, -self.window :].clone()


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
            self.mask.copy_(causal_mask(len(self.mask), len(self.mask), self.spec.window, self.mask.device))

    def split_heads(self, x_BTS: Tensor, norm: nn.Module) -> Tensor:
        """(B, T, heads H) to (B, heads, T, H), normalised over the whole span before or over each head after."""
        if self.spec.qk_norm_span == "full":
            x_BTS = norm(x_BTS)
        x_BTNH = torch.unflatten(x_BTS, -1, (-1, self.spec.head_dim))
        if self.spec.qk_norm_span == "head":
            x_BTNH = norm(x_BTNH)
        return x_BTNH.transpose(1, 2)

    def forward(self, x_BTD: Tensor, tables: RotaryTables, kept: Kept | None = None) -> Tensor:
        q_BNTH = self.split_heads(self.query(x_BTD), self.query_norm)
        k_BKUH = self.split_heads(self.key(x_BTD), self.key_norm)
        v_BKUH = torch.unflatten(self.value(x_BTD), -1, (-1, self.spec.head_dim)).transpose(1, 2)
        if (rotary := self.spec.rotary) is not None:
            q_BNTH, k_BKUH = (rotate(heads, rotary, tables[rotary]) for heads in (q_BNTH, k_BKUH))
        if kept is not None:
            k_BKUH, v_BKUH = kept.extend(k_BKUH, v_BKUH)
        if self.kind == "eager":
            queries, keys = q_BNTH.shape[2], k_BKUH.shape[2]
            mixed_BNTH = eager_attention(q_BNTH, k_BKUH, v_BKUH, self.mask[keys - queries : keys, :keys], self.scale)
        else:
            mixed_BNTH = fused_attention(q_BNTH, k_BKUH, v_BKUH, self.spec.window, self.scale)
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
        self.gate = WideLinear(width, spec.width, bias=spec.bias) if spec.gated else None
        self.up = WideLinear(width, spec.width, bias=spec.bias)
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

    def forward(self, x_BTD: Tensor, tables: RotaryTables, kept: Kept | None = None) -> Tensor:
        x_BTD = x_BTD + self.attention_post_norm(self.attention(self.attention_norm(x_BTD), tables, kept))
        out_BTD: Tensor = x_BTD + self.feed_forward_post_norm(self.feed_forward(self.feed_forward_norm(x_BTD)))
        return out_BTD


class Decoder(nn.Module):
    """Tokens (B, T) to logits (B, T, V). A tied head is the token table: the same Parameter object.

    ``attention``: ``eager`` writes the scores out and keeps a mask, ``fused`` leaves both to PyTorch's kernel.
    ``recompute``: the backward pass runs each block again, and nothing inside it is kept. Raises ValueError for a
    component that it does not build. After ``to_empty`` call ``initialise``, which also fills the masks and ties the
    head again, and load weights after that.
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

    def keep(self) -> list[Kept]:
        """What the layers keep of no token yet."""
        return [Kept(block.attention.window) for block in self.spec.blocks]

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
