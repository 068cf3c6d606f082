"""FLOPs, equal to what torch's counter sees in modules, to the last one."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.core_model_loading import revert_weight_conversion

from accounting import adapters, census, flops, naming, pairs
from accounting.authorities import huggingface as modules
from accounting.authorities import torch_counter
from accounting.huggingface import load, published_config, read
from accounting.spec import Experts
from model.torch_decoder import Decoder
from tests import strategies

FEWER = settings(max_examples=settings().max_examples // 10)  # each one runs a module forward and back
LENGTHS = st.integers(1, 9)
RULES = st.sampled_from([pairs.model, pairs.causal, pairs.windowed(1), pairs.windowed(3)])


def build(config):
    """Hugging Face's module, with products that are counted."""
    return modules.build(config, attn_implementation="eager", experts_implementation="batched_mm")


def logits(module, batch, seq):
    """The sum of a forward pass's logits."""
    tokens = torch.zeros((batch, seq), dtype=torch.long, device="meta")
    return module(tokens, attention_mask=torch.ones_like(tokens), use_cache=False).logits.sum()


def step(config, batch, seq):
    """FLOPs of a forward pass and of a whole step of Hugging Face's module."""
    module = build(config)
    forward = torch_counter.count(lambda: logits(module, batch, seq))
    return forward, torch_counter.count(lambda: logits(module, batch, seq).backward())


def held(module, spec, family):
    """Canonical names of the weights in each of a module's parameters, by the names that the library saves it under."""
    names = {
        tensor.name: {source.replace("{layer}", str(tensor.weights[0].layer)) for source in tensor.layout.sources}
        for tensor in naming.published(spec, family)
    }
    return {
        name: set().union(*(names[saved] for saved in revert_weight_conversion(module, {name: parameter})))
        for name, parameter in module.named_parameters()
    }


def assert_training_saves_what_the_module_saves(module, spec, seq, weights, chosen):
    """With the chosen parameters alone training, a step of two sequences costs what is predicted."""
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name in chosen)
    trained = set().union(*(weights[name] for name in chosen))
    predicted = flops.training(spec, seq=seq, batch=2, pairs=pairs.full, trains=lambda weight: weight.name in trained)
    assert predicted.total == torch_counter.count(lambda: logits(module, 2, seq).backward()), chosen


def test_gpt2_at_its_context():
    """GPT-2, one sequence of 1,024 tokens with full pairs: linear maps and head, and attention."""
    predicted = flops.forward(load("gpt2").spec, seq=1024, pairs=pairs.full)
    assert predicted.linear + predicted.head == 252_993_601_536
    assert predicted.scores + predicted.mixture == 38_654_705_664
    assert (predicted.total, 3 * predicted.total) == step(published_config("gpt2"), 1, 1024)


@pytest.mark.parametrize("family", [family for family in strategies.CONFIGS if family != "gemma3"])
@FEWER
@given(data=st.data(), batch=st.integers(1, 2), seq=LENGTHS)
def test_modules_of_hugging_face_execute_what_is_predicted(family, data, batch, seq):
    """Forward and step of every family; eager attention multiplies every query by every key."""
    config = data.draw(strategies.configs(family).filter(strategies.runnable))
    spec = read(config).spec
    seq = min(seq, spec.context)
    forward = flops.forward(spec, seq=seq, batch=batch, pairs=pairs.full)
    training = flops.training(spec, seq=seq, batch=batch, pairs=pairs.full)
    assert (forward.total, training.total) == step(config, batch, seq)


@pytest.mark.parametrize("attention", ["eager", "fused"])
@pytest.mark.parametrize("family", strategies.FAMILIES)
@FEWER
@given(data=st.data(), seq=LENGTHS)
def test_the_decoder_executes_what_is_predicted(attention, family, data, seq):
    """Forward and step of every family, each expert with the tokens that chose it, or none."""
    spec = data.draw(strategies.specs(family))
    seq = min(seq, spec.context)
    decoder, tokens = Decoder(spec, attention=attention), torch.randint(spec.vocab, (2, seq))
    predicted = [count(spec, seq=seq, batch=2, pairs=pairs.full).total for count in (flops.forward, flops.training)]
    executed = [torch_counter.count(run) for run in (lambda: decoder(tokens), lambda: decoder(tokens).sum().backward())]
    assert predicted == executed


@FEWER
@given(spec=strategies.specs(*strategies.FAMILIES), data=st.data(), seq=LENGTHS)
def test_frozen_weights_save_what_the_decoder_saves(spec, data, seq):
    """Whatever trains, each missing gradient is one product less, in the prediction as in the module."""
    seq = min(seq, spec.context)
    decoder, tokens = Decoder(spec, attention="eager"), torch.randint(spec.vocab, (2, seq))
    weights = census.take(spec).weights
    chosen = data.draw(st.sets(st.sampled_from(sorted({weight.name for weight in weights})), min_size=1))
    trained = {tensor.name for weight in weights if weight.name in chosen for tensor in weight.expand()}
    for name, parameter in decoder.named_parameters():
        parameter.requires_grad_(name in trained)
    whole = torch_counter.count(lambda: decoder(tokens).sum().backward())
    predicted = flops.training(spec, seq=seq, batch=2, pairs=pairs.full, trains=lambda weight: weight.name in chosen)
    assert predicted.total == whole


