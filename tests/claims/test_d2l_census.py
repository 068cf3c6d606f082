"""Dive into Deep Learning 11.7.1.1 and exercise 4: what the parameters of a GPT are."""

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, partial
from itertools import pairwise

import jax
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accounting import conventions, flops, huggingface, pairs, params
from accounting.authorities import huggingface as modules
from accounting.authorities import torch_counter
from accounting.census import Part
from accounting.ledger import case
from model.jax_decoder import init
from model.recipes import RECIPES, STUDY_SIZES, d2l_gpt
from model.torch_decoder import Decoder
from model.torch_layers import FeedForwardLayer
from tests import strategies

DEFAULT, GPT2 = RECIPES["d2l-default"], RECIPES["d2l-gpt2"]
# Width, layers, heads of the four GPT-2 sizes (Radford et al. 2019, table 2; heads of 64).
GPT2_FAMILY = ((768, 12, 12), (1024, 24, 16), (1280, 36, 20), (1600, 48, 25))


def gpt2(width, layers, heads):
    return {
        "model_type": "gpt2",
        "vocab_size": 50257,
        "n_positions": 1024,
        "n_embd": width,
        "n_layer": layers,
        "n_head": heads,
    }


#: What Hugging Face needs to build the two models of the census: the default's architecture is a Llama's.
CONFIGS = {
    "d2l-default": {
        "model_type": "llama",
        "vocab_size": 28,
        "hidden_size": 256,
        "intermediate_size": round(8 * 256 / 3),
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "tie_word_embeddings": True,
    },
    "d2l-gpt2": gpt2(*GPT2_FAMILY[0]),
}
#: Small GPT-2s with a feed-forward of 4 d and a tied head.
PLAIN = strategies.gpt2().map(lambda config: config | {"n_inner": None, "tie_word_embeddings": True})

built = cache(lambda name: modules.build(CONFIGS[name]))


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the census: ``square`` is L d^2."""

    embedding: int
    total: int
    square: int

    @property
    def blocks(self):
        return self.total - self.embedding

    @property
    def share(self):
        return Fraction(self.embedding, self.total)

    @property
    def ratio(self):
        return Fraction(self.blocks, self.square)


def predicted(spec):
    count = params.count(spec)
    assert count.unique - count.embedding == count.non_embedding
    return Row(count.embedding, count.unique, len(spec.blocks) * spec.width**2)


def observed(module):
    """The row of a Hugging Face module: its tables are its lookups, whatever they are called."""
    tables = [inner for inner in module.modules() if isinstance(inner, torch.nn.Embedding)]
    square = module.config.num_hidden_layers * module.config.hidden_size**2
    return Row(sum(map(modules.unique, tables)), modules.unique(module), square)


def matrices(*inner):
    """Scalars in the matrices of modules."""
    return sum(tensor.numel() for module in inner for tensor in module.parameters() if tensor.ndim == 2)


def decoder(spec, **options):
    with torch.device("meta"):
        return Decoder(spec, **options)


def rows():
    """The two rows of the census, predicted and observed to be the same."""
    for name in CONFIGS:
        assert predicted(RECIPES[name]) == observed(built(name))
    return [predicted(RECIPES[name]) for name in CONFIGS]


def percent(ratio):
    return f"{float(100 * ratio):.3f} %"


@pytest.mark.parametrize(
    ("name", "quantity"),
    [
        case("d2l.census.default_emb", "d2l-default", "embedding"),
        case("d2l.census.default_share", "d2l-default", "share"),
        case("d2l.census.default_blocks", "d2l-default", "blocks"),
        case("d2l.census.default_ratio", "d2l-default", "ratio"),
        case("d2l.census.default_total", "d2l-default", "total"),
        case("d2l.census.gpt2_emb", "d2l-gpt2", "embedding"),
        case("d2l.census.gpt2_share", "d2l-gpt2", "share"),
        case("d2l.census.gpt2_blocks", "d2l-gpt2", "blocks"),
        case("d2l.census.gpt2_ratio", "d2l-gpt2", "ratio"),
        case("d2l.census.gpt2_total", "d2l-gpt2", "total"),
    ],
)
def test_row(claim, name, quantity):
    """Each number of the two printed rows is that of Hugging Face's module of the same architecture."""
    claim.measured(getattr(predicted(RECIPES[name]), quantity), observed=getattr(observed(built(name)), quantity))


