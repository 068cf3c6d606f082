"""Attention in PyTorch: masks, the softmax of scores in two ways, what is kept of earlier tokens, and grouped heads.

Dimension suffixes: B batch, T tokens, U tokens that they may see, D width, N query heads, K key/value heads, H numbers
that a query and a key share, V numbers of a value, S any span.
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accounting.spec import Attention
from model.torch_layers import build_norm
from model.torch_rotary import RotaryTables, rotate

AttentionKind = Literal["eager", "fused"]


def causal_mask(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """(T, U), true where a query (row), one of the last, sees a key (column): itself and before, ``window`` in all."""
    mask_TU = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    return mask_TU if window is None else mask_TU.triu(1 - window + keys - queries)


def eager_attention(
    q_BNTH: Tensor,
    k_BKUH: Tensor,
    v_BKUV: Tensor,
    mask_TU: Tensor,
    scale: float,
    *,
    softcap: float | None = None,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """softmax(scale q k') v in three steps (arXiv 1706.03762, equation 1): (B, N, T, V).

    ``softcap`` bounds the scores, c tanh(s / c) (arXiv 2408.00118, section 2). A head's sink takes its share of the
    softmax and has no value (arXiv 2508.10925, section 2).
    """
    group = q_BNTH.shape[1] // k_BKUH.shape[1]
    k_BNUH, v_BNUV = k_BKUH.repeat_interleave(group, 1), v_BKUV.repeat_interleave(group, 1)
    scores_BNTU = (q_BNTH @ k_BNUH.transpose(-2, -1)) * scale
    if softcap is not None:
        scores_BNTU = softcap * torch.tanh(scores_BNTU / softcap)
    scores_BNTU = torch.where(mask_TU, scores_BNTU, -math.inf)
    if sinks_N is None:
        return scores_BNTU.softmax(-1) @ v_BNUV
    sinks_BNT1 = sinks_N[:, None, None].expand(*scores_BNTU.shape[:-1], 1)
    return torch.cat((scores_BNTU, sinks_BNT1), -1).softmax(-1)[..., :-1] @ v_BNUV


def fused_attention(q_BNTH: Tensor, k_BKUH: Tensor, v_BKUV: Tensor, window: int | None, scale: float) -> Tensor:
    """The same in one call of PyTorch's: (B, N, T, V). Only what is not plainly causal costs a mask."""
    queries, keys = q_BNTH.shape[2], k_BKUH.shape[2]
    plain = queries == keys and (window is None or window >= keys)
    mask_TU = None if plain else causal_mask(queries, keys, window, q_BNTH.device)
    return F.scaled_dot_product_attention(
        q_BNTH, k_BKUH, v_BKUV, mask_TU, is_causal=plain, scale=scale, enable_gqa=q_BNTH.shape[1] != k_BKUH.shape[1]
    )


class Kept:
    """What a layer has of the tokens that it has met and a later one may see: two tensors with those along axis 2.

    Keys (B, K, U, H) and values (B, K, U, V), or of latent attention, unless ``expanded``, what these are made from.
    """

    def __init__(self, window: int | None, expanded: bool = False) -> None:
        self.window, self.expanded, self.met = window, expanded, 0
        self.parts: tuple[Tensor, Tensor] | None = None

    def extend(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """With those of more tokens; what no later token sees is let go."""
        self.met += left.shape[2]
        if self.parts is not None:
            left, right = torch.cat((self.parts[0], left), 2), torch.cat((self.parts[1], right), 2)
        self.parts = self.newest(left), self.newest(right)
        return left, right

    def newest(self, part: Tensor) -> Tensor:
        """What the window leaves, in memory of its own: a view would keep all."""
        if self.window is None or self.window >= part.shape[2]:
            return part.contiguous()
        return part[:, :, -self.window :].clone()


class SoftmaxAttention(nn.Module):
    """What attention of every kind ends in: values mixed by the causal softmax of scores, and projected.

    ``eager`` keeps GPT-2's persistent buffer ``mask``, (context, context), of what a token may attend to.
    """

    mask: Tensor
    output: nn.Linear

    def __init__(self, window: int | None, context: int, kind: AttentionKind, scale: float) -> None:
        super().__init__()
        self.window, self.kind, self.scale = window, kind, scale
        if kind == "eager":
            self.register_buffer("mask", torch.empty(context, context, dtype=torch.bool))

    def initialise(self) -> None:
        """Fill the mask."""
        if self.kind == "eager":
            self.mask.copy_(causal_mask(len(self.mask), len(self.mask), self.window, self.mask.device))

    def mix(
        self,
        q_BNTH: Tensor,
        k_BKUH: Tensor,
        v_BKUV: Tensor,
        *,
        softcap: float | None = None,
        sinks_N: Tensor | None = None,
    ) -> Tensor:
        """The layer's output (B, T, D). PyTorch's kernel knows no softcap and no sinks: these are written out."""
        queries, keys = q_BNTH.shape[2], k_BKUH.shape[2]
        if self.kind == "fused" and softcap is None and sinks_N is None:
            mixed_BNTV = fused_attention(q_BNTH, k_BKUH, v_BKUV, self.window, self.scale)
        else:
            if self.kind == "eager":
                mask_TU = self.mask[keys - queries : keys, :keys]
            else:
                mask_TU = causal_mask(queries, keys, self.window, q_BNTH.device)
            mixed_BNTV = eager_attention(q_BNTH, k_BKUH, v_BKUV, mask_TU, self.scale, softcap=softcap, sinks_N=sinks_N)
        out_BTD: Tensor = self.output(mixed_BNTV.transpose(1, 2).flatten(2))
        return out_BTD


class AttentionLayer(SoftmaxAttention):
    """Multi-head (arXiv 1706.03762, section 3.2.2) or grouped-query attention (arXiv 2305.13245, section 2.2)."""

    def __init__(self, spec: Attention, width: int, context: int, kind: AttentionKind) -> None:
        super().__init__(spec.window, context, kind, spec.head_dim**-0.5 if spec.scale is None else spec.scale)
        self.spec = spec
        query_span, key_span = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        per_head = spec.qk_norm_span == "head"
        self.query = nn.Linear(width, query_span, bias=spec.bias)
        self.key = nn.Linear(width, key_span, bias=spec.bias)
        self.value = nn.Linear(width, key_span, bias=spec.bias)
        self.output = nn.Linear(query_span, width, bias=spec.output_bias)
        self.query_norm = build_norm(spec.qk_norm, spec.head_dim if per_head else query_span)
        self.key_norm = build_norm(spec.qk_norm, spec.head_dim if per_head else key_span)
        self.sinks = nn.Parameter(torch.empty(spec.heads)) if spec.sinks else None

    def initialise(self) -> None:
        """Fill the mask; a sink begins as a score of 0."""
        super().initialise()
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)

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
        return self.mix(q_BNTH, k_BKUH, v_BKUH, softcap=self.spec.softcap, sinks_N=self.sinks)