@pytest.mark.parametrize("family", strategies.SPARSE)
@FEWER
@given(data=st.data(), seq=LENGTHS)
def test_frozen_weights_save_what_a_sparse_module_saves(family, data, seq):
    """Experts, routers, sinks and latent attention as well, in modules of Hugging Face."""
    config = data.draw(strategies.configs(family).filter(strategies.runnable))
    spec, module = read(config).spec, build(config)
    weights = held(module, spec, family)
    chosen = data.draw(st.sets(st.sampled_from(sorted(weights)), min_size=1))
    assert_training_saves_what_the_module_saves(module, spec, min(seq, spec.context), weights, chosen)


ONE_SPARSE_LAYER = {
    "deepseek-v3": {"first_k_dense_replace": 0},
    "gpt-oss-20b": {"layer_types": ["sliding_attention"]},
    "mixtral-8x7b": {},
    "qwen3-30b-a3b": {},
}


@pytest.mark.parametrize("name", ONE_SPARSE_LAYER)
def test_a_weight_that_trains_alone_saves_all_before_it(name):
    """Each one of a sparse layer of published shape."""
    config = {**published_config(name), "num_hidden_layers": 1, **ONE_SPARSE_LAYER[name]}
    spec, module = read(config).spec, build(config)
    weights = held(module, spec, config["model_type"])
    for parameter in weights:
        assert_training_saves_what_the_module_saves(module, spec, 3, weights, {parameter})


class Adapted(torch.nn.Module):
    """A linear map with a low-rank one beside it."""

    def __init__(self, base, rank):
        super().__init__()
        self.base = base
        self.down = torch.nn.Linear(base.in_features, rank, bias=False)
        self.up = torch.nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


@FEWER
@given(spec=strategies.specs(*strategies.DENSE), data=st.data(), rank=st.integers(1, 4))
def test_adapters_cost_what_they_execute(spec, data, rank):
    """LoRA on any targets: base matrices give input gradients only, and the first layer's not even these."""
    stems = ["attention.query", "attention.key", "attention.value", "attention.output", "feed_forward.down"]
    targets = data.draw(st.sets(st.sampled_from(stems), min_size=1))
    seq = min(3, spec.context)
    with torch.device("meta"):
        decoder = Decoder(spec, attention="eager").requires_grad_(False)
        for block in decoder.blocks:
            for target in targets:
                parent, name = block.get_submodule(target.split(".")[0]), target.split(".")[1]
                setattr(parent, name, Adapted(getattr(parent, name), rank))
        tokens = torch.zeros((2, seq), dtype=torch.long)
    adapted = adapters.adapt(census.take(spec), rank, targets)
    whole = torch_counter.count(lambda: decoder(tokens).sum().backward())
    predicted = flops.training(adapted, seq=seq, batch=2, pairs=pairs.full, trains=adapters.is_adapter)
    assert predicted.total == whole
    assert sum(w.scalars for w in adapted.weights if adapters.is_adapter(w)) == sum(
        parameter.numel() for parameter in decoder.parameters() if parameter.requires_grad
    )


@given(spec=strategies.specs(), seq=LENGTHS, batch=st.integers(1, 3))
def test_backward_is_twice_forward(spec, seq, batch):
    """As long as anything before the first product trains: an embedding is enough."""
    sizes = {"seq": seq, "batch": batch}
    forward, backward = flops.forward(spec, **sizes), flops.backward(spec, **sizes)
    assert backward == forward + forward
    assert flops.executed(spec, **sizes) == flops.training(spec, **sizes) == forward + backward
    layers = flops.by_layer(spec, **sizes)
    assert sum(layers.values(), flops.Flops()) == forward


@given(spec=strategies.specs(), seq=LENGTHS)
def test_an_embedding_alone_needs_every_input_gradient(spec, seq):
    """With only the token table training every matrix passes its gradient on, and only a tied head its own."""
    alone = flops.backward(spec, seq=seq, trains=lambda weight: weight.name == "embedding.weight")
    forward = flops.forward(spec, seq=seq)
    assert alone.linear + alone.router == forward.linear + forward.router
    assert alone.head == forward.head * (1 + spec.tied)


@given(spec=strategies.specs(), seq=LENGTHS, batch=st.integers(1, 3), rule=RULES, frozen=st.booleans())
def test_recomputation_is_extra(spec, seq, batch, rule, frozen):
    """Selective recomputation repeats attention's products, full recomputation every block, whatever trains."""
    sizes = {"seq": seq, "batch": batch, "pairs": rule}
    trains = {"trains": lambda weight: weight.name == "norm.weight"} if frozen else {}
    step = flops.training(spec, **sizes, **trains)
    forward = flops.forward(spec, **sizes)
    selective = flops.executed(spec, **sizes, **trains, recompute="selective")
    full = flops.executed(spec, **sizes, **trains, recompute="full")
    assert selective.total - step.total == forward.scores + forward.mixture
    assert full.total - step.total == forward.total - forward.head


