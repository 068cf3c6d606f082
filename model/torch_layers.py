"""The parts of a layer in PyTorch that know nothing of its neighbours: affine maps, norms and feed-forwards.

Dimension suffixes: B batch, T tokens, M tokens of the whole batch, D width, F features that come out, S any span that
goes in. A linear weight is stored (out, in).
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accounting.spec import Activation, FeedForward, Norm

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,  # arXiv 1606.08415, section 2
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}

ALIGNED = 8  # numbers in a row that fill whole vectors: 32 bytes in float32, and cuBLAS asks for 16 bytes in bfloat16


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


class FeedForwardLayer(nn.Module):
    """down(act(up x)), or when gated down(act(gate x) * up x) (arXiv 2002.05202, equation 6): (B, T, D)."""

    def __init__(self, spec: FeedForward, width: int) -> None:
        super().__init__()
        self.spec = spec
        self.gate = WideLinear(width, spec.width, bias=spec.bias) if spec.gated else None
        self.up = WideLinear(width, spec.width, bias=spec.bias)
        self.down = nn.Linear(spec.width, width, bias=spec.bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        up_BTF = self.up(x_BTD)
        act = ACTIVATIONS[self.spec.activation]
        inner_BTF = act(up_BTF) if self.gate is None else self.meet(act, self.gate(x_BTD), up_BTF)
        out_BTD: Tensor = self.down(inner_BTF)
        return out_BTD

    def meet(self, act: Callable[[Tensor], Tensor], gate_BTF: Tensor, up_BTF: Tensor) -> Tensor:
        """act(gate) * up, with what gpt-oss does to the two (arXiv 2508.10925; its code's ``swiglu``)."""
        spec = self.spec
        if spec.clamp is not None:
            gate_BTF, up_BTF = gate_BTF.clamp(max=spec.clamp), up_BTF.clamp(-spec.clamp, spec.clamp)
        if spec.up_offset:
            up_BTF = up_BTF + spec.up_offset
        if spec.gain != 1:
            return gate_BTF * torch.sigmoid(spec.gain * gate_BTF) * up_BTF
        return act(gate_BTF) * up_BTF