@pytest.mark.claim("d2l.census.gpt2_two_parts")
def test_gpt2_is_blocks_and_tables(claim):
    """GPT-2's 124M are 85M in the blocks and 39M in the tables."""
    ours, theirs = predicted(GPT2), observed(built("d2l-gpt2"))
    claim.measured((ours.total, ours.blocks, ours.embedding), (theirs.total, theirs.blocks, theirs.embedding))


@pytest.mark.claim("d2l.census.block_12d2")
def test_block_is_12_d_squared(claim):
    """A block's matrices are 4 d^2 of attention and 8 d^2 of feed-forward."""

    @given(config=PLAIN)
    def holds(config):
        spec, module = huggingface.read(config).spec, modules.build(config)
        square, layers = spec.width**2, len(spec.blocks)
        parts = params.by_part(spec)
        for part, factor in ((Part.ATTENTION, 4), (Part.FEED_FORWARD, 8)):
            assert parts[part].matmul == factor * layers * square
        for block in module.transformer.h:
            assert (matrices(block.attn), matrices(block.mlp)) == (4 * square, 8 * square)

    holds()
    block = params.by_layer(GPT2)[0].matmul
    assert block == matrices(built("d2l-gpt2").transformer.h[0])
    claim.holds(block == 12 * GPT2.width**2, f"{block:,} at width {GPT2.width}, and in GPT-2s of any size")
    block = params.by_layer(DEFAULT)[0].matmul
    assert block == matrices(built("d2l-default").model.layers[0])
    claim.otherwise(block == 12 * DEFAULT.width**2, f"{block:,} in the default's block, not {12 * DEFAULT.width**2:,}")


@pytest.mark.claim("d2l.census.ffn_any_act")
def test_feed_forward_is_8_d_squared_for_either_activation(claim):
    """Two matrices of 4 d are 8 d^2, three of round(8 d / 3) within d of it, and equal where 3 divides d."""
    worst = Fraction(0)
    for width in range(1, 1025):
        for activation in ("gelu", "swiglu"):
            spec = d2l_gpt(width=width, heads=1, layers=1, positions="learned", activation=activation)
            count = params.by_part(spec)[Part.FEED_FORWARD].matmul
            with torch.device("meta"):
                assert count == matrices(FeedForwardLayer(spec.blocks[0].feed_forward, width))
            deviation = abs(count - 8 * width**2)
            assert (deviation == 0) == (activation == "gelu" or width % 3 == 0)
            worst = max(worst, Fraction(deviation, width))
    claim.holds(worst <= 1, f"up to width 1,024 at most {worst} d from 8 d^2")


@pytest.mark.claim("d2l.census.stack_12Ld2")
def test_stack_is_about_12_l_d_squared(claim):
    """The matrices of L plain blocks are 12 L d^2, and each model of the chapter has that to two digits."""

    @given(config=PLAIN)
    def holds(config):
        spec, module = huggingface.read(config).spec, modules.build(config)
        assert conventions.kaplan_parameters(spec) == matrices(module.transformer.h)

    holds()
    study = [predicted(RECIPES[f"study-{width}"]) for width, _, _ in STUDY_SIZES]
    ratios = [row.ratio for row in (*rows(), *study)]
    shown = ", ".join(f"{float(ratio):.3f}" for ratio in ratios)
    claim.holds({round(ratio) for ratio in ratios} == {12}, f"{shown} L d^2 with norms and biases")


@pytest.mark.claim("d2l.census.embedding_Vd")
def test_token_table_is_v_d(claim):
    """The token table of any decoder holds V d numbers."""

    @given(config=strategies.configs())
    def holds(config):
        check(huggingface.read(config).spec, modules.build(config))

    def check(spec, module):
        table = params.by_part(spec)[Part.EMBEDDING].unique
        assert table == spec.vocab * spec.width == module.get_input_embeddings().weight.numel()
        return table

    holds()
    tables = [check(RECIPES[name], built(name)) for name in CONFIGS]
    claim.holds(tables == [28 * 256, 50257 * 768], f"{tables[0]:,} and {tables[1]:,}")


