"""A language whose entropy rate is known: a Markov chain over symbols, seeded, in float64.

Dimension suffixes: B batch, T tokens, V symbols.
"""

from functools import cached_property

import torch
from torch import Tensor


class MarkovSource:
    """The chain of transition logits Q diag(k^-decay) R', with Q and R normal and k = 1..V.

    The spectrum falls as a power of the rank, so that a model of more width has more left to learn.
    ``transition_VV`` is the probability of the next symbol (column) after each (row).
    """

    def __init__(self, *, symbols: int = 64, decay: float = 0.7, seed: int = 0) -> None:
        self.symbols, self.decay, self.seed = symbols, decay, seed
        generator = torch.Generator().manual_seed(seed)
        left_VV, right_VV = torch.randn(2, symbols, symbols, generator=generator, dtype=torch.float64)
        spectrum_V = torch.arange(1, symbols + 1, dtype=torch.float64) ** -decay
        self.transition_VV = ((left_VV * spectrum_V) @ right_VV.T).softmax(-1)
        self._log_VV = self.transition_VV.log()
        self._cumulative_VV = self.transition_VV.cumsum(-1)

    @cached_property
    def stationary(self) -> Tensor:
        """The distribution p that the chain keeps, p P = p: (V,)."""
        balance_VV = self.transition_VV.T - torch.eye(self.symbols, dtype=torch.float64)
        balance_VV[-1] = 1  # one of the V equations follows from the others; in its place the sum is one
        one_V = torch.zeros(self.symbols, dtype=torch.float64)
        one_V[-1] = 1
        kept_V: Tensor = torch.linalg.solve(balance_VV, one_V)
        return kept_V

    @cached_property
    def entropy(self) -> Tensor:
        """Nats of the next symbol after each symbol: (V,)."""
        return -torch.einsum("vw,vw->v", self.transition_VV, self._log_VV)

    @property
    def entropy_rate(self) -> float:
        """Nats a token: what no model of the language gets below (Cover and Thomas, theorem 4.2.4)."""
        return float(self.stationary @ self.entropy)

    def sample(self, sequences: int, tokens: int, generator: torch.Generator) -> Tensor:
        """Sequences of the stationary chain, (B, T) int64, from a generator on the CPU."""
        draw_TB1 = torch.rand(tokens, sequences, 1, generator=generator, dtype=torch.float64)
        bounds_BV = self.stationary.cumsum(0).repeat(sequences, 1)
        symbols = []
        for draw_B1 in draw_TB1:
            # Rounding may leave the last bound below one, and a draw above it.
            symbols.append(torch.searchsorted(bounds_BV, draw_B1).clamp_(max=self.symbols - 1))
            bounds_BV = self._cumulative_VV[symbols[-1][:, 0]]
        return torch.cat(symbols, 1)

    def surprise(self, symbols_BT: Tensor) -> Tensor:
        """Nats of each symbol but the first under the chain itself: (B, T - 1)."""
        nats_BT: Tensor = -self._log_VV[symbols_BT[:, :-1], symbols_BT[:, 1:]]
        return nats_BT

    def divergence(self, logits_BTV: Tensor, symbols_BT: Tensor) -> Tensor:
        """Kullback-Leibler divergence of a model's next symbol from the chain's, after each symbol: (B, T), in nats.

        Its mean is the excess of the model's expected loss over the floor, without the noise of drawn targets.
        """
        log_BTV = logits_BTV.double().log_softmax(-1).cpu()
        nats_BT: Tensor = (self.transition_VV[symbols_BT] * (self._log_VV[symbols_BT] - log_BTV)).sum(-1)
        return nats_BT
