"""Part 3 of "next": the shape of GPT-2 small, built on the meta device."""

from fractions import Fraction

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import GPT2Config

from accounting import census, conventions, memory, naming, params
from accounting import huggingface as configs
from accounting.authorities import huggingface as modules
from accounting.census import Part
from accounting.ledger import case
from model.recipes import tutor
from model.torch_decoder import Decoder
from tests.toys import GPT2

SPEC = configs.load("gpt2").spec
CONFIG = configs.published_config("gpt2")


@pytest.fixture(scope="module")
def theirs():
    """Hugging Face's GPT-2."""
    return modules.build(CONFIG)


@pytest.fixture(scope="module")
def ours():
    """The toy's decoder in GPT-2's shape."""
    return on_meta(**GPT2)


def on_meta(**dials):
    with torch.device("meta"):
        return Decoder(tutor(**dials), attention="eager")


@pytest.mark.claim("next.part3.config")
def test_published_shape(claim):
    """GPT-2 small has 12 layers, width 768, 12 heads, 50,257 tokens and 1,024 positions."""
    published = [len(SPEC.blocks), SPEC.width, SPEC.blocks[0].attention.heads, SPEC.vocab, SPEC.context]
    library = GPT2Config()
    claim.measured(
        published, observed=[library.n_layer, library.n_embd, library.n_head, library.vocab_size, library.n_positions]
    )


@pytest.mark.parametrize(
    "names",
    [
        case("next.part3.exact", ["exact"]),
        case("next.part3.leading", ["leading"]),
        case("next.part3.token_table", ["table"]),
        case("next.part3.token_share", ["share"]),
        case("next.part3.untied_adds", ["untied"]),
        case("next.out.p3_lead", ["leading", "exact", "exact"]),
        case("next.out.p3_table", ["table", "share"]),
        case("next.out.p3_untied", ["untied"]),
    ],
)
def test_counts(claim, names, theirs):
    """GPT-2's parameters: all, without biases and norms, the token table, its share, an untied head."""
    counts, table = params.count(SPEC), params.by_part(SPEC)[Part.EMBEDDING].unique
    untied = params.count(configs.read({**CONFIG, "tie_word_embeddings": False}).spec)
    predicted = {
        "exact": counts.unique,
        "leading": counts.embedding + conventions.kaplan_parameters(SPEC),
        "table": table,
        "share": Fraction(table, counts.unique),
        "untied": untied.unique - counts.unique,
    }
    held, rows = modules.unique(theirs), theirs.transformer.wte.weight.numel()
    observed = {
        "exact": held,
        "leading": sum(tensor.numel() for tensor in theirs.parameters() if tensor.ndim == 2),
        "table": rows,
        "share": Fraction(rows, held),
        "untied": modules.unique(modules.build({**CONFIG, "tie_word_embeddings": False})) - held,
    }
    claim.measured([predicted[name] for name in names], observed=[observed[name] for name in names])


@pytest.mark.claim("next.out.p3_bytes")
def test_weight_bytes(claim):
    """GPT-2's weights at four bytes a value, and at two."""
    observed = {}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        observed[dtype] = sum(tensor.nbytes for tensor in modules.build(CONFIG).to(dtype).parameters())
    assert observed[torch.bfloat16] == memory.weight_bytes(SPEC, "bfloat16")
    claim.measured(
        [memory.weight_bytes(SPEC, "float32"), memory.weight_bytes(SPEC, "float16")],
        observed=[observed[torch.float32], observed[torch.float16]],
    )


@pytest.mark.claim("next.out.p3_adam")
def test_adam_arrays(claim):
    """Weights, gradients and both moments of AdamW, all in float32, after a real step, without its step counters."""
    weights = list(modules.build(CONFIG).parameters())
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    optimizer = torch.optim.AdamW(weights)
    optimizer.step()
    states = [optimizer.state[weight] for weight in weights]
    assert all(set(state) == {"step", "exp_avg", "exp_avg_sq"} and state["step"].ndim == 0 for state in states)
    arrays = [*weights, *(weight.grad for weight in weights)]
    arrays += [state[moment] for state in states for moment in ("exp_avg", "exp_avg_sq")]
    claim.measured(memory.training(SPEC, "adam_float32").total, observed=sum(array.nbytes for array in arrays))


