"""Multi-head latent attention in PyTorch: DeepSeek's keys and values that pass through a bottleneck.

Dimension suffixes: B batch, T tokens, U tokens that they may see, D width, N heads, H numbers that a query and a key
share, V numbers of a value, R rank of the latent, P rotated numbers, 1 the one key that all heads share.
"""

import torch
from torch import Tensor, nn

from accounting.spec import LatentAttention
from model.torch_attention import AttentionKind, Kept, SoftmaxAttention
from model.torch_layers import build_norm
from model.torch_rotary import RotaryTables, rotate, score_magnitude


class LatentAttentionLayer(SoftmaxAttention):
    """Multi-head latent attention (arXiv 2405.04434, section 2.1; arXiv 2412.19437, section 2.1.1).

    Each token is kept as its latent and one rotated key, from which the keys and values of all heads are made, or
    ``expanded`` as these.
    """

    def __init__(self, spec: LatentAttention, width: int, context: int, kind: AttentionKind) -> None:
        super().__init__(spec.window, context, kind, spec.score_width**-0.5 * score_magnitude(spec.rotary))
        self.spec = spec
        query_span = spec.heads * spec.score_width
        if spec.query_rank is None:
            self.query = nn.Linear(width, query_span, bias=False)
        else:
            self.query_down = nn.Linear(width, spec.query_rank, bias=spec.bias)
            self.query_norm = build_norm(spec.norm, spec.query_rank)
            self.query_up = nn.Linear(spec.query_rank, query_span, bias=False)
        self.kv_down = nn.Linear(width, spec.kv_rank + spec.rope_head_dim, bias=spec.bias)
        self.kv_norm = build_norm(spec.norm, spec.kv_rank)
        self.kv_up = nn.Linear(spec.kv_rank, spec.heads * (spec.nope_head_dim + spec.value_head_dim), bias=False)
        self.output = nn.Linear(spec.heads * spec.value_head_dim, width, bias=spec.bias)

    def queries(self, x_BTD: Tensor, tables: RotaryTables) -> Tensor:
        """(B, N, T, H), the last numbers of each head rotated."""
        spec = self.spec
        whole = spec.query_rank is None
        q_BTS = self.query(x_BTD) if whole else self.query_up(self.query_norm(self.query_down(x_BTD)))
        q_BNTH = torch.unflatten(q_BTS, -1, (spec.heads, -1)).transpose(1, 2)
        plain, turned = q_BNTH.split((spec.nope_head_dim, spec.rope_head_dim), -1)
        return torch.cat((plain, rotate(turned, spec.rotary, tables[spec.rotary])), -1)

    def compress(self, x_BTD: Tensor, tables: RotaryTables) -> tuple[Tensor, Tensor]:
        """The latent (B, 1, T, R) and the rotated key (B, 1, T, P) of each token."""
        spec = self.spec
        latent_BTR, key_BTP = self.kv_down(x_BTD).split((spec.kv_rank, spec.rope_head_dim), -1)
        key_B1TP = rotate(key_BTP[:, None], spec.rotary, tables[spec.rotary])
        return self.kv_norm(latent_BTR)[:, None], key_B1TP

    def expand(self, latent_B1UR: Tensor, key_B1UP: Tensor) -> tuple[Tensor, Tensor]:
        """Keys (B, N, U, H) and values (B, N, U, V)."""
        spec = self.spec
        both_BNUS = torch.unflatten(self.kv_up(latent_B1UR[:, 0]), -1, (spec.heads, -1)).transpose(1, 2)
        plain, v_BNUV = both_BNUS.split((spec.nope_head_dim, spec.value_head_dim), -1)
        return torch.cat((plain, key_B1UP.expand(-1, spec.heads, -1, -1)), -1), v_BNUV

    def forward(self, x_BTD: Tensor, tables: RotaryTables, kept: Kept | None = None) -> Tensor:
        compressed = self.compress(x_BTD, tables)
        if kept is not None and not kept.expanded:
            compressed = kept.extend(*compressed)
        k_BNUH, v_BNUV = self.expand(*compressed)
        if kept is not None and kept.expanded:
            k_BNUH, v_BNUV = kept.extend(k_BNUH, v_BNUV)
        return self.mix(self.queries(x_BTD, tables), k_BNUH, v_BNUV)
