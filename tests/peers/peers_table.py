"""What the table says of each counter, as integers: which products it misses, and what it adds."""

from pathlib import Path

import pytest

from accounting import census, flops, params
from accounting.census import Part
from accounting.huggingface import read
from tests.peers import table
from tests.peers.counters import COUNTERS, Counter
from tests.peers.table import BATCH, MODELS, SEQ, Case

NAMED = {counter.name: counter for counter in COUNTERS}
TOKENS, LAYERS = BATCH * SEQ, table.LLAMA["num_hidden_layers"]
SCORES = TOKENS * SEQ * LAYERS * table.LLAMA["num_attention_heads"]
#: Over exact (=, less, more, or nothing at all): attention of Llama, eager and fused; then the linear maps of GPT-2, of
#: Llama, and of Mixtral with its experts in a loop, in batches and in groups.
OUTCOMES = {
    "sixnd's observer": "= =  = = = = =",
    "torch FlopCounterMode": "= 0  = = = = <",
    "fvcore": "= 0  > = = = <",
    "torchprofile": "> =  > > > > <",
    "calflops, FLOPs": "> 0  > > > < <",
    "calflops, MACs": "= 0  = = = < <",
    "DeepSpeed, FLOPs": "> =  > > > > <",
    "DeepSpeed, MACs": "= =  = = = = <",
    "ptflops, pytorch": "> 0  > > < < <",
    "ptflops, aten": "= 0  > = = = <",
    "thop": "0 0  < = < < <",
    "torchinfo": "0 0  > < < < <",
    "transformers Trainer": "0 0  < > > > >",
}


def says(name, model, kernels="eager"):
    """What a counter measures, and what is exact."""
    counter, case = NAMED[name], Case(model, kernels)
    return table.results()[counter, case], table.exact(counter, case)


def scalars(model, chosen):
    """Scalars of a model's weights that `chosen` accepts."""
    return params.count(census.take(read(MODELS[model]).spec).where(chosen)).unique


def forward(model, chosen):
    """FLOPs of the products with a model's weights that `chosen` accepts."""
    return flops.forward(census.take(read(MODELS[model]).spec).where(chosen), seq=SEQ, batch=BATCH).total


def experts(weight):
    return "{expert}" in weight.name


def sign(measured, exact):
    return "0" if measured == 0 else "<=>"[(measured >= exact) + (measured > exact)]


def test_the_readme_has_the_tables_of_this_run(capsys):
    """A counter that changes, or a table that was edited, fails until ``python -m tests.peers README.md``."""
    with capsys.disabled():
        print(f"\n{table.markdown()}")
    text = (Path(__file__).parents[2] / "README.md").read_text()
    assert text == table.renewed(text)


@pytest.mark.parametrize("counter", COUNTERS, ids=lambda counter: counter.name)
def test_what_each_counter_sees(counter):
    """Its outcome on each kind of product is the recorded one."""
    attention = [says(counter.name, "Llama", kernels) for kernels in ("eager", "fused")]
    linear = [("GPT-2", "eager"), ("Llama", "eager"), *(("Mixtral", kernels) for kernels in table.KERNELS)]
    seen = [sign(measured.attention, exact.attention) for measured, exact in attention]
    seen += [sign(measured.linear, exact.linear) for measured, exact in (says(counter.name, *case) for case in linear)]
    assert OUTCOMES[counter.name].split() == seen


def test_the_observer_is_exact_on_every_case():
    """Both shares, as integers."""
    for case in table.CASES:
        measured, exact = says("sixnd's observer", case.model, case.kernels)
        assert (measured.linear, measured.attention) == (exact.linear, exact.attention)


@pytest.mark.parametrize("counter", [c for c in COUNTERS if c.package != "transformers"], ids=lambda c: c.name)
def test_tying_changes_no_count_of_work(counter):
    """A tied head multiplies as much as another."""
    for kernels in "eager", "fused":
        tied, untied = (says(counter.name, model, kernels)[0] for model in ("GPT-2", "GPT-2 untied"))
        assert (tied.linear, tied.attention) == (untied.linear, untied.attention)


@pytest.mark.parametrize("model", ["Mixtral", "DeepSeek"])
@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("torch FlopCounterMode", "fused"),
        ("fvcore", "fused"),
        ("calflops, MACs", "batched"),
        ("calflops, MACs", "fused"),
        ("DeepSpeed, MACs", "fused"),
        ("ptflops, aten", "fused"),
    ],
)
def test_exactly_the_routed_experts_are_missed(name, kernels, model):
    """Shared experts and the router are linear maps that are seen."""
    measured, exact = says(name, model, kernels)
    assert exact.linear - measured.linear == forward(model, experts)


