"""The field's named shortcuts, each with its paper and what it leaves out of the exact count."""

from accounting.spec import ModelSpec


def kaplan_parameters(spec: ModelSpec) -> int:
    """12 L d^2: Kaplan et al. 2020, arXiv 2001.08361, equation 2.1.

    Exact for the matrices of a block with full-width multi-head attention and two
    feed-forward matrices of 4d. It leaves out norms, biases, both tables and the head, and
    does not see grouped heads, other widths or gated feed-forwards.
    """
    return 12 * len(spec.blocks) * spec.width**2


def six_nd(parameters: int, tokens: int) -> int:
    """6 N D: training FLOPs, two forward and four backward a parameter and token.

    Kaplan et al. 2020, arXiv 2001.08361, section 2.1. Exact for the weights that a token is
    multiplied by, if ``parameters`` counts these (``matmul_active``); it leaves out the
    products of attention, and charges lookups, norms and idle experts if N holds them.
    """
    return 6 * parameters * tokens
