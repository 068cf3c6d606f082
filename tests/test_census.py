"""The census against modules that nobody here wrote: names, shapes, counts, part by part."""

import re
from collections import Counter
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accounting import census, huggingface, naming, params, published
from accounting.authorities import huggingface as modules
from accounting.census import Part, Weight
from accounting.huggingface import load
from model.torch_decoder import Decoder
from tests import strategies

#: What a published name says of the part that its tensor belongs to; the first that matches.
PARTS = {
    r"embed_tokens|wte": Part.EMBEDDING,
    r"wpe": Part.POSITION,
    r"lm_head": Part.HEAD,
    r"norm|\.ln_": Part.NORM,
    r"e_score_correction_bias|(mlp|block_sparse_moe)\.(gate|router)\.weight": Part.ROUTER,
    r"bias$": Part.BIAS,
    r"attn": Part.ATTENTION,
    r"mlp|block_sparse_moe": Part.FEED_FORWARD,
}


def part_of(name):
    return next(part for pattern, part in PARTS.items() if re.search(pattern, name))


def assert_census_is_the_modules(config):
    """Every tensor of Hugging Face's module is in the census once, and nothing else is."""
    __tracebackhide__ = True
    module = modules.build(config)
    reading = huggingface.read(config)
    bill = census.take(reading.spec)
    # The module under the tower is a text model: its names carry no prefix of the whole.
    family = reading.model_type if reading.model_type != "gemma3" else "gemma3_text"
    ours = list(naming.published(bill, family))
    theirs = modules.published(module)
    assert {tensor.name: tensor.shape for tensor in ours} == theirs
    assert len(ours) == len(theirs)

    counts = params.count(bill)
    assert counts.unique == modules.unique(module)
    assert counts.stored == sum(torch.Size(shape).numel() for shape in theirs.values())
    observed = Counter()
    for name, shape in theirs.items():
        observed[part_of(name)] += torch.Size(shape).numel()
    assert {part: count.stored for part, count in params.by_part(bill).items()} == dict(observed)


@pytest.mark.parametrize("name", published.names())
def test_published_models_are_counted_to_the_last_tensor(name):
    """The census of a full-size model has the tensors of Hugging Face's module on meta."""
    assert_census_is_the_modules(huggingface.published_config(name))


@pytest.mark.parametrize("family", strategies.CONFIGS)
@given(data=st.data())
def test_random_models_are_counted_to_the_last_tensor(family, data):
    """So has the census of a small model of any family, whatever its dials."""
    assert_census_is_the_modules(data.draw(strategies.configs(family)))


def assert_census_is_the_decoders(spec):
    """Parameters and buffers of the PyTorch decoder have the names and the shapes of the census, one by one."""
    __tracebackhide__ = True
    with torch.device("meta"):
        decoder = Decoder(spec)
    bill = census.take(spec)
    for ours, theirs in ((bill.weights, decoder.named_parameters()), (bill.buffers, decoder.named_buffers())):
        expected = {tensor.name: tensor.shape for weight in ours for tensor in weight.expand()}
        assert expected == {name: tuple(tensor.shape) for name, tensor in theirs}


@pytest.mark.parametrize("family", strategies.FAMILIES)
@given(data=st.data())
def test_the_torch_decoder_has_the_tensors_of_the_census(family, data):
    """Whatever the architecture, experts one by one."""
    assert_census_is_the_decoders(data.draw(strategies.specs(family)))


@pytest.mark.parametrize("name", published.names())
def test_the_torch_decoder_has_the_published_size(name):
    """At full width, each layer that differs from the others once."""
    spec = load(name).spec
    assert_census_is_the_decoders(replace(spec, blocks=tuple(dict.fromkeys(spec.blocks))))


@given(spec=strategies.specs())
def test_splits_add_up(spec):
    """The counts by part and the counts by layer each add up to the counts."""
    total = params.count(spec)
    for split in (params.by_part(spec), params.by_layer(spec)):
        for field in ("unique", "stored", "embedding", "non_embedding", "matmul", "active", "matmul_active"):
            assert sum(getattr(count, field) for count in split.values()) == getattr(total, field)


@given(spec=strategies.specs(*strategies.SPARSE))
def test_expanding_changes_no_sum(spec):
    """Experts in one entry and experts one by one are the same scalars under distinct names."""
    weights = census.take(spec).weights
    expanded = [copy for weight in weights for copy in weight.expand()]
    assert sum(copy.scalars for copy in expanded) == sum(weight.scalars for weight in weights)
    assert len({copy.name for copy in expanded}) == len(expanded) == sum(weight.copies for weight in weights)


@given(spec=strategies.specs())
def test_uses(spec):
    """A tied table is multiplied by once and an untied one never; an expert k/E times."""
    bill = census.take(spec)
    table = bill.weights[0]
    assert (table.part, table.uses) == (Part.EMBEDDING, Fraction(spec.tied))
    for weight in bill.weights:
        if weight.part in (Part.NORM, Part.BIAS, Part.POSITION):
            assert weight.uses == 0
        if weight.part is Part.HEAD:
            assert weight.uses == 1 and not spec.tied
        if "{expert}" in weight.name:
            layer = spec.blocks[weight.layer].feed_forward
            assert weight.active == layer.active and weight.copies == layer.experts


def test_uses_of_an_expert_are_a_fraction():
    """k/E stays exact: two of eight experts are a quarter of a use each."""
    weight = Weight(name="e.{expert}", shape=(3, 5), part=Part.FEED_FORWARD, copies=8, active=2, multiplies=True)
    assert (weight.uses, weight.scalars, weight.active_scalars) == (Fraction(1, 4), 120, 30)


@given(spec=strategies.specs())
def test_products_have_the_attentions_widths(spec):
    """Each layer has one product of queries and keys and one of weights and values."""
    products = census.take(spec).products
    assert [(product.layer, product.kind) for product in products] == [
        (layer, kind) for layer in range(len(spec.blocks)) for kind in ("scores", "mixture")
    ]
    for product in products:
        attention = spec.blocks[product.layer].attention
        width = attention.score_width if product.kind == "scores" else attention.value_width
        assert (product.heads, product.width, product.window) == (attention.heads, width, attention.window)