@pytest.mark.claim("next.part3.meta_no_data")
def test_meta_tensors_hold_no_data(claim, ours):
    """Every parameter on meta has a shape and a dtype, no storage in memory, and no value to read."""
    tensors = list(ours.parameters())
    seen = {(tensor.is_meta, tensor.dtype, tensor.untyped_storage().data_ptr()) for tensor in tensors}
    shapes = {name: tuple(tensor.shape) for name, tensor in ours.named_parameters()}
    assert shapes == {weight.name: weight.shape for weight in census.take(tutor(**GPT2)).weights}
    with pytest.raises(RuntimeError, match="meta"):
        tensors[0].flatten()[0].item()
    claim.holds(seen == {(True, torch.float32, 0)}, f"{len(tensors)} parameters, all {seen}; item() raises")


@pytest.mark.claim("next.part3.meta_counts")
def test_meta_modules_are_counted_as_real_ones(claim, ours):
    """A toy on meta counts as the real one does, and GPT-2's shape on meta as predicted from its published config."""
    toy = [modules.unique(module) for module in (Decoder(tutor()), on_meta())]
    large = [modules.unique(ours), params.count(tutor(**GPT2)).unique, params.count(SPEC).unique]
    held = all(tensor.is_meta for tensor in ours.parameters()) and len(set(toy)) == len(set(large)) == 1
    claim.holds(held, f"real and on meta {toy}, on meta and predicted {large}")


def allocated(build):
    """Bytes of CPU memory that torch has allocated and kept while it built a module."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as events:
        module = build()
    assert modules.unique(module)
    return sum(event.self_cpu_memory_usage for event in events.key_averages())


@pytest.mark.claim("next.part3.meta_memory")
def test_meta_modules_take_no_memory(claim):
    """Building GPT-2's shape on meta allocates nothing; building the toy allocates its weights at least."""
    large, toy = allocated(lambda: on_meta(**GPT2)), allocated(lambda: Decoder(tutor(), attention="eager"))
    assert toy >= memory.weight_bytes(tutor(), "float32")
    claim.holds(large == 0, f"{large} bytes of {memory.weight_bytes(SPEC, 'float32'):,}; the real toy took {toy:,}")


@pytest.mark.claim("next.part3.not_checkpoint")
def test_equal_shapes_are_no_checkpoint(claim, theirs):
    """The shapes are the checkpoint's; each draw of weights is another, and GPT-2's activation gives other logits."""
    tensors = naming.published(census.take(tutor(**GPT2)), "gpt2")
    same_shapes = {tensor.name: tensor.shape for tensor in tensors} == modules.published(theirs)
    assert not torch.equal(Decoder(tutor()).embedding.weight, Decoder(tutor()).embedding.weight)

    size = {"vocab_size": 9, "n_embd": 8, "n_positions": 6, "n_ctx": 6, "n_layer": 3, "n_head": 2}
    specs = (tutor(), tutor(), configs.read({**CONFIG, **size}).spec)
    toy, same, published = (Decoder(spec).double() for spec in specs)
    with torch.no_grad():
        for parameter in toy.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(parameter.numel()))
    for module in (same, published):
        module.load_state_dict(toy.state_dict())
    logits, *others = (module(torch.arange(6)[None]) for module in (toy, same, published))
    # The two activations differ by up to 5e-4, float64 rounds at 1e-16: the bound stands far from both.
    gap_same, gap_published = ((logits - other).abs().max().item() for other in others)
    claim.holds(
        same_shapes and gap_same == 0 and gap_published > 1e-6,
        f"equal shapes; one set of weights with GPT-2's own gelu moves the toy's logits by {gap_published:.1e}",
    )