@pytest.mark.claim("d2l.census.tied_stored_once")
def test_tied_table_is_used_twice_and_stored_once(claim):
    """Tying the head saves V d parameters and not one FLOP: the head is the token table."""

    @given(config=strategies.configs(*strategies.DENSE))
    def holds(config):
        tied, untied = (config | {"tie_word_embeddings": tie} for tie in (True, False))
        one, two = modules.build(tied), modules.build(untied)
        table = one.get_input_embeddings().weight
        assert one.get_output_embeddings().weight is table
        assert two.get_output_embeddings().weight is not two.get_input_embeddings().weight
        assert modules.unique(two) - modules.unique(one) == table.numel()
        counts = [params.count(huggingface.read(config).spec).unique for config in (tied, untied)]
        assert counts == [modules.unique(one), modules.unique(two)]

    holds()
    specs = DEFAULT, replace(DEFAULT, tied=False)
    tokens = torch.zeros(1, 16, dtype=torch.long, device="meta")
    costs = [torch_counter.count(partial(decoder(spec, attention="eager"), tokens)) for spec in specs]
    assert costs == [flops.forward(spec, seq=16, pairs=pairs.full).total for spec in specs]
    tied, untied = (params.count(spec).unique for spec in specs)
    claim.holds(
        costs[0] == costs[1] and untied - tied == 28 * 256, f"{tied:,} tied, {untied:,} not, {costs[0]:,} FLOPs in both"
    )


@pytest.mark.claim("d2l.census.jax_tying")
def test_jax_counts_a_leaf_each_time_it_stands_in_the_tree(claim):
    """A tied JAX model has one leaf for its table; the same array under a second key is counted again."""

    def leaves(tree):
        return sum(leaf.size for leaf in jax.tree.leaves(tree))

    specs = DEFAULT, replace(DEFAULT, tied=False)
    tree, untied_tree = (jax.eval_shape(partial(init, spec), jax.random.key(0)) for spec in specs)
    tied, shared, untied = leaves(tree), leaves(tree | {"head": tree["embedding"]}), leaves(untied_tree)
    assert (tied, untied) == tuple(params.count(spec).unique for spec in specs)
    assert (tied, untied) == tuple(modules.unique(decoder(spec)) for spec in specs)
    table = tree["embedding"]["weight"].size
    claim.holds(
        "head" not in tree and shared - tied == table and shared == untied,
        f"{tied:,} in the leaves of the default, {shared:,} with its table under a second key",
    )


@pytest.mark.claim("d2l.census.pos_table")
def test_position_table_is_context_times_d(claim):
    """A table of learned positions holds context d numbers; rotary positions hold none."""

    @given(config=strategies.gpt2())
    def holds(config):
        check(huggingface.read(config).spec, modules.build(config))

    def check(spec, module):
        table = params.by_part(spec)[Part.POSITION].unique
        assert table == spec.context * spec.width == module.transformer.wpe.weight.numel()
        return table

    holds()
    table = check(GPT2, built("d2l-gpt2"))
    claim.holds(
        Part.POSITION not in params.by_part(DEFAULT) and table == 1024 * 768, f"{table:,} in GPT-2, none in the default"
    )


@pytest.mark.claim("d2l.census.torch_equals_jax")
def test_both_frameworks_have_the_same_rows(claim):
    """The PyTorch and the JAX model hold tensors of the same names and shapes, hence the same row."""
    seen = []
    for name in CONFIGS:
        spec = RECIPES[name]
        tree = jax.eval_shape(partial(init, spec), jax.random.key(0))
        leaves, _ = jax.tree.flatten_with_path(tree)
        in_jax = {jax.tree_util.keystr(path, simple=True, separator="."): leaf.shape for path, leaf in leaves}
        in_torch = {name: tuple(tensor.shape) for name, tensor in decoder(spec).named_parameters()}
        tables = sum(
            math.prod(shape) for name, shape in in_jax.items() if name in ("embedding.weight", "position.weight")
        )
        row = Row(tables, sum(leaf.size for leaf in jax.tree.leaves(tree)), len(spec.blocks) * spec.width**2)
        seen.append(in_torch == in_jax and row == observed(built(name)))
    claim.holds(all(seen), "the same names, shapes, embeddings, blocks and totals in both models")


