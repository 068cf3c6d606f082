"""Bytes of key/value caches: what each layer keeps of the tokens that it has seen.

A cache is a curve by length, and a window bends it: it has no one slope. Bytes are integers,
and a gigabyte is nobody's guess here: who prints one says whether it is GB or GiB.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from accounting.memory import DTYPE_BYTES
from accounting.spec import Attention, LatentAttention, ModelSpec

#: How many tokens a layer keeps of those seen, given its window (None: it sees to the start).
Policy = Callable[[int, int | None], int]

#: A length at which no cache that grows is within any budget: at a byte a token it is 10^42 bytes.
LONGEST = 2**140


def minimum(tokens: int, window: int | None) -> int:
    """What the architecture needs: a window's tokens, the newest included."""
    return tokens if window is None else min(tokens, window)


def huggingface(tokens: int, window: int | None) -> int:
    """What transformers keeps between steps: a window without the token that is to come.

    Of a window of one it keeps all: its slice of the last 0 tokens is the whole.
    """
    return tokens if window is None or window == 1 else min(tokens, window - 1)


def uniform(tokens: int, _window: int | None) -> int:
    """Pages of one size for all layers: a window saves nothing."""
    return tokens


POLICIES: Mapping[str, Policy] = MappingProxyType({"minimum": minimum, "huggingface": huggingface, "uniform": uniform})


def scalars(attention: Attention | LatentAttention, *, expanded: bool = False) -> int:
    """Numbers that a layer keeps of one token.

    A key and a value for each key/value head (2 n_kv d_h). Latent attention keeps what it
    compresses and the rotated part of the key (arXiv 2412.19437, section 2.1.1), or
    ``expanded`` every head's key and value.
    """
    if isinstance(attention, Attention):
        return 2 * attention.kv_heads * attention.head_dim
    if expanded:
        return attention.heads * (attention.score_width + attention.value_width)
    return attention.kv_rank + attention.rope_head_dim


def by_layer(
    spec: ModelSpec,
    tokens: int,
    *,
    batch: int = 1,
    dtype: str = "bfloat16",
    policy: Policy = minimum,
    expanded: bool = False,
) -> tuple[int, ...]:
    """Bytes that each layer keeps after ``tokens`` tokens of each of ``batch`` sequences.

    Raises ValueError for a negative number of tokens, for a batch below 1, and KeyError for a dtype that
    ``memory.DTYPE_BYTES`` does not have.
    """
    if tokens < 0 or batch < 1:
        raise ValueError(f"expected at least 0 tokens of at least 1 sequence, got {tokens} of {batch}")
    size = batch * DTYPE_BYTES[dtype]
    return tuple(
        size * policy(tokens, block.attention.window) * scalars(block.attention, expanded=expanded)
        for block in spec.blocks
    )


def total(
    spec: ModelSpec,
    tokens: int,
    *,
    batch: int = 1,
    dtype: str = "bfloat16",
    policy: Policy = minimum,
    expanded: bool = False,
) -> int:
    """Bytes of all layers; see ``by_layer``."""
    return sum(by_layer(spec, tokens, batch=batch, dtype=dtype, policy=policy, expanded=expanded))


def most_tokens(size: Callable[[int], int], budget: int) -> int | None:
    """The most tokens whose bytes, by ``size``, are within ``budget``; None where more never cost more.

    An exact search: ``size`` must not fall as tokens grow. Raises ValueError where none fit.
    """
    if size(0) > budget:
        raise ValueError(f"{size(0):,} bytes are needed before the first token, of {budget:,}")
    if size(LONGEST) <= budget:
        return None
    low, high = 0, LONGEST
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if size(middle) <= budget else (low, middle)
    return low
