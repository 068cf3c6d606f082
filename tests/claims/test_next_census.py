"""Part 1 of "next": the toy GPT counted tensor by tensor."""

import dataclasses
import re
from fractions import Fraction

import pytest
import torch

from accounting import census, conventions, flops, naming, pairs, params
from accounting import huggingface as configs
from accounting.authorities import huggingface as modules
from accounting.authorities import torch_counter
from accounting.census import Part
from accounting.ledger import case
from model.recipes import tutor
from model.torch_decoder import Decoder
from tests.toys import GPT2, TOY, built, decoder, everywhere, gpt2, predicted


def scalars(spec, pattern):
    """What the census has under the canonical names that match."""
    chosen = census.take(spec).where(lambda weight: re.fullmatch(pattern, weight.name) is not None)
    return params.count(chosen).unique


def sizes(module, pattern):
    """Scalars in each parameter of a module whose name matches."""
    return [tensor.numel() for name, tensor in module.named_parameters() if re.fullmatch(pattern, name)]


@pytest.mark.claim("next.intro.parameter_estimate")
def test_exact_check(claim):
    """The count equals what the modules hold, with no tolerance."""
    held = everywhere(lambda dials: predicted(**dials) == built(**dials))
    claim.holds(held, f"{predicted(**TOY):,} and {built(**TOY):,}; {predicted(**GPT2):,} and {built(**GPT2):,}")


@pytest.mark.claim("next.part1.formula")
def test_formula(claim):
    """V C + S C + L (12 C^2 + 13 C) + 2 C is the count of the tied GPT, at every size."""

    def stated(dials):
        v, c, s, layers = (dials[name] for name in ("vocab", "width", "context", "layers"))
        return v * c + s * c + layers * (12 * c**2 + 13 * c) + 2 * c == predicted(**dials) == built(**dials)

    claim.holds(everywhere(stated), f"{built(**TOY):,} for the toy, {built(**GPT2):,} at GPT-2's shape")


# The document packs queries, keys and values in one tensor, as Hugging Face's module does.
@pytest.mark.parametrize(
    ("power", "multiples", "ours", "theirs"),
    [
        case("next.part1.qkv", 2, [3], r"attention\.(query|key|value)\.weight", r"attn\.c_attn\.weight"),
        case("next.part1.attn_out", 2, [1], r"attention\.output\.weight", r"attn\.c_proj\.weight"),
        case("next.part1.attn_total", 2, [3, 1], r"attention\..*\.weight", r"attn\..*\.weight"),
        case("next.part1.mlp", 2, [4, 4], r"feed_forward\..*\.weight", r"mlp\..*\.weight"),
        case("next.part1.leading", 2, [3, 1, 4, 4], r"(attention|feed_forward)\..*\.weight", r"(attn|mlp)\..*\.weight"),
        case("next.part1.biases", 1, [3, 1, 4, 1], r"(attention|feed_forward)\..*\.bias", r"(attn|mlp)\..*\.bias"),
        case("next.part1.norms", 1, [1, 1, 1, 1], r".*_norm\..*", r"ln_.*"),
        case("next.part1.thirteen", 1, [3, 1, 4, 1, 1, 1, 1, 1], r".*(bias|norm\.weight)", r".*bias|ln_.*weight"),
    ],
)
def test_block_term(claim, power, multiples, ours, theirs):
    """The tensors of a block that make up a term are these multiples of C or of C^2."""

    def counted(dials):
        return scalars(tutor(**dials), rf"blocks\.0\.({ours})")

    def stated(dials):
        tensors = [multiple * dials["width"] ** power for multiple in multiples]
        assert sorted(sizes(gpt2(**dials).transformer.h[0], theirs)) == sorted(tensors)
        return sum(tensors) == counted(dials) == sum(sizes(decoder(**dials).blocks[0], ours))

    claim.holds(everywhere(stated), f"{counted(TOY):,} a block of the toy, {counted(GPT2):,} at GPT-2's shape")


