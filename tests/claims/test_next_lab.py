"""What the lab of "next" runs: forward and backward passes of the toy, and the module objects that it makes."""

import dataclasses
import socket
from dataclasses import dataclass

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from accounting import conventions, params
from accounting.authorities import huggingface as modules
from accounting.authorities import torch_counter
from accounting.spec import SpecError
from model.recipes import tutor
from model.torch_decoder import Decoder
from tests.toys import GPT2

TOKENS = torch.arange(6)[None]
TARGETS = TOKENS + 1
DOUBLED = ({}, {"layers": 6}, {"width": 16}, {"vocab": 18}, {"context": 12}, {"heads": 4})


def eager(**dials):
    """The document's kind of decoder: it writes the scores out and keeps masks."""
    return Decoder(tutor(**dials), attention="eager")


def untied_by_cloning():
    toy = eager()
    toy.head.weight = torch.nn.Parameter(toy.head.weight.detach().clone())
    return toy


class Watch(TorchDispatchMode):
    """Counts the operators that run, and notes the shapes of the scores."""

    def __init__(self):
        super().__init__()
        self.operators, self.scores = 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.operators += 1
        if func is torch.ops.aten._softmax.default:
            self.scores.append(tuple(result.shape))
        return result


def scores(module, batch, tokens):
    """The shape of the scores in each layer of a forward pass."""
    device = module.embedding.weight.device
    with Watch() as watch:
        module(torch.zeros(batch, tokens, dtype=torch.long, device=device))
    return watch.scores


@dataclass(frozen=True, kw_only=True)
class Lab:
    """What Parts 1 to 3 of the lab make."""

    toy: Decoder
    logits: torch.Tensor
    untied: Decoder
    variants: tuple[Decoder, ...]
    large: Decoder


def run_lab():
    toy = eager()
    logits = toy(TOKENS)
    F.cross_entropy(logits[0], TARGETS[0]).backward()
    variants = tuple(eager(**dials) for dials in DOUBLED)
    with torch.device("meta"):
        large = eager(**GPT2)
    return Lab(toy=toy, logits=logits, untied=untied_by_cloning(), variants=variants, large=large)


def connected(module):
    """Whether each parameter has a gradient, and all of it finite."""
    return all(p.grad is not None and bool(p.grad.isfinite().all()) for p in module.parameters())


