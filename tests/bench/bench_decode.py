"""Decoding with a key/value cache against recomputing every token before, side by side."""

from time import perf_counter

import torch

from accounting import flops, pairs
from model.recipes import RECIPES
from model.torch_decoder import Decoder
from model.torch_generate import generate

SPEC, BATCH, PROMPT, NEW = RECIPES["d2l-default"], 4, 16, 256


def test_cached_decoding_is_5_times_faster(benchmark):
    """The same 256 tokens of four sequences of the textbook's model; in FLOPs the cache saves far more.

    A step reads every weight for one token of each sequence. Of one sequence alone it is bound by that, and by what
    it costs to call its operators: there the cache is three to six times faster.
    """
    torch.manual_seed(0)
    decoder, start = Decoder(SPEC), torch.randint(SPEC.vocab, (BATCH, PROMPT))

    def recomputed():
        before = perf_counter()
        tokens, _ = generate(decoder, start, NEW, cached=False)
        return perf_counter() - before, tokens

    seconds, expected = recomputed()
    tokens, _ = benchmark.pedantic(generate, args=(decoder, start, NEW), rounds=3, warmup_rounds=1)
    assert torch.equal(tokens, expected)
    steps = range(PROMPT, PROMPT + NEW)
    again = sum(flops.forward(SPEC, seq=length).total for length in steps)
    once = flops.forward(SPEC, seq=PROMPT).total + sum(
        flops.forward(SPEC, seq=1, pairs=pairs.cached(length)).total for length in steps[:-1]
    )
    ratio = seconds / benchmark.stats.stats.min
    benchmark.extra_info.update(ratio=ratio, flops_ratio=again / once)
    assert ratio >= 5