@pytest.mark.claim("next.part1.packed_same")
def test_packing(claim):
    """One (C, 3 C) matrix has the entries of the three C x C projections that it replaces."""

    def shapes(dials):
        attention = decoder(**dials).blocks[0].attention
        three = [tuple(layer.weight.shape) for layer in (attention.query, attention.key, attention.value)]
        return three, tuple(gpt2(**dials).transformer.h[0].attn.c_attn.weight.shape)

    def stated(dials):
        width, (three, packed) = dials["width"], shapes(dials)
        published = {tensor.name: tensor.shape for tensor in naming.published(census.take(tutor(**dials)), "gpt2")}
        assert three == [(width, width)] * 3
        assert published["transformer.h.0.attn.c_attn.weight"] == packed == (width, 3 * width)
        return packed[0] * packed[1] == sum(rows * columns for rows, columns in three)

    claim.holds(everywhere(stated), f"{shapes(TOY)} in the toy, {shapes(GPT2)} at GPT-2's shape")


COMPONENTS = {
    "token": (r"embedding\..*", "embedding", "transformer.wte"),
    "position": (r"position\..*", "position", "transformer.wpe"),
    "blocks": (r"blocks\..*", "blocks", "transformer.h"),
    "final_norm": (r"norm\..*", "norm", "transformer.ln_f"),
}


def component(name):
    """Scalars of one of the toy's components, as predicted and as both modules have them."""
    pattern, ours, theirs = COMPONENTS[name]
    observed = modules.unique(decoder(**TOY).get_submodule(ours))
    assert observed == modules.unique(gpt2(**TOY).get_submodule(theirs))
    return scalars(tutor(**TOY), pattern), observed


@pytest.mark.parametrize(
    "name",
    [
        case("next.part1.token", "token"),
        case("next.out.p1_tok", "token"),
        case("next.part1.position", "position"),
        case("next.out.p1_pos", "position"),
        case("next.part1.blocks", "blocks"),
        case("next.out.p1_blocks", "blocks"),
        case("next.part1.final_norm", "final_norm"),
        case("next.out.p1_fnorm", "final_norm"),
    ],
)
def test_component(claim, name):
    """A table, the blocks or the last norm of the toy has this many entries."""
    ours, theirs = component(name)
    claim.measured(ours, observed=theirs)


@pytest.mark.claim("next.part1.sum")
def test_hand_sum(claim):
    """The four components of the toy add up to its count."""
    ours, theirs = zip(*map(component, COMPONENTS), strict=True)
    claim.measured([*ours, predicted(**TOY)], observed=[*theirs, built(**TOY)])
    claim.holds(sum(theirs) == built(**TOY), f"they add up to {sum(theirs):,}")


@pytest.mark.parametrize(
    "names",
    [
        case("next.part1.without", ["leading"]),
        case("next.part1.missing", ["omitted"]),
        case("next.out.p1_omit", ["omitted"]),
        case("next.out.p1_leadline", ["leading", "exact", "exact"]),
    ],
)
def test_leading_estimate(claim, names):
    """Tables and 12 L C^2 are the toy's matrices; its biases and norms are what they leave out."""
    spec = tutor(**TOY)
    counts, parts = params.count(spec), params.by_part(spec)
    ours = {
        "leading": counts.embedding + conventions.kaplan_parameters(spec),
        "omitted": parts[Part.BIAS].unique + parts[Part.NORM].unique,
        "exact": counts.unique,
    }
    by_rank = {rank: sum(p.numel() for p in gpt2(**TOY).parameters() if p.ndim == rank) for rank in (1, 2)}
    theirs = {"leading": by_rank[2], "omitted": by_rank[1], "exact": built(**TOY)}
    claim.measured([ours[name] for name in names], observed=[theirs[name] for name in names])