@pytest.mark.claim("d2l.census.fraction_of_percent")
def test_rows_are_within_a_percent_of_the_rule(claim):
    """Both rows are less than one percent from 12 L d^2."""
    deviations = [row.ratio / 12 - 1 for row in rows()]
    claim.holds(all(abs(each) < Fraction(1, 100) for each in deviations), " and ".join(map(percent, deviations)))


@pytest.mark.claim("d2l.census.residue_errata")
def test_residue_is_not_only_norms_and_biases(claim):
    """What the blocks hold beyond 12 L d^2 is norms, biases and the rounding of 8 d / 3."""

    def residue(spec):
        parts, biases = params.by_part(spec), params.by_part(spec).get(Part.BIAS)
        rounded = parts[Part.ATTENTION].matmul + parts[Part.FEED_FORWARD].matmul - conventions.kaplan_parameters(spec)
        return parts[Part.NORM].unique, biases.unique if biases else 0, rounded

    def seen(module, blocks):
        vectors = {name: tensor.numel() for name, tensor in module.named_parameters() if tensor.ndim == 1}
        norms = sum(size for name, size in vectors.items() if ".ln_" in name or "norm" in name)
        return norms, sum(vectors.values()) - norms, matrices(blocks) - 12 * observed(module).square

    default, gpt2 = (row.blocks - 12 * row.square for row in rows())
    (norms, _, rounded), (gains, biases, nothing) = residue(DEFAULT), residue(GPT2)
    theirs = seen(built("d2l-default"), built("d2l-default").model.layers)
    gpt2_theirs = seen(built("d2l-gpt2"), built("d2l-gpt2").transformer.h)
    assert (gains, biases, nothing) == gpt2_theirs
    claim.holds(default == norms, f"{default:,} left over in the default, {norms:,} of it norms")
    claim.holds(gpt2 == gains + biases, f"{gpt2:,} left over in GPT-2: {gains:,} of norms and {biases:,} biases")
    claim.right(
        default,
        norms,
        rounded,
        gpt2,
        gains,
        biases,
        observed=(sum(theirs), theirs[0], theirs[2], sum(gpt2_theirs), *gpt2_theirs[:2]),
    )


@pytest.mark.claim("d2l.census.share_contrast")
def test_embedding_share_is_negligible_or_nearly_a_third(claim):
    """The tables are under one percent of the default and nearly a third of GPT-2."""
    small, large = (row.share for row in rows())
    third = large < Fraction(1, 3) and round(1 / large) == 3
    claim.holds(small < Fraction(1, 100) and third, f"{percent(small)} and {percent(large)}")


@pytest.mark.claim("d2l.census.dominance")
def test_embedding_dominates_above_12_l_d(claim):
    """The token table is larger than the matrices of the blocks exactly where V > 12 L d."""

    @given(config=PLAIN, beyond=st.integers(-2, 2))
    def holds(config, beyond):
        bound = 12 * config["n_layer"] * config["n_embd"]
        config |= {"vocab_size": bound + beyond}
        spec, module = huggingface.read(config).spec, modules.build(config)
        dominates = module.transformer.wte.weight.numel() > matrices(module.transformer.h)
        assert dominates == (beyond > 0)
        assert dominates == (params.by_part(spec)[Part.EMBEDDING].unique > conventions.kaplan_parameters(spec))

    holds()
    bound = 12 * len(GPT2.blocks) * GPT2.width
    claim.holds(
        GPT2.vocab < bound, f"exact at every V from 12 L d - 2 to 12 L d + 2; GPT-2 has {GPT2.vocab:,} of {bound:,}"
    )