@pytest.mark.claim("next.idea.not_parameters")
def test_what_a_run_makes_is_no_parameter(claim):
    """Scores, keys and the optimizer's arrays exist after a step, and the count is what it was."""
    toy = eager()
    before = [id(parameter) for parameter in toy.parameters()]
    keys = []
    for block in toy.blocks:
        block.attention.key.register_forward_hook(lambda *call: keys.append(call[-1]))
    optimizer = torch.optim.AdamW(toy.parameters())
    with Watch() as watch:
        F.cross_entropy(toy(TOKENS)[0], TARGETS[0]).backward()
    optimizer.step()
    moments = sum(state[name].numel() for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq"))
    made = {"scores": sum(torch.Size(shape).numel() for shape in watch.scores)}
    made |= {"keys": sum(key.numel() for key in keys), "moments": moments}
    held = before == [id(parameter) for parameter in toy.parameters()]
    held = held and modules.unique(toy) == params.count(tutor()).unique and all(made.values())
    claim.holds(held, f"{modules.unique(toy):,} parameters before and after; {made} are none of them")


@pytest.mark.claim("next.idea.request_growth")
def test_a_longer_request_changes_no_rule(claim):
    """The scores of a request grow with its length, while no parameter changes."""
    toy = eager()
    before = {name: value.clone() for name, value in toy.state_dict().items()}
    grown = [sum(torch.Size(shape).numel() for shape in scores(toy, 1, tokens)) for tokens in range(1, 7)]
    same = before.keys() == toy.state_dict().keys()
    same = same and all(torch.equal(before[name], value) for name, value in toy.state_dict().items())
    claim.holds(
        same and grown == [3 * 2 * tokens**2 for tokens in range(1, 7)],
        f"scores {grown} for 1 to 6 tokens; {modules.unique(toy):,} parameters, none changed",
    )


@pytest.mark.claim("next.part2.capacity_vs_use")
def test_using_the_context_adds_nothing(claim):
    """Requests of every length up to the capacity leave the count alone; a larger capacity does not."""
    toy = eager()
    counts = []
    for tokens in range(1, 7):
        assert toy(TOKENS[:, :tokens]).shape == (1, tokens, 9)
        counts.append(modules.unique(toy))
    larger = modules.unique(eager(context=12))
    held = set(counts) == {params.count(tutor()).unique} and larger > counts[0]
    claim.holds(held, f"{counts} after 1 to 6 tokens; {larger} with a capacity of 12")


@pytest.mark.claim("next.part2.heads_change_runtime")
def test_heads_change_the_scores(claim):
    """At a fixed width and count, H heads form B H T T scores in each layer."""
    seen = {heads: scores(eager(heads=heads), 2, 5) for heads in (1, 2, 4, 8)}
    counts = {modules.unique(eager(heads=heads)) for heads in seen}
    held = len(counts) == 1 and all(shapes == [(2, heads, 5, 5)] * 3 for heads, shapes in seen.items())
    claim.holds(held, f"{ {heads: shapes[0] for heads, shapes in seen.items()} } with {counts} parameters")


@pytest.mark.claim("next.build.numel_unique")
def test_parameters_are_distinct_objects(claim):
    """``parameters()`` yields each object once, the shared table too, and ``numel`` counts its entries."""
    toy = eager()
    objects, names = list(toy.parameters()), list(toy.named_parameters(remove_duplicate=False))
    entries = sum(len(tensor.flatten().tolist()) for tensor in objects)
    held = len({id(tensor) for tensor in objects}) == len(objects) == len(names) - 1
    held = held and sum(tensor.numel() for tensor in objects) == entries == params.count(tutor()).unique
    claim.holds(held, f"{len(names)} names, {len(objects)} objects, {entries:,} entries")


@pytest.mark.claim("next.build.finite_grads")
def test_one_backward_reaches_every_parameter(claim):
    """One backward pass of the next-token loss leaves a finite gradient on every parameter."""
    toy = eager()
    assert not connected(toy)
    F.cross_entropy(toy(TOKENS)[0], TARGETS[0]).backward()
    claim.holds(connected(toy), f"{len(list(toy.parameters()))} parameters have finite gradients")


@pytest.mark.claim("next.build.clone_unties")
def test_cloning_unties(claim):
    """A head that is a new Parameter is another object, and V C more are counted."""
    untied = untied_by_cloning()
    counts = [modules.unique(eager()), modules.unique(untied)]
    predicted = [params.count(tutor(tied=tied)).unique for tied in (True, False)]
    held = untied.head.weight is not untied.embedding.weight and counts == predicted and counts[1] - counts[0] == 9 * 8
    claim.holds(held, f"{counts[0]:,} and {counts[1]:,}")


@pytest.mark.claim("next.build.alias_not_untie")
def test_another_name_unties_nothing(claim):
    """Another name for the same Parameter leaves the count alone."""
    toy = eager()
    names = len(toy.state_dict())
    toy.another = toy.head.weight
    toy.head.weight = toy.embedding.weight
    held = toy.head.weight is toy.embedding.weight and len(toy.state_dict()) == names + 1
    claim.holds(held and modules.unique(toy) == params.count(tutor()).unique, f"{modules.unique(toy):,}")


@pytest.mark.claim("next.build.equal_not_identical")
def test_equal_values_are_not_one_object(claim):
    """A cloned head has the table's values, and keeps them when the table changes."""
    untied = untied_by_cloning()
    equal = torch.equal(untied.head.weight, untied.embedding.weight)
    with torch.no_grad():
        untied.embedding.weight += 1
    apart = not torch.equal(untied.head.weight, untied.embedding.weight)
    held = equal and apart and untied.head.weight is not untied.embedding.weight
    claim.holds(held, f"equal {equal}, apart after a change of one {apart}")


@pytest.mark.claim("next.build.replace_immutable")
def test_replace_leaves_the_base_alone(claim):
    """``dataclasses.replace`` makes a spec with one field changed; the base is as it was, and cannot be changed."""
    base = tutor()
    changed = dataclasses.replace(base, vocab=18)
    fields = {field.name for field in dataclasses.fields(base)}
    differ = {name for name in fields if getattr(base, name) != getattr(changed, name)}
    with pytest.raises(dataclasses.FrozenInstanceError):
        base.vocab = 18
    counts = [modules.unique(Decoder(spec)) for spec in (base, changed)]
    held = counts == [params.count(tutor()).unique, params.count(tutor(vocab=18)).unique]
    claim.holds(held and base == tutor() and differ == {"vocab"}, f"{differ} differs; {counts} parameters")


@pytest.mark.claim("next.build.meta_scope")
def test_meta_affects_what_is_built_inside(claim):
    """A toy built before the meta context and one built after it are real; the one built inside is not."""
    before = eager()
    with torch.device("meta"):
        inside = eager()
        untouched = before(TOKENS)
    after = eager()
    meta = [{tensor.is_meta for tensor in module.state_dict().values()} for module in (before, inside, after)]
    claim.holds(meta == [{False}, {True}, {False}] and bool(untouched.isfinite().all()), f"meta: {meta}")


@pytest.mark.claim("next.build.offline")
def test_no_network_and_no_accelerator(claim, monkeypatch):
    """The lab's models are built, run and differentiated on the CPU while every socket is refused."""

    def refuse(*arguments, **options):
        raise OSError("no network here")

    monkeypatch.setattr(socket, "socket", refuse)
    with pytest.raises(OSError, match="no network"):
        socket.create_connection(("localhost", 9))
    lab = run_lab()
    tensors = [*lab.toy.state_dict().values(), *(parameter.grad for parameter in lab.toy.parameters()), lab.logits]
    devices = {tensor.device.type for tensor in tensors}
    claim.holds(devices == {"cpu"} and connected(lab.toy), f"without a socket, on {devices}")


@pytest.mark.claim("next.build.under_10s")
def test_the_lab_is_little_work(claim):
    """The lab's models take so few operators and FLOPs that ten seconds suffice at a thousand operators a second."""
    with Watch() as watch:
        run_lab()
    flops = torch_counter.count(run_lab)
    shown = f"{watch.operators:,} operators and {flops:,} FLOPs"
    claim.holds(watch.operators / 1_000 < 10 and flops < 1_000_000, shown)
    claim.otherwise(watch.operators / 100 < 10, f"{watch.operators / 100:.0f} s at a hundred operators a second")


@pytest.mark.claim("next.build.invalid_inputs")
def test_invalid_inputs_are_refused(claim):
    """Sizes below one, heads that do not divide the width and too many tokens are errors."""

    def refused(run, error):
        with pytest.raises(error) as problem:
            run()
        return str(problem.value)

    wrong = ({"vocab": 0}, {"width": 0}, {"context": 0}, {"layers": 0}, {"heads": 3})
    messages = [refused(lambda dials=dials: tutor(**dials), SpecError) for dials in wrong]
    messages.append(refused(lambda: eager()(torch.zeros(1, 7, dtype=torch.long)), ValueError))
    named = ("vocab", "head_dim", "context", "layers", "heads", "context")
    held = all(name in message for name, message in zip(named, messages, strict=True))
    claim.holds(held, "; ".join(messages))


@pytest.mark.claim("next.out.p1_logits")
def test_logits_and_gradients(claim):
    """Six tokens give logits of shape (1, 6, 9), and their loss finite gradients everywhere."""
    lab = run_lab()
    claim.measured([1, tutor().context, tutor().vocab], observed=lab.logits.shape)
    claim.holds(connected(lab.toy), "every parameter has a finite gradient")


@pytest.mark.claim("next.out.check_passed")
def test_final_checks(claim):
    """What the lab asserts of counts, masks, scores, cache and budget before its last line is true."""
    lab = run_lab()
    base, layers, width, _, _, heads = map(modules.unique, lab.variants)
    untied, large = modules.unique(lab.untied), modules.unique(lab.large)
    leading = sum(parameter.numel() for parameter in lab.toy.parameters() if parameter.ndim == 2)
    masks = sum(mask.numel() for mask in lab.toy.buffers())
    squares = [torch.Size(scores(lab.large, 1, tokens)[0]).numel() for tokens in (512, 1024)]
    caches = [cached(tokens) for tokens in (512, 1024)]
    asserted = {
        "count": params.count(tutor()).unique == base == 2752,
        "leading": leading == 2424,
        "tied": lab.toy.head.weight is lab.toy.embedding.weight,
        "untied": lab.untied.head.weight is not lab.untied.embedding.weight,
        "table": untied - base == 9 * 8,
        "untied count": params.count(tutor(tied=False)).unique == untied,
        "connected": connected(lab.toy) and lab.logits.shape == (1, 6, 9),
        "masks": masks == 3 * 6**2,
        "heads": heads == base,
        "width and layers": width > layers > base,
        "GPT-2": large == params.count(tutor(**GPT2)).unique == 124439808,
        "meta": all(parameter.is_meta for parameter in lab.large.parameters()),
        "scores": squares[1] == 4 * squares[0],
        "cache": caches[1] == 2 * caches[0],
        "budget": conventions.six_nd(1_000_000, 100_000_000) == conventions.six_nd(2_000_000, 50_000_000),
    }
    failed = [name for name, held in asserted.items() if not held]
    claim.holds(not failed, f"{len(asserted)} assertions, not true: {failed}; scores {squares}, cache {caches}")


def cached(tokens):
    """Scalars that Hugging Face's GPT-2 keeps of its keys and values."""
    module = modules.build({"model_type": "gpt2"}, attn_implementation="eager")
    ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    kept = module(ids, attention_mask=torch.ones_like(ids), use_cache=True).past_key_values
    return sum(layer.keys.numel() + layer.values.numel() for layer in kept.layers)