@pytest.mark.claim("next.part1.same_object")
def test_head_is_the_table(claim):
    """The head has no bias, and its weight is the Parameter object of the token table."""
    ours, theirs = Decoder(tutor()), gpt2(**TOY)
    pairs = [(ours.head, ours.embedding), (theirs.lm_head, theirs.transformer.wte)]
    same = [head.weight is table.weight and head.bias is None for head, table in pairs]
    claim.holds(all(same), f"one object and no bias in the decoder and in Hugging Face's module: {same}")


@pytest.mark.claim("next.part1.counted_once")
def test_shared_table_is_counted_once(claim):
    """A list of names meets the shared table twice, the count once."""

    def stated(dials):
        table = dials["vocab"] * dials["width"]
        names = [
            sum(tensor.numel() for _, tensor in module.named_parameters(remove_duplicate=False))
            for module in (decoder(**dials), gpt2(**dials))
        ]
        return names == [predicted(**dials) + table] * 2 == [built(**dials) + table] * 2

    claim.holds(everywhere(stated), f"{predicted(**TOY):,} in distinct parameters, 72 more by name")


@pytest.mark.claim("next.part1.dropout_zero")
def test_dropout_has_no_parameters(claim):
    """The dropout layers of GPT-2 hold no parameter and no buffer."""
    dropouts = [module for module in gpt2(**TOY).modules() if isinstance(module, torch.nn.Dropout)]
    held = sum(tensor.numel() for module in dropouts for tensor in (*module.parameters(), *module.buffers()))
    assert len(dropouts) == 1 + 3 * TOY["layers"]
    claim.holds(held == 0, f"{held} scalars in {len(dropouts)} dropout layers")


@pytest.mark.claim("next.part1.mask_buffer")
def test_masks_are_buffers(claim):
    """Each layer's causal mask is a buffer that no optimizer is given."""
    toy = Decoder(tutor(), attention="eager")
    names = {name for name, _ in toy.named_buffers()}
    learned = {name for name, _ in toy.named_parameters(remove_duplicate=False)}
    assert all(torch.equal(mask, torch.ones(6, 6).tril().bool()) for mask in toy.buffers())
    held = names == {f"blocks.{layer}.attention.mask" for layer in range(3)} and not names & learned
    claim.holds(held, f"buffers {sorted(names)}, {modules.unique(toy):,} parameters without them")


@pytest.mark.claim("next.out.p1_mask")
def test_mask_elements(claim):
    """The toy's masks have L S^2 elements."""
    masks = sum(mask.numel() for mask in Decoder(tutor(), attention="eager").buffers())
    claim.measured(TOY["layers"] * TOY["context"] ** 2, observed=masks)


@pytest.mark.claim("next.part1.untie_adds")
def test_untying_adds_a_table(claim):
    """A head of its own adds V C parameters."""

    def stated(dials):
        table = dials["vocab"] * dials["width"]
        ours, theirs = (count(**dials, tied=False) - count(**dials) for count in (predicted, built))
        return ours == theirs == table

    claim.holds(everywhere(stated), f"{predicted(**TOY, tied=False) - predicted(**TOY)} for the toy")


@pytest.mark.claim("next.out.p1_untied0")
def test_tied_toy_has_no_head_of_its_own(claim):
    """No parameter of the tied toy belongs to the head alone; in the untied one the head's do."""
    heads = {tied: sum(sizes(decoder(**TOY, tied=tied), r"head\..*")) for tied in (True, False)}
    assert heads[False] == scalars(tutor(tied=False), r"head\..*") == 72
    claim.measured(scalars(tutor(), r"head\..*"), observed=heads[True])


@pytest.mark.claim("next.out.p1_untied")
def test_untied_toy(claim):
    """The toy's counts with the shared head and with one of its own, and the difference."""
    (tied, untied), (tied_built, untied_built) = (
        (count(**TOY), count(**TOY, tied=False)) for count in (predicted, built)
    )
    claim.measured([tied, untied, untied - tied], observed=[tied_built, untied_built, untied_built - tied_built])


