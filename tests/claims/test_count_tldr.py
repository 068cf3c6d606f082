"""Claims of the counting essay's summary on the rule 6 N D."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accounting import flops, huggingface, pairs
from accounting.authorities import huggingface as modules
from accounting.authorities import torch_counter
from accounting.conventions import six_nd
from accounting.huggingface import published_config
from tests import strategies

# A training step takes as long as ten modules to build.
FEWER = settings(max_examples=settings.default.max_examples // 5)


def training_step(config, tokens):
    """Hugging Face's module on meta, and the FLOPs that torch counts in its training step over one sequence."""
    module = modules.build(config, attn_implementation="eager")
    ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")

    def step():
        module(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits.sum().backward()

    return module, torch_counter.count(step)


@pytest.mark.claim("count.tldr.two_left_out")
def test_six_nd_leaves_out_two_things(claim):
    """6 N D over all matrices charges the lookup, which is free, and forgets attention's products; nothing else."""

    def left_out(config, tokens):
        module, counted = training_step(config, tokens)
        matrices = sum(tensor.numel() for tensor in module.parameters() if tensor.ndim == 2)
        table = module.get_input_embeddings().weight
        lookup = 0 if module.get_output_embeddings().weight is table else six_nd(table.numel(), tokens)
        forward = flops.forward(huggingface.read(config).spec, seq=tokens, pairs=pairs.full)
        attention = 3 * (forward.scores + forward.mixture)
        return lookup, attention, counted - six_nd(matrices, tokens)

    @FEWER
    @given(strategies.configs("llama", "mistral"), st.integers(1, 5))
    def everywhere(config, tokens):
        lookup, attention, difference = left_out(config, tokens)
        assert difference == attention - lookup

    everywhere()
    for name in ("llama-3.1-8b", "qwen2.5-1.5b"):
        lookup, attention, difference = left_out(published_config(name), 4)
        claim.holds(
            difference == attention - lookup,
            f"{name}, 4 tokens: 6ND is off by {difference:,}: lookups {-lookup:,}, attention {attention:,}",
        )