@given(spec=strategies.specs(), seq=LENGTHS)
def test_tying_changes_no_flops(spec, seq):
    """A tied head is multiplied by as an untied one is."""
    tied, untied = (flops.training(replace(spec, tied=tied), seq=seq) for tied in (True, False))
    assert tied == untied


@given(spec=strategies.specs(*strategies.DENSE), seq=LENGTHS)
def test_key_value_heads_change_no_scores(spec, seq):
    """Every query head multiplies, however few key/value heads there are."""
    one = replace(spec, blocks=tuple(replace(b, attention=replace(b.attention, kv_heads=1)) for b in spec.blocks))
    before, after = flops.forward(spec, seq=seq), flops.forward(one, seq=seq)
    assert (before.scores, before.mixture) == (after.scores, after.mixture)


@given(spec=strategies.specs(), seq=LENGTHS)
def test_doubling_a_sequence_more_than_doubles_its_flops(spec, seq):
    """Pairs grow faster than tokens; only a window of one token does not care."""
    single = all(block.attention.window == 1 for block in spec.blocks)
    one, two = flops.forward(spec, seq=seq).total, flops.forward(spec, seq=2 * seq).total
    assert two == 2 * one if single else two > 2 * one


@given(spec=strategies.specs(), seq=LENGTHS, rule=RULES)
def test_prefill_is_the_sum_of_its_decode_steps(spec, seq, rule):
    """Token after token against a growing cache costs what the prompt costs at once, by any rule."""
    steps = (flops.forward(spec, seq=1, pairs=pairs.cached(cache, rule)) for cache in range(seq))
    assert sum(steps, flops.Flops()) == flops.forward(spec, seq=seq, pairs=rule)


@given(spec=strategies.specs(), lengths=st.lists(LENGTHS, min_size=1, max_size=4), rule=RULES)
def test_packed_documents_are_the_sum_of_the_documents(spec, lengths, rule):
    """Packing saves padding, never FLOPs, by any rule."""
    together = flops.forward(spec, seq=sum(lengths), pairs=pairs.packed(lengths, rule))
    assert together == sum((flops.forward(spec, seq=length, pairs=rule) for length in lengths), flops.Flops())


@given(config=strategies.configs(*strategies.SPARSE), seq=LENGTHS)
def test_all_experts_active_is_a_wide_dense_layer(config, seq):
    """With k = E every matrix of every expert counts; else k of E of them."""
    spec = read(config).spec
    for layer, block in enumerate(spec.blocks):
        if isinstance(block.feed_forward, Experts):
            weights = [w for w in census.take(spec).weights if w.layer == layer and "{expert}" in w.name]
            here = sum(2 * w.size * block.feed_forward.active * w.multiplies for w in weights) * seq
            everything = flops.by_layer(spec, seq=seq)[layer].linear
            shared = [w for w in census.take(spec).weights if w.layer == layer and "{expert}" not in w.name]
            others = sum(2 * w.size * w.multiplies for w in shared if w.part is not census.Part.ROUTER) * seq
            assert everything == here + others


@given(seq=st.integers(1, 60), window=st.integers(1, 70))
def test_pairs_are_the_entries_of_the_mask(seq, window):
    """Each rule is the number of ones in the mask that it stands for."""
    mask = torch.ones(seq, seq, dtype=torch.bool).tril()
    near = mask.triu(1 - window)
    assert pairs.full(seq) == mask.numel()
    assert pairs.causal(seq, window) == pairs.model(seq) == int(mask.sum())
    assert pairs.model(seq, window) == pairs.windowed(window)(seq) == int(near.sum())
    assert pairs.cached(seq - 1)(1, window) == int(near[-1].sum())
    new = min(seq, window)
    assert pairs.cached(seq - new, pairs.full)(new, window) == torch.ones(seq, seq)[-new:].numel()


@pytest.mark.parametrize(
    "make",
    [
        lambda: pairs.windowed(0),
        lambda: pairs.packed([3, 0]),
        lambda: pairs.packed([3, 4])(8),
        lambda: pairs.cached(-1),
        lambda: flops.forward(load("gpt2").spec, seq=0),
        lambda: flops.forward(load("gpt2").spec, seq=1, batch=0),
        lambda: adapters.adapt(census.take(load("gpt2").spec), 0, ["attention.query"]),
        lambda: adapters.adapt(census.take(load("gpt2").spec), 4, ["attention.q"]),
    ],
    ids=range(8),
)
def test_what_has_no_flops_is_refused(make):
    """A length, a window, a rank or a target that cannot be is an error in one line."""
    with pytest.raises(ValueError, match=r"^[^\n]+$"):
        make()
