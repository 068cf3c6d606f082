"""The field's named shortcuts for the FLOPs of training, each with its paper and what it leaves out.

Each takes a decoder, a length and a batch, and returns an integer next to which the exact count of
``accounting.flops`` can stand. Most were written for a dense decoder; of experts they charge those that serve one
token, unless their name says otherwise.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import Protocol

from accounting import flops, params
from accounting.census import Part, of
from accounting.spec import FeedForward, LatentAttention, ModelSpec


class InapplicableError(ValueError):
    """A shortcut was asked of a decoder that lacks what its formula names."""


def six_nd(parameters: int, tokens: int) -> int:
    """6 N D: training FLOPs, two forward and four backward a parameter and token.

    Kaplan et al. 2020, arXiv 2001.08361, section 2.1. Exact for the weights that a token is
    multiplied by, if ``parameters`` counts these (``matmul_active``); it leaves out the
    products of attention, and charges lookups, norms and idle experts if N holds them.
    """
    return 6 * parameters * tokens


def two_nd(parameters: int, tokens: int) -> int:
    """2 N D: FLOPs of the forward pass alone, as for ``six_nd``."""
    return 2 * parameters * tokens


def twenty_tokens(parameters: int) -> int:
    """20 N: the tokens of a compute-optimal run, as a rule of thumb.

    Hoffmann et al. 2022, arXiv 2203.15556, table 3, whose rows have 20 to 22.4.
    """
    return 20 * parameters


def kaplan_parameters(spec: ModelSpec) -> int:
    """12 L d^2: Kaplan et al. 2020, arXiv 2001.08361, equation 2.1.

    Exact for the matrices of a block with full-width multi-head attention and two
    feed-forward matrices of 4d. It leaves out norms, biases, both tables and the head, and
    does not see grouped heads, other widths or gated feed-forwards.
    """
    return 12 * len(spec.blocks) * spec.width**2


def attention_ratio(width: int, context: int) -> Fraction:
    """Attention's products over the linear work of blocks of 12 d^2 weights: n / (6 d).

    Every pair counted, exact for full-width multi-head attention. With the mask a token sees
    (n + 1) / 2 positions on average: see ``causal_attention_ratio``.
    """
    return Fraction(context, 6 * width)


def causal_attention_ratio(width: int, context: int) -> Fraction:
    """``attention_ratio`` for a token that sees half the context: n / (12 d).

    Kaplan et al. 2020, arXiv 2001.08361, section 2.1. Short of the causal mask's pairs by n of n (n + 1).
    """
    return Fraction(context, 12 * width)


def kaplan_forward(spec: ModelSpec, context: int) -> int:
    """2 N + 2 L n d: forward FLOPs of a token, with N non-embedding and d the heads' width together.

    Kaplan et al. 2020, arXiv 2001.08361, equation 2.2 and table 1. InapplicableError for latent attention.
    """
    return 2 * kaplan_non_embedding(spec) + 2 * context * _attention_width(spec)


def kaplan_non_embedding(spec: ModelSpec) -> int:
    """N without tables and head, of experts those that serve one token."""
    counts = params.count(spec)
    return counts.non_embedding - (counts.unique - counts.active)


class Count(Protocol):
    """Training FLOPs of ``batch`` sequences of ``seq`` tokens by some shortcut, which may end in a fraction of one.

    Raises InapplicableError where the decoder lacks what the formula names.
    """

    def __call__(self, spec: ModelSpec, *, seq: int, batch: int = 1) -> int | Fraction: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Convention:
    """A shortcut: its formula and where it stands, and what makes it differ from the exact count.

    ``linear``: in proportion to the tokens, whatever the length of a sequence.
    """

    formula: str
    source: str
    difference: str
    count: Count
    linear: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """What the ``CONVENTIONS`` say: FLOPs by those that apply, and in words why the others say nothing."""

    flops: dict[str, int]
    silent: dict[str, str]


def table(spec: ModelSpec, *, seq: int, batch: int = 1) -> Table:
    """Training FLOPs of ``batch`` sequences by each convention."""
    return run(spec, ((seq, batch),))


def run(spec: ModelSpec, sequences: Iterable[tuple[int, int]]) -> Table:
    """Training FLOPs by each convention of sequences of several lengths, each given with how many there are."""
    parts = list(sequences)
    flops: dict[str, int] = {}
    silent: dict[str, str] = {}
    for name, convention in CONVENTIONS.items():
        try:
            total = Fraction(sum(convention.count(spec, seq=seq, batch=batch) for seq, batch in parts))
        except InapplicableError as error:
            silent[name] = str(error)
            continue
        if total.denominator == 1:
            flops[name] = int(total)
        else:
            silent[name] = "no whole number of FLOPs at this length"
    return Table(flops, silent)


def _attention_width(spec: ModelSpec) -> int:
    """Query heads times head_dim, over all layers: L d for full-width heads."""
    widths = []
    for block in spec.blocks:
        if isinstance(block.attention, LatentAttention):
            raise InapplicableError("latent attention has two head widths and the formula one")
        widths.append(block.attention.heads * block.attention.head_dim)
    return sum(widths)


def _six_n(parameters: Callable[[ModelSpec], int]) -> Count:
    def count(spec: ModelSpec, *, seq: int, batch: int = 1) -> int:
        return six_nd(parameters(spec), batch * seq)

    return count


def _corrected(ratio: Callable[[int, int], Fraction]) -> Count:
    """6 N D (1 + ratio), with the N of matrix products."""

    def count(spec: ModelSpec, *, seq: int, batch: int = 1) -> Fraction:
        _attention_width(spec)  # refuses what has no one head width, as the ratio takes for granted
        return six_nd(params.count(spec).matmul_active, batch * seq) * (1 + ratio(spec.width, seq))

    return count


def _kaplan(spec: ModelSpec, *, seq: int, batch: int = 1) -> int:
    return 3 * batch * seq * kaplan_forward(spec, seq)


def _palm(parameters: Callable[[ModelSpec], int]) -> Count:
    def count(spec: ModelSpec, *, seq: int, batch: int = 1) -> int:
        return batch * seq * (6 * parameters(spec) + 12 * _attention_width(spec) * seq)

    return count


def _without_positions(spec: ModelSpec) -> int:
    return params.count(of(spec).where(lambda weight: weight.part is not Part.POSITION)).active


def _megatron_paper(spec: ModelSpec, *, seq: int, batch: int = 1) -> int:
    layers, width = len(spec.blocks), spec.width
    return batch * seq * (72 * layers * width**2 + 12 * layers * width * seq + 6 * spec.vocab * width)


def _megatron(spec: ModelSpec, *, seq: int, batch: int = 1) -> int:
    exact = flops.training(spec, seq=seq, batch=batch)
    products = seq * seq * sum(product.heads * product.width for product in of(spec).products)
    gains = sum(
        weight.scalars
        for weight in of(spec).weights
        if weight.layer is not None
        and isinstance(spec.blocks[weight.layer].attention, LatentAttention)
        and weight.name.endswith(("attention.query_norm.weight", "attention.kv_norm.weight"))
    )
    return exact.linear + exact.head + 3 * batch * products + six_nd(gains, batch * seq)


def _chinchilla(spec: ModelSpec, *, seq: int, batch: int = 1) -> int:
    width, heads_width = spec.width, _attention_width(spec)
    forward = 2 * 2 * seq * spec.vocab * width  # the lookup as a product, and the logits
    forward += 8 * seq * width * heads_width + 4 * seq * seq * heads_width
    for block in spec.blocks:
        if not isinstance(block.feed_forward, FeedForward):
            raise InapplicableError("experts have no one feed-forward width")
        forward += 3 * block.attention.heads * seq * seq + 4 * seq * width * block.feed_forward.width
    return 3 * batch * forward


KAPLAN = "Kaplan et al. 2020, arXiv 2001.08361"

CONVENTIONS: Mapping[str, Convention] = MappingProxyType(
    {
        "6nd_unique": Convention(
            formula="6 N D, N = unique",
            source=f"{KAPLAN}, section 2.1, with the headline count",
            difference="charges lookups, norms, biases and idle experts; no products of attention",
            count=_six_n(lambda spec: params.count(spec).unique),
            linear=True,
        ),
        "6nd_active": Convention(
            formula="6 N D, N = active",
            source=f"{KAPLAN}, section 2.1, with the headline count that serves a token",
            difference="charges lookups, norms and biases; no products of attention",
            count=_six_n(lambda spec: params.count(spec).active),
            linear=True,
        ),
        "6nd_non_embedding": Convention(
            formula="6 N D, N = non_embedding",
            source=f"{KAPLAN}, section 2.1",
            difference="charges norms, biases and idle experts; no head and no products of attention",
            count=_six_n(lambda spec: params.count(spec).non_embedding),
            linear=True,
        ),
        "6nd_matmul": Convention(
            formula="6 N D, N = matmul",
            source=f"{KAPLAN}, section 2.1, with every weight in a matrix product",
            difference="charges idle experts; no products of attention",
            count=_six_n(lambda spec: params.count(spec).matmul),
            linear=True,
        ),
        "6nd_matmul_active": Convention(
            formula="6 N D, N = matmul_active",
            source=f"{KAPLAN}, section 2.1, with the weights that a token is multiplied by",
            difference="no products of attention, nothing else",
            count=_six_n(lambda spec: params.count(spec).matmul_active),
            linear=True,
        ),
        "6nd_12ld2": Convention(
            formula="6 N D, N = 12 L d^2",
            source=f"{KAPLAN}, equation 2.1",
            difference="blocks as if of full-width heads and two matrices of 4 d; no head, no products of attention",
            count=_six_n(kaplan_parameters),
            linear=True,
        ),
        "kaplan": Convention(
            formula="3 (2 N + 2 L n d) D, N = non_embedding",
            source=f"{KAPLAN}, equation 2.2 and table 1",
            difference="charges norms and biases; no head; S^2/2 pairs for the causal S (S + 1)/2; no windows",
            count=_kaplan,
        ),
        "6nd_n_6d": Convention(
            formula="6 N D (1 + n/(6 d)), N = matmul_active",
            source="Dive into Deep Learning, section 11.7; every pair counted",
            difference="attention as n/(6 d) of all matrices, which holds for 12 d^2 a block and no head; S^2 pairs",
            count=_corrected(attention_ratio),
        ),
        "6nd_n_12d": Convention(
            formula="6 N D (1 + n/(12 d)), N = matmul_active",
            source=f"{KAPLAN}, section 2.1; half the pairs counted",
            difference="attention as n/(12 d) of all matrices, which holds for 12 d^2 a block and no head; S^2/2 pairs",
            count=_corrected(causal_attention_ratio),
        ),
        "palm": Convention(
            formula="(6 N + 12 L H Q T) D, N = active",
            source="Chowdhery et al. 2022, arXiv 2204.02311, appendix B",
            difference="charges lookups, norms and biases; S^2 pairs; no windows",
            count=_palm(lambda spec: params.count(spec).active),
        ),
        "nanogpt": Convention(
            formula="(6 N + 12 L H Q T) D, N = active less learned positions",
            source="nanoGPT, model.py, estimate_mfu; the formula of arXiv 2204.02311, appendix B",
            difference="charges an untied lookup, norms and biases; S^2 pairs; no windows",
            count=_palm(_without_positions),
        ),
        "megatron_paper": Convention(
            formula="72 B S L h^2 (1 + S/(6 h) + V/(12 L h))",
            source="Narayanan et al. 2021, arXiv 2104.04473, equation 3, less recomputation; "
            "Korthikanti et al. 2022, arXiv 2205.05198, appendix A",
            difference="blocks as if of full-width heads and two matrices of 4 h; S^2 pairs",
            count=_megatron_paper,
        ),
        "megatron": Convention(
            formula="6 (matrices less routers) D + 3 (scores + mixture) with S^2/2 pairs",
            source="Megatron-LM, megatron/training/training.py, num_floating_point_operations",
            difference="no routers; S^2/2 pairs for the causal S (S + 1)/2; no windows; "
            "charges the gains of latent norms, and there a padded vocabulary and prediction layers too",
            count=_megatron,
        ),
        "chinchilla": Convention(
            formula="3 (4 S V d + L (8 S d k H + 4 S^2 k H + 3 H S^2 + 4 S d f))",
            source="Hoffmann et al. 2022, arXiv 2203.15556, appendix F",
            difference="charges the lookup as a product and 3 FLOPs an entry of the softmax; S^2 pairs; "
            "keys and values as wide as queries; two feed-forward matrices",
            count=_chinchilla,
        ),
        "hf_trainer": Convention(
            formula="6 N D, N = unique less embedding",
            source="transformers, trainer.py, Trainer.floating_point_ops",
            difference="charges norms, biases and idle experts; no products of attention; a tied head is left out, "
            "an untied one is not",
            count=_six_n(lambda spec: params.count(spec).unique - params.count(spec).embedding),
            linear=True,
        ),
    }
)