def test_two_head_widths_are_not_fused_on_cpu():
    """There torch runs plain products, which its counter sees, and one that traces whole operators does not."""
    measured, exact = says("torch FlopCounterMode", "DeepSeek", "fused")
    assert measured.attention == exact.attention
    assert says("fvcore", "DeepSeek", "fused")[0].attention == 0


@pytest.mark.parametrize(("name", "each"), [("calflops, FLOPs", 1), ("DeepSpeed, FLOPs", 1), ("ptflops, pytorch", 2)])
def test_elementwise_work_is_a_unit_a_scalar(name, each):
    """Of Llama the activation of a gate and the softmax of the scores; no norm, rotation nor product of a gate."""
    measured, exact = says(name, "Llama")
    assert measured.linear - exact.linear == each * TOKENS * LAYERS * table.LLAMA["intermediate_size"]
    assert measured.attention - exact.attention == each * SCORES


def test_the_scale_of_the_scores_is_a_multiply_add_to_torchprofile():
    """And their softmax nothing."""
    measured, exact = says("torchprofile", "Llama")
    assert measured.attention - exact.attention == 2 * SCORES


def test_a_layer_norm_is_five_multiply_adds_a_scalar_to_fvcore():
    """GPT-2 has five norms of its width."""
    measured, exact = says("fvcore", "GPT-2")
    assert measured.linear - exact.linear == 2 * 5 * TOKENS * 5 * table.GPT2["n_embd"]


def test_a_bias_is_a_multiply_add_to_ptflops():
    """One for each output of a linear map that has an offset."""
    measured, exact = says("ptflops, aten", "GPT-2")
    assert measured.linear - exact.linear == 2 * TOKENS * scalars("GPT-2", lambda weight: weight.part is Part.BIAS)


def test_thop_sees_modules_alone():
    """Of Mixtral its maps but for the router and the experts, of GPT-2 the head and 4 for each scalar of a norm."""
    measured, exact = says("thop", "Mixtral")
    missed = forward("Mixtral", lambda weight: weight.part is Part.ROUTER or experts(weight))
    assert exact.linear - measured.linear == missed
    head = forward("GPT-2", lambda weight: weight.part is Part.EMBEDDING)
    assert says("thop", "GPT-2")[0].linear == head + 2 * 4 * TOKENS * 5 * table.GPT2["n_embd"]


def test_thop_counts_the_parameters_of_the_same_modules():
    """Of Llama all but the table and the norms."""
    lost = scalars("Llama", lambda weight: weight.part in (Part.EMBEDDING, Part.NORM))
    measured, exact = says("thop", "Llama")
    assert exact.parameters - measured.parameters == lost


def test_torchinfo_counts_a_sequence_as_one_token():
    """Twice Llama's parameters for each sequence, whatever its length, the table among them."""
    measured, exact = says("torchinfo", "Llama")
    assert measured.linear == 2 * BATCH * exact.parameters


def test_torchinfo_counts_a_tied_table_twice():
    """Which no other counter of parameters does."""
    table_scalars = scalars("GPT-2", lambda weight: weight.part is Part.EMBEDDING)
    for name, extra in ("torchinfo", table_scalars), ("fvcore", 0), ("DeepSpeed, FLOPs", 0), ("ptflops, aten", 0):
        measured, exact = says(name, "GPT-2")
        assert measured.parameters - exact.parameters == extra


@pytest.mark.parametrize("model", MODELS)
def test_the_trainer_charges_parameters(model):
    """6 x tokens x all parameters but the tables: every expert, and a head that is not tied."""
    tables = scalars(model, lambda weight: weight.part in (Part.EMBEDDING, Part.POSITION))
    measured, exact = says("transformers Trainer", model)
    assert measured.parameters == exact.parameters - tables
    assert measured.linear == 6 * TOKENS * measured.parameters


def test_a_counter_that_is_missing_or_fails_is_named():
    """The table says so in the counter's place, and in the words of its error."""

    def fails(module, tokens):
        raise RuntimeError("no rule for tanh\nand more")

    for package, said in ("sixnd_none", "not installed"), ("torch", "raises: RuntimeError: no rule for tanh"):
        assert table.measure(Counter("a counter", package, "MACs", fails, "fails"), table.CASES[0]) == said
