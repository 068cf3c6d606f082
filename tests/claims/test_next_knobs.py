"""Part 2 of "next": the toy GPT with one dial changed at a time."""

from fractions import Fraction
from itertools import pairwise

import pytest

from accounting.authorities import huggingface as modules
from accounting.ledger import case
from accounting.spec import SpecError
from model.recipes import tutor
from tests.toys import TOY, built, decoder, everywhere, gpt2, predicted

DOUBLED = {name: {name: 2 * size} for name, size in TOY.items()}


def counted(**dials):
    """The predicted count, once the modules have confirmed it."""
    assert predicted(**dials) == built(**dials)
    return predicted(**dials)


@pytest.mark.parametrize(
    ("dial", "figures"),
    [
        case("next.idea.base", None, ["count"]),
        case("next.idea.layers", "layers", ["count"]),
        case("next.idea.width", "width", ["count"]),
        case("next.idea.heads", "heads", ["count"]),
        case("next.part2.ratio_depth", "layers", ["ratio"]),
        case("next.part2.ratio_width", "width", ["ratio"]),
        case("next.out.p2_base", None, ["count", "ratio"]),
        case("next.out.p2_layers", "layers", ["count", "ratio"]),
        case("next.out.p2_width", "width", ["count", "ratio"]),
        case("next.out.p2_vocab", "vocab", ["count", "ratio"]),
        case("next.out.p2_context", "context", ["count", "ratio"]),
        case("next.out.p2_heads", "heads", ["count", "ratio"]),
    ],
)
def test_doubling(claim, dial, figures):
    """The toy with one dial doubled has this many parameters, and so many times the toy's."""
    dials = TOY | DOUBLED.get(dial, {})
    ours, theirs = (
        {"count": count(**dials), "ratio": Fraction(count(**dials), count(**TOY))} for count in (predicted, built)
    )
    claim.measured([ours[figure] for figure in figures], observed=[theirs[figure] for figure in figures])


@pytest.mark.claim("next.idea.depth_vs_width")
def test_depth_adds_copies_and_width_grows_both_ways(claim):
    """A layer adds the same tensors again, a doubled width doubles both sides of every matrix in a block."""

    def shapes(layer, **dials):
        return [tuple(tensor.shape) for tensor in gpt2(**dials).transformer.h[layer].parameters()]

    def differences(numbers):
        return [after - before for before, after in pairwise(numbers)]

    copies = all(shapes(layer, **TOY) == shapes(0, **TOY) for layer in range(3))
    both_ways = shapes(0, **TOY | {"width": 16}) == [tuple(2 * side for side in shape) for shape in shapes(0, **TOY)]
    by_layers = differences([counted(**TOY | {"layers": layers}) for layers in range(1, 6)])
    by_width = differences(differences([counted(**TOY | {"width": width}) for width in range(2, 14, 2)]))
    linear, quadratic = len(set(by_layers)) == 1, len(set(by_width)) == 1 and by_width[0] > 0
    claim.holds(
        copies and both_ways and linear and quadratic,
        f"a layer adds {by_layers}, two of width add {by_width} more each time",
    )


@pytest.mark.claim("next.lab.width_gt_layers")
def test_width_adds_more_than_layers(claim):
    """Twice the width adds more than twice the layers, to the toy and to any GPT of this kind."""
    dials = [TOY | {"width": 16}, TOY | {"layers": 6}, TOY]
    claim.measured([predicted(**each) for each in dials], observed=[built(**each) for each in dials])

    def stated(dials):
        wide, deep = ({**dials, dial: 2 * dials[dial]} for dial in ("width", "layers"))
        return counted(**wide) > counted(**deep) > counted(**dials)

    claim.holds(everywhere(stated), "so at GPT-2's and at random shapes")


@pytest.mark.claim("next.part2.depth_not_double")
def test_twice_the_layers_is_less_than_twice(claim):
    """Twice the layers is less than twice the parameters: tables and last norm stay one."""

    def stated(dials):
        outside = (dials["vocab"] + dials["context"] + 2) * dials["width"]
        return counted(**dials | {"layers": 2 * dials["layers"]}) == 2 * counted(**dials) - outside

    claim.holds(everywhere(stated), f"{counted(**TOY | {'layers': 6}):,} is less than 2 x {counted(**TOY):,}")


@pytest.mark.claim("next.part2.width_not_four")
def test_twice_the_width_is_less_than_four_times(claim):
    """Twice the width is more than twice and less than four times the parameters."""

    def stated(dials):
        return 2 * counted(**dials) < counted(**dials | {"width": 2 * dials["width"]}) < 4 * counted(**dials)

    claim.holds(everywhere(stated), f"{counted(**TOY | {'width': 16}):,} is between 2 and 4 x {counted(**TOY):,}")