@pytest.mark.parametrize((), [case("d2l.census.kaplan_convention"), case("d2l.census.kaplan_convention_errata")])
def test_cited(claim):
    """What a paper counts as N is for the paper to say."""
    claim.cited()


@pytest.mark.claim("d2l.census.low_end_bend")
def test_embeddings_in_n_bend_the_low_end(claim):
    """A power law in N is straight; against N with embeddings its small end is steeper, in a real vocabulary.

    Between two sizes the exponent is the true one times log(N'/N) / log(T'/T), whatever the law.
    """

    def steepness(vocab, sizes):
        """By how much the exponent between neighbours grows when the tables are counted in."""
        counts = []
        for width, layers, heads in sizes:
            row = predicted(spec := d2l_gpt(vocab, width, heads, layers))
            assert row.total == modules.unique(decoder(spec))
            counts.append((row.blocks, row.total))
        return [math.log(n2 / n1) / math.log(t2 / t1) for (n1, t1), (n2, t2) in pairwise(counts)]

    def shown(values):
        return ", ".join(f"{value:.3f}" for value in values)

    low, high = steepness(50257, STUDY_SIZES), steepness(50257, GPT2_FAMILY)
    straight = steepness(28, STUDY_SIZES)
    falls = all(first > second for first, second in pairwise(high))
    bends = min(low) > 1.5 and falls and high[-1] < 1.05
    claim.holds(bends, f"exponents times {shown(low)} at the study's sizes and {shown(high)} at GPT-2's, at V = 50,257")
    claim.otherwise(max(straight) > 1.005, f"times {shown(straight)} at the study's sizes and its own V = 28")


@pytest.mark.claim("d2l.ex4.condition")
def test_embedding_is_half_of_all_from_a_vocabulary_on(claim):
    """The tables are half of a GPT-2 from V + context = 12 L d + (biases and norms) / d on."""

    @given(config=PLAIN, beyond=st.integers(-2, 2))
    def holds(config, beyond):
        layers, width = config["n_layer"], config["n_embd"]
        module = modules.build(config)
        vectors = sum(tensor.numel() for tensor in module.parameters() if tensor.ndim == 1)
        bound = 12 * layers * width + Fraction(vectors, width)
        vocab = max(1, math.ceil(bound) - config["n_positions"] + beyond)
        config |= {"vocab_size": vocab}
        half = vocab + config["n_positions"] >= bound
        for row in (predicted(huggingface.read(config).spec), observed(modules.build(config))):
            assert (row.share >= Fraction(1, 2)) == half

    holds()
    vectors = params.by_part(GPT2)[Part.NORM].unique + params.by_part(GPT2)[Part.BIAS].unique
    bound = 12 * len(GPT2.blocks) * GPT2.width + Fraction(vectors, GPT2.width)
    rows_there = GPT2.vocab + GPT2.context
    claim.holds(
        (rows_there >= bound) == (predicted(GPT2).share >= Fraction(1, 2)),
        f"exact near the bound; GPT-2 has {rows_there:,} rows and needs {bound}",
    )


@pytest.mark.claim("d2l.ex4.gpt2_family")
def test_share_falls_over_the_gpt2_family(claim):
    """The token table is less than half of every GPT-2, and the less the larger it is."""
    specs = [
        d2l_gpt(50257, width, heads, layers, positions="learned", norm="layer", activation="gelu", bias=True)
        for width, layers, heads in GPT2_FAMILY
    ]
    built_family = [modules.build(gpt2(*size)) for size in GPT2_FAMILY]
    ours = [Fraction(params.by_part(spec)[Part.EMBEDDING].unique, params.count(spec).unique) for spec in specs]
    theirs = [Fraction(module.transformer.wte.weight.numel(), modules.unique(module)) for module in built_family]
    claim.measured(ours, observed=theirs)
    both = [predicted(spec).share for spec in specs]
    assert both == [observed(module).share for module in built_family]
    falls = all(first > second for shares in (ours, both) for first, second in pairwise(shares))
    claim.holds(falls and both[0] < Fraction(1, 2), "each share below half and below the one before")
    claim.otherwise(both, "with the position table")