@pytest.mark.claim("next.part1.tied_still_scores")
def test_a_tied_head_still_multiplies(claim):
    """A token costs 2 V C FLOPs in the head, and as many in all, whether the table is shared or not."""

    def stated(dials):
        tokens = torch.zeros(1, dials["context"], dtype=torch.long, device="meta")
        hidden = torch.empty(dials["context"], dials["width"], device="meta")
        totals = set()
        for tied in (True, False):
            ours = flops.forward(tutor(**dials, tied=tied), seq=dials["context"], pairs=pairs.full)
            module = decoder(**dials, tied=tied)
            head = torch_counter.count(lambda module=module: module.head(hidden))
            assert head == ours.head == 2 * dials["vocab"] * dials["width"] * dials["context"]
            totals |= {ours.total, torch_counter.count(lambda module=module: module(tokens))}
        return len(totals) == 1

    toy = flops.forward(tutor(), seq=6, pairs=pairs.full)
    claim.holds(everywhere(stated), f"{toy.total:,} FLOPs for 6 tokens of the toy, {toy.head // 6} a token in the head")


def without_biases(spec):
    """The same decoder with no bias on its linear layers."""
    blocks = tuple(
        dataclasses.replace(
            block,
            attention=dataclasses.replace(block.attention, bias=False, output_bias=False),
            feed_forward=dataclasses.replace(block.feed_forward, bias=False),
        )
        for block in spec.blocks
    )
    return dataclasses.replace(spec, blocks=blocks)


@pytest.mark.claim("next.part1.tolerance_hides")
def test_a_tolerance_hides_mistakes(claim):
    """A tolerance of a tenth accepts a missing layer, an untied head and missing biases; equality does not."""
    mistakes = {
        "a layer of GPT-2's shape is missing": (tutor(**GPT2), tutor(**{**GPT2, "layers": 11})),
        "the toy's head is untied": (tutor(), tutor(tied=False)),
        "the toy has no biases": (tutor(), without_biases(tutor())),
    }
    off = {}
    for name, (right, wrong) in mistakes.items():
        with torch.device("meta"):
            held = modules.unique(Decoder(wrong))
        assert held == params.count(wrong).unique
        off[name] = Fraction(abs(held - params.count(right).unique), params.count(right).unique)
    shown = "; ".join(f"{name}: {float(share):.1%}" for name, share in off.items())
    claim.holds(all(0 < share < Fraction(1, 10) for share in off.values()), shown)


@pytest.mark.claim("next.part1.state_dict_double")
def test_a_state_dict_is_no_count(claim):
    """The entries of a state dict hold the shared table twice and the masks besides."""

    def stated(dials):
        module = decoder(**dials)
        entries = sum(tensor.numel() for tensor in module.state_dict().values())
        table = dials["vocab"] * dials["width"]
        masks = sum(mask.numel() for mask in module.buffers())
        return entries == predicted(**dials) + table + masks > built(**dials)

    entries = sum(tensor.numel() for tensor in decoder(**TOY).state_dict().values())
    claim.holds(everywhere(stated), f"the toy's entries hold {entries:,}, its parameters {built(**TOY):,}")


@pytest.mark.claim("next.part1.not_universal")
def test_twelve_is_no_law(claim):
    """The matrices of a block are 12 C^2 in GPT-2, 13 C^2 in Llama 3.1 8B, 19.8 C^2 in Qwen2.5 1.5B."""
    coefficients = {}
    for name in ("gpt2", "llama-3.1-8b", "qwen2.5-1.5b"):
        spec = configs.load(name).spec
        module = modules.build(configs.published_config(name))
        layer = module.transformer.h[0] if name == "gpt2" else module.model.layers[0]
        matrices = sum(tensor.numel() for tensor in layer.parameters() if tensor.ndim == 2)
        assert matrices == params.by_layer(spec)[0].matmul
        coefficients[name] = Fraction(matrices, spec.width**2)
    gpt, llama, qwen = coefficients.values()
    held = gpt == 12 and llama == 13 and round(qwen, 1) == Fraction("19.8")
    claim.holds(held, "; ".join(f"{name}: {float(ratio):.3f} C^2" for name, ratio in coefficients.items()))
