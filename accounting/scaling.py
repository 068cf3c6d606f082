"""The loss surface of scaling laws, and the split of a budget that minimises it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSurface:
    """L(N, D) = E + A / N^alpha + B / D^beta (Hoffmann et al. 2022, arXiv 2203.15556, equation 2).

    N parameters, D tokens, or any units of the two in which the constants are stated.
    """

    E: float
    A: float
    B: float
    alpha: float
    beta: float

    def __post_init__(self) -> None:
        for name in ("A", "B", "alpha", "beta"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: expected a positive number, got {getattr(self, name)}")

    def loss(self, parameters: float, tokens: float) -> float:
        """The loss of a model of this size after these tokens; both positive."""
        capacity: float = self.A / parameters**self.alpha
        estimation: float = self.B / tokens**self.beta
        return self.E + capacity + estimation

    def optimum(self, product: float) -> tuple[float, float]:
        """The (N, D) of least loss among those with N D = ``product``.

        Hoffmann et al., equation 4, with ``product`` for C / 6: alpha A / N^alpha equals
        beta B / D^beta there. Raises ValueError unless the product is positive.
        """
        if not product > 0:
            raise ValueError(f"product: expected a positive number, got {product}")
        exponent = 1 / (self.alpha + self.beta)
        shift = (self.alpha * self.A / (self.beta * self.B)) ** exponent
        parameters: float = shift * product ** (self.beta * exponent)
        return parameters, product / parameters
