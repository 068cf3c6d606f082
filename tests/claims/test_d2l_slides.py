"""Dive into Deep Learning 11.7, the slides: where they say what the chapter does not."""

from fractions import Fraction

import pytest
import torch
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from accounting import conventions, params
from model.recipes import d2l_gpt
from model.torch_decoder import Decoder
from tests import recipes_table as table


@pytest.mark.claim("d2l.table.slides_six_errata")
def test_six_families_on_the_slide(claim):
    """The slides' table has a row for each family but OLMo."""
    listed = [id for id, row in table.DOCUMENT.items() if "slides" in row]
    claim.measured(len(listed))
    claim.right(len(listed))
    claim.holds(set(table.DOCUMENT) - set(listed) == set(), "OLMo 2/3 is missing")


@pytest.mark.claim("d2l.table.slides_oss_errata")
def test_gpt_oss_on_the_slide(claim):
    """GPT-OSS has the 128 experts of the slide in its larger model alone, and 4 active in both."""

    def found(model):
        facts = table.facts(model, "moe")
        return facts["experts"], facts["active"]

    larger, smaller = table.DOCUMENT["gpt_oss"]["models"]
    claim.measured(found(larger))
    claim.otherwise(found(smaller), smaller)


@pytest.mark.claim("d2l.slides.profiler_fraction")
def test_profiler_agrees_within_a_fraction_of_a_percent(claim):
    """What torch's profiler finds in a step with fused attention is 6 N D and a fraction of a percent; eager, more."""
    spec, tokens = d2l_gpt(), torch.zeros(1, 128, dtype=torch.long)

    def excess(attention):
        decoder = Decoder(spec, attention=attention)
        with profile(activities=[ProfilerActivity.CPU], with_flops=True) as found:
            F.cross_entropy(decoder(tokens).flatten(0, 1), tokens.flatten()).backward()
        profiled = sum(event.flops or 0 for event in found.key_averages())
        return Fraction(profiled, conventions.six_nd(params.count(spec).matmul, tokens.numel())) - 1

    fused, eager = excess("fused"), excess("eager")
    claim.holds(0 < fused < Fraction(1, 100), f"{float(100 * fused):.2f} % more")
    claim.otherwise(0 < eager < Fraction(1, 100), f"{float(100 * eager):.2f} % more with attention written out")


@pytest.mark.claim("d2l.slides.chapter_ref_errata")
def test_cited(claim):
    """The chapter itself says which of its neighbours is about what."""
    claim.cited()