@pytest.mark.claim("next.part2.vocab_once")
def test_new_rows_are_stored_once_when_tied(claim):
    """A larger vocabulary adds its rows once to a tied model, twice to an untied one."""

    def added(dials, tied):
        return counted(**dials | {"vocab": dials["vocab"] + 7}, tied=tied) - counted(**dials, tied=tied)

    def stated(dials):
        return (added(dials, True), added(dials, False)) == (7 * dials["width"], 14 * dials["width"])

    claim.holds(everywhere(stated), f"7 tokens more add {added(TOY, True)} to the toy, {added(TOY, False)} when untied")


@pytest.mark.claim("next.part2.context_SC")
def test_longer_position_table(claim):
    """Each position more adds a row of width C; the toy's six more add 48."""

    def stated(dials):
        return counted(**dials | {"context": dials["context"] + 5}) - counted(**dials) == 5 * dials["width"]

    longer = TOY | {"context": 12}
    claim.measured(predicted(**longer) - predicted(**TOY), observed=built(**longer) - built(**TOY))
    claim.holds(everywhere(stated), "five positions more add 5 C at GPT-2's and at random shapes")


@pytest.mark.claim("next.part2.heads_fixed")
def test_heads_at_fixed_width_change_no_count(claim):
    """Every number of heads that divides the width gives the same count."""

    def stated(dials):
        divisors = [heads for heads in range(1, dials["width"] + 1) if dials["width"] % heads == 0]
        held = {modules.unique(gpt2(**dials | {"heads": heads})) for heads in divisors}
        return held | {predicted(**dials | {"heads": heads}) for heads in divisors} == {predicted(**dials)}

    claim.holds(everywhere(stated), f"{predicted(**TOY):,} for 1, 2, 4 and 8 heads of the toy")


@pytest.mark.claim("next.part2.heads_divide")
def test_heads_must_divide_the_width(claim):
    """Of 1 to 8 heads, both our spec and Hugging Face's module refuse those that do not divide a width of 8."""

    def refused(build, error):
        refusals = set()
        for heads in range(1, 9):
            try:
                build(**TOY | {"heads": heads})
            except error:
                refusals.add(heads)
        return refusals

    ours, theirs = refused(tutor, SpecError), refused(gpt2, ValueError)
    claim.holds(ours == theirs == {3, 5, 6, 7}, f"{sorted(ours)} heads are refused at width 8")


@pytest.mark.claim("next.part2.fixed_head_width")
def test_twice_the_heads_at_a_fixed_head_width(claim):
    """With the head width held, twice the heads is twice the width and costs as much as that."""

    def stated(dials):
        more = dials | {"heads": 2 * dials["heads"], "width": 2 * dials["width"]}
        head_dims = {gpt2(**each).transformer.h[0].attn.head_dim for each in (dials, more)}
        return len(head_dims) == 1 and counted(**more) == counted(**dials | {"width": 2 * dials["width"]})

    claim.holds(everywhere(stated), f"4 heads of 4 make a width of 16 and {counted(**TOY | DOUBLED['width']):,} in all")


@pytest.mark.claim("next.out.p2_coincidence")
def test_untying_costs_what_doubling_the_vocabulary_does(claim):
    """A table for the head and a table twice as long both add V C: the counts are equal, of other modules."""

    def stated(dials):
        return counted(**dials, tied=False) == counted(**dials | {"vocab": 2 * dials["vocab"]})

    untied, larger = {**TOY, "tied": False}, TOY | {"vocab": 18}
    claim.measured([predicted(**untied), predicted(**larger)], observed=[built(**untied), built(**larger)])
    assert decoder(**untied).embedding.weight.shape != decoder(**larger).embedding.weight.shape
    claim.holds(everywhere(stated), "so at GPT-2's and at random shapes")


@pytest.mark.claim("next.try.heads")
def test_try_heads(claim):
    """The toy has the same count with 1, 2, 4 and 8 heads."""
    tried = [TOY | {"heads": heads} for heads in (1, 2, 4, 8)]
    claim.measured([predicted(**dials) for dials in tried], observed=[built(**dials) for dials in tried])


@pytest.mark.claim("next.try.untied")
def test_try_untied(claim):
    """In every variant untying adds V C and nothing else."""
    variants = [TOY | DOUBLED.get(dial, {}) for dial in (None, "layers", "width", "vocab", "context", "heads")]
    added = [counted(**dials, tied=False) - counted(**dials) for dials in variants]
    claim.holds(added == [dials["vocab"] * dials["width"] for dials in variants], f"{added} are added")
