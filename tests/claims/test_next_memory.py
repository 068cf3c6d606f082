"""Part 4 of "next": bytes of weights and of training, the square of scores, and the key/value cache."""

from fractions import Fraction
from functools import lru_cache, partial
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

from accounting import activations, cache, memory, pairs, params
from accounting.authorities import huggingface as modules
from accounting.authorities import torch_counter, torch_memory
from accounting.huggingface import load, published_config, read
from accounting.ledger import case
from model import weights
from model.recipes import tutor
from model.torch_attention import causal_mask, eager_attention
from model.torch_decoder import Decoder
from model.torch_generate import generate
from tests import strategies
from tests.toys import FEW, FIELDS, GPT2, TOY, everywhere

SPEC = load("gpt2").spec
BATCH = 2
LENGTHS = (512, 1024)


@lru_cache
def module(dtype=torch.float32, device="meta", **dials):
    """Hugging Face's GPT-2 of a shape, which writes its scores out."""
    config = {"model_type": "gpt2", **{FIELDS[name]: size for name, size in dials.items()}}
    return modules.build(config, device, attn_implementation="eager").to(dtype).eval()


def forward(built, batch, tokens, **options):
    ids = torch.zeros(batch, tokens, dtype=torch.long, device=built.device)
    return built(ids, attention_mask=torch.ones_like(ids), **options)


def scores(built, batch, tokens):
    """The attention of each layer, (B, H, T, T)."""
    return forward(built, batch, tokens, output_attentions=True).attentions


def cached(built, batch, tokens):
    """Bytes of the keys and values that are kept of all layers."""
    return sum(torch_memory.cache_bytes(forward(built, batch, tokens, use_cache=True).past_key_values))


def elements(spec, tokens, batch=1):
    """Numbers in one layer's scores, as predicted."""
    return activations.score_bytes(spec, seq=tokens, batch=batch) // memory.DTYPE_BYTES["float32"]


def bytes_of(tensors):
    return sum(tensor.nbytes for tensor in tensors)


def on_meta(**dials):
    with torch.device("meta"):
        return Decoder(tutor(**dials))


def step(built, make=torch.optim.AdamW):
    """Bytes of weights, gradients and the optimizer's arrays after a real step, and of its scalars."""
    tokens = torch.zeros(1, 1, dtype=torch.long, device=next(built.parameters()).device)
    built(tokens).sum().backward()
    parameters = list(built.parameters())
    optimizer = make(parameters)
    assert torch_memory.optimizer_state(optimizer).arrays == {}
    optimizer.step()
    state = torch_memory.optimizer_state(optimizer)
    held = {"weights": bytes_of(parameters), "gradients": bytes_of(weight.grad for weight in parameters)}
    return held | state.arrays, state.scalars


def train(built, tokens):
    F.cross_entropy(built(tokens)[0], tokens[0]).backward()


def peak(run):
    """The most bytes of CPU memory that torch holds during ``run`` beyond what was there, kernels' own included."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


@pytest.mark.claim("next.part4.weights_formula")
def test_weights_take_their_number_times_a_values_bytes(claim):
    """P b bytes in every dtype, of the toy, of GPT-2 and of shapes drawn at random."""

    def stated(dials):
        count = params.count(tutor(**dials)).unique
        for name in memory.DTYPE_BYTES:
            dtype = getattr(torch, name)
            held = bytes_of(on_meta(**dials).to(dtype).parameters())
            if not count * dtype.itemsize == memory.weight_bytes(tutor(**dials), name) == held:
                return False
        return True

    claim.holds(everywhere(stated), f"in {', '.join(memory.DTYPE_BYTES)}")


@pytest.mark.parametrize(
    "dtypes", [case("next.part4.fp32", ["float32"]), case("next.part4.fp16", ["float16", "bfloat16"])]
)
def test_weights_of_gpt2(claim, dtypes):
    """GPT-2's weights at four bytes a value, and at two in either format."""
    for dtype in dtypes:
        built = modules.build(published_config("gpt2")).to(getattr(torch, dtype))
        claim.measured(memory.weight_bytes(SPEC, dtype), observed=bytes_of(built.parameters()))


@pytest.mark.claim("next.part4.adam16P")
def test_four_float32_arrays_take_sixteen_bytes_a_parameter(claim):
    """Weights, gradients and the two moments that a step of AdamW leaves, its counts of steps apart."""

    def stated(dials):
        spec, (arrays, _) = tutor(**dials), step(on_meta(**dials))
        predicted = memory.training(spec, "adam_float32").total
        return len(arrays) == 4 and 16 * params.count(spec).unique == predicted == sum(arrays.values())

    arrays, counts = step(Decoder(tutor()))
    claim.holds(everywhere(stated), f"{sum(arrays.values()):,} bytes on the toy, and {counts} of counts of steps")


@pytest.mark.claim("next.part4.adam_bytes")
def test_adam_arrays_of_gpt2(claim):
    """All four arrays for the shape of GPT-2."""
    arrays, _ = step(on_meta(**GPT2))
    claim.measured(memory.training(SPEC, "adam_float32").total, observed=sum(arrays.values()))


@pytest.mark.claim("next.part4.adamw_step")
def test_a_step_of_adamw_allocates_two_moments(claim):
    """For each parameter of the toy one first and one second moment of its shape, and beside them only a scalar."""
    toy = Decoder(tutor())
    toy(torch.arange(6)[None]).square().sum().backward()
    optimizer = torch.optim.AdamW(toy.parameters())
    before = len(optimizer.state)
    optimizer.step()
    numbers, scalars, held = 0, 0, before == 0
    for weight in toy.parameters():
        arrays = {name for name, value in optimizer.state[weight].items() if value.shape == weight.shape}
        held = held and arrays == {"exp_avg", "exp_avg_sq"}
        numbers += sum(optimizer.state[weight][name].numel() for name in arrays)
        scalars += sum(value.numel() for value in optimizer.state[weight].values() if value.ndim == 0)
    held = held and numbers == 2 * params.count(tutor()).unique
    claim.holds(held, f"{numbers:,} numbers in moments, and {scalars} counts of steps, one a tensor")


@pytest.mark.claim("next.part4.excludes")
def test_a_step_holds_more_than_the_four_arrays(claim):
    """What the next backward pass of the toy needs comes on top: activations and temporaries, and masks."""
    arrays, peaks = memory.training(tutor(), "adam_float32").total, []
    for length in (1, 6):
        toy, tokens = Decoder(tutor(), attention="eager"), torch.arange(length)[None]
        held, _ = step(toy)
        assert sum(held.values()) == arrays
        toy.zero_grad()
        peaks.append(arrays - held["gradients"] + peak(partial(train, toy, tokens)))
        kept = torch_memory.saved(partial(toy, tokens), [*toy.parameters(), *toy.buffers(), tokens]).bytes
        assert kept == activations.total(tutor(), seq=length, attention="eager")
    shown = f"{arrays:,} bytes; with activations and temporaries {peaks[0]:,} for one token, {peaks[1]:,} for six"
    masks = bytes_of(toy.buffers())
    claim.holds(
        all(most > arrays for most in peaks) and masks > 0, f"{shown}, {kept:,} of activations; {masks} of masks"
    )


@pytest.mark.claim("next.part4.layouts")
def test_other_layouts_take_other_bytes(claim):
    """What real steps leave of each parameter in two dtypes and under three optimizers."""
    count, found = params.count(tutor()).unique, {}
    for layout, dtype, make in (
        ("adam_float32", torch.float32, torch.optim.AdamW),
        ("adam_bfloat16", torch.bfloat16, torch.optim.AdamW),
        ("adam_amsgrad_float32", torch.float32, lambda weights: torch.optim.AdamW(weights, amsgrad=True)),
        ("sgd_float32", torch.float32, torch.optim.SGD),
        ("sgd_momentum_float32", torch.float32, lambda weights: torch.optim.SGD(weights, momentum=0.9)),
    ):
        arrays, _ = step(Decoder(tutor()).to(dtype), make)
        assert sum(arrays.values()) == memory.training(tutor(), layout).total
        found[layout] = Fraction(sum(arrays.values()), count)
    others = {size for layout, size in found.items() if layout != "adam_float32"}
    held = found["adam_float32"] == 16 and 16 not in others and len(others) > 1
    claim.holds(held, ", ".join(f"{layout} {size}" for layout, size in found.items()) + " bytes a parameter")


@pytest.mark.claim("next.part4.score_shape")
def test_scores_have_the_shape_of_a_square(claim):
    """(B, H, T, T) in every layer: of Hugging Face's module, and in what our decoder's softmax keeps."""

    def stated(dials):
        tokens = dials["context"]
        square = (BATCH, dials["heads"], tokens, tokens)
        return [tuple(each.shape) for each in scores(module(**dials), BATCH, tokens)] == [square] * dials["layers"]

    toy, tokens = Decoder(tutor(), attention="eager"), torch.zeros(BATCH, 5, dtype=torch.long)
    kept = torch_memory.saved(lambda: toy(tokens), [*toy.parameters(), *toy.buffers(), tokens])
    squares = [shape for shape, _ in kept.storages if shape[-2:] == (5, 5)]
    claim.holds(everywhere(stated) and squares == [(BATCH, 2, 5, 5)] * 3, f"the toy's three layers keep {squares}")


@pytest.mark.claim("next.part4.score_elements")
def test_scores_have_the_elements_of_a_square(claim):
    """B H T^2 in each layer, at every length of the toy and at full length elsewhere."""

    def stated(dials, tokens=None):
        tokens = tokens or dials["context"]
        seen = {each.numel() for each in scores(module(**dials), BATCH, tokens)}
        return {BATCH * dials["heads"] * tokens**2} == {elements(tutor(**dials), tokens, BATCH)} == seen

    toy = all(stated(TOY, tokens) for tokens in range(1, 7))
    claim.holds(
        everywhere(stated) and toy, f"{elements(tutor(), 5, BATCH)} for two sequences of five tokens of the toy"
    )


@pytest.mark.claim("next.part4.mask_full_square")
def test_a_causal_mask_leaves_the_square(claim):
    """T^2 scores of each head are there, and T (T - 1) / 2 of them count for nothing."""
    built, ours, held = module(device="cpu", **TOY), Decoder(tutor(), attention="eager").blocks[0].attention.mask, True
    for tokens in range(1, 7):
        masked = tokens * (tokens - 1) // 2
        held = held and pairs.full(tokens) - pairs.causal(tokens) == int((~ours[:tokens, :tokens]).sum()) == masked
        for attention in scores(built, 1, tokens):
            zeros = (attention[0] == 0).sum((1, 2)).tolist()
            held = held and attention[0, 0].numel() == pairs.full(tokens) and zeros == [masked] * TOY["heads"]
    claim.holds(held, f"{pairs.full(6)} entries a head at six tokens, {pairs.full(6) - pairs.causal(6)} masked")


@pytest.mark.parametrize(
    "figures",
    [
        case("next.part4.score_512", [("scores", 512)]),
        case("next.part4.score_1024", [("scores", 1024)]),
        case("next.part4.cache_512", [("cache", 512)]),
        case("next.part4.cache_1024", [("cache", 1024)]),
        case("next.out.p4_512", [("scores", 512), ("cache", 512)]),
        case("next.out.p4_1024", [("scores", 1024), ("cache", 1024)]),
    ],
)
def test_scores_and_cache_of_gpt2(claim, figures):
    """One layer's scores, and the cache of all layers in two bytes a number, for one sequence."""
    predicted = {"scores": lambda tokens: elements(SPEC, tokens), "cache": lambda tokens: cache.total(SPEC, tokens)}
    observed = {
        "scores": lambda tokens: scores(module(**GPT2), 1, tokens)[0].numel(),
        "cache": lambda tokens: cached(module(torch.bfloat16, **GPT2), 1, tokens),
    }
    claim.measured(
        [predicted[name](tokens) for name, tokens in figures],
        observed=[observed[name](tokens) for name, tokens in figures],
    )


def grown(size, tokens=LENGTHS):
    """How many times more ``size`` gives for the longer of two lengths."""
    return Fraction(size(tokens[1]), size(tokens[0]))


def score_growth(**dials):
    """Predicted and observed growth of the scores where the context doubles to all of it, or all but one."""
    half = dials["context"] // 2
    predicted = grown(lambda tokens: elements(tutor(**dials), tokens), (half, 2 * half))
    return predicted, grown(lambda tokens: scores(module(**dials), 1, tokens)[0].numel(), (half, 2 * half))


@pytest.mark.claim("next.part4.score_x4")
def test_a_doubled_context_has_four_times_the_scores(claim):
    """As the lengths double, of GPT-2 and of any shape that has two positions, and no weight is added."""
    built = module(**GPT2)
    before = modules.unique(built)
    predicted, observed = score_growth(**GPT2)
    claim.measured(predicted, observed=observed)
    held = everywhere(lambda dials: dials["context"] < 2 or score_growth(**dials) == (4, 4))
    claim.holds(held and modules.unique(built) == before, f"four times for any shape; {before:,} weights as before")


@pytest.mark.claim("next.part4.cache_values")
def test_a_cache_has_keys_and_values_of_the_full_width(claim):
    """2 L B T C numbers under full multi-head attention, in four bytes or in two."""

    def stated(dials):
        tokens = dials["context"]
        numbers = 2 * dials["layers"] * BATCH * tokens * dials["width"]
        for dtype in (torch.float32, torch.bfloat16):
            name = str(dtype).removeprefix("torch.")
            predicted = cache.total(tutor(**dials), tokens, batch=BATCH, dtype=name)
            if not numbers * dtype.itemsize == predicted == cached(module(dtype, **dials), BATCH, tokens):
                return False
        return True

    per_token = cache.total(SPEC, 1)
    claim.holds(everywhere(stated), f"GPT-2 keeps {per_token:,} bytes a token, {per_token // 2:,} numbers")


@pytest.mark.claim("next.part4.cache_linear")
def test_a_cache_grows_with_its_length(claim):
    """Twice as large where the context doubles, and T times one token's at any length."""
    built = module(torch.bfloat16, **GPT2)
    claim.measured(
        grown(lambda tokens: cache.total(SPEC, tokens)), observed=grown(lambda tokens: cached(built, 1, tokens))
    )

    def linear(dials):
        spec, one = tutor(**dials), cached(module(**dials), 1, 1)
        lengths = range(1, min(dials["context"], 12) + 1)
        sizes = [cache.total(spec, tokens, dtype="float32") for tokens in lengths]
        return sizes == [tokens * one for tokens in lengths] == [cached(module(**dials), 1, each) for each in lengths]

    claim.holds(everywhere(linear), f"{cache.total(SPEC, 1):,} bytes a token at any length")


@pytest.mark.claim("next.part4.gqa_formula")
def test_grouped_queries_keep_the_width_of_their_keys(claim):
    """2 L B T n_kv d_h numbers, whatever the heads; Llama 3.1 keeps a fourth of 2 L B T C."""

    def sizes(config, tokens):
        """Bytes that are kept, and those of the two formulas in float32."""
        spec = read(config).spec
        heads, layers = spec.blocks[0].attention, len(spec.blocks)
        held = cached(modules.build(config, attn_implementation="eager").float(), BATCH, tokens)
        assert cache.total(spec, tokens, batch=BATCH, dtype="float32") == held
        widths = (heads.kv_heads * heads.head_dim, spec.width)
        return held, *(4 * 2 * layers * BATCH * tokens * width for width in widths)

    @FEW
    @given(config=strategies.configs("llama"))
    def drawn(config):
        held, narrow, _ = sizes(config, config["max_position_embeddings"])
        assert held == narrow

    drawn()
    held, narrow, full = sizes(published_config("llama-3.1-8b"), 16)
    claim.holds(held == narrow and 4 * held == full, f"Llama 3.1 8B keeps {held:,} bytes of 32 tokens, not {full:,}")


@torch.no_grad()
def twins():
    """The toy and Hugging Face's GPT-2 with its activation, of the same random weights, in float64."""
    toy = Decoder(tutor()).double()
    for weight in toy.parameters():
        weight.normal_(std=0.5, generator=torch.Generator().manual_seed(weight.numel()))
    shape = {FIELDS[name]: size for name, size in TOY.items()}
    config = {"model_type": "gpt2", "activation_function": "gelu", **shape}
    library = modules.build(config, "cpu", attn_implementation="eager").double().eval()
    tensors = weights.to_published(weights.from_module(toy), tutor(), "gpt2")
    library.load_state_dict({name: torch.from_numpy(tensor) for name, tensor in tensors.items()}, strict=False)
    return toy, library


@pytest.mark.claim("next.part4.no_cache")
def test_generation_without_a_cache_reads_its_context_again(claim):
    """Each token is a pass over the last S, keeps nothing, and gives a whole pass's logits; a cache reads one token."""
    (toy, library), context, seen = twins(), tutor().context, []
    toy.register_forward_hook(lambda _, inputs, logits: seen.append((inputs[0], logits[:, -1])))
    tokens, kept = torch.tensor([[1, 2]]), []
    for _ in range(9):
        more, keys = generate(toy, tokens[:, -context:], 1, cached=False)
        tokens, kept = torch.cat((tokens, more[:, -1:]), 1), kept + keys
    read_again = [len(read[0]) for read, _ in seen]
    with torch.no_grad():
        whole = [library(tokens[:, :end][:, -context:], use_cache=False).logits[:, -1] for end in range(2, 11)]
    # Float64 rounds at 1.1e-16, and a logit is hundreds of roundings deep.
    equal = all(
        (mine - all_).abs().max() <= 1e-12 * all_.abs().max() for (_, mine), all_ in zip(seen, whole, strict=True)
    )
    seen.clear()
    generate(toy, tokens[:, :2], 4)
    with_cache = [len(read[0]) for read, _ in seen]
    held = equal and not kept and read_again == [2, 3, 4, 5, *[6] * 5] and with_cache == [2, 1, 1, 1]
    claim.holds(held, f"passes over {read_again} tokens; with a cache over {with_cache}")


def attention_inputs(tokens, dtype=torch.float32, width=8):
    """Queries, keys and values of two heads, (1, 2, T, H) each."""
    random = torch.Generator().manual_seed(tokens)
    return [torch.randn(1, 2, tokens, width, generator=random, dtype=dtype, requires_grad=True) for _ in range(3)]


def flash(query, key, value):
    """PyTorch's tiled kernel, or an error where it does not take its inputs."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def naive(query, key, value):
    """The same with scores that are written out."""
    mask = causal_mask(query.shape[2], key.shape[2], None, query.device)
    return eager_attention(query, key, value, mask, query.shape[3] ** -0.5)


@pytest.mark.claim("next.part4.flash_memory")
def test_flash_attention_writes_no_square(claim):
    """Its peak and what it keeps grow linearly at most; it weighs every pair, for the FLOPs of a dense forward pass."""
    lengths = (1024, 2048, 4096)
    peaks, kept, squares = {flash: [], naive: []}, {flash: [], naive: []}, [4 * 2 * length**2 for length in lengths]
    for attend in (flash, naive):
        for length in lengths:
            inputs = attention_inputs(length)
            peaks[attend].append(peak(lambda inputs=inputs, attend=attend: attend(*inputs).sum().backward()))
            kept[attend].append(torch_memory.saved(lambda inputs=inputs, attend=attend: attend(*inputs), inputs).bytes)
    # Beside what grows, the kernel holds a tile for each thread, whatever the length.
    growth = [after - before for before, after in pairwise(peaks[flash])]
    linear = growth[1] <= 2 * growth[0] < squares[0]
    linear = linear and [size * lengths[0] for size in kept[flash]] == [kept[flash][0] * length for length in lengths]
    assert all(most > square for most, square in zip(peaks[naive], squares, strict=True))

    query, key, _ = attention_inputs(700, width=700)  # values that are the identity show the weight of each pair
    weighed = flash(query, key, torch.eye(700).expand(1, 2, 700, 700))
    compared = int((weighed > 0).sum()) == 2 * pairs.causal(700)

    inputs = attention_inputs(64)
    shapes = [tuple(each.shape) for each in inputs]
    forward = sdpa_flop_count(*shapes)
    dense = torch_counter.count(lambda: naive(*inputs))
    again = Fraction(sdpa_backward_flop_count(shapes[0], *shapes), forward)
    shown = f"peaks {peaks[flash]} bytes where one square is {squares}; {forward:,} FLOPs forward, {dense:,} dense"
    claim.holds(linear and compared and forward == dense, shown)
    plain = torch_counter.count(lambda: naive(*inputs).sum().backward()) - dense
    claim.otherwise(again == Fraction(plain, dense), f"backward, {float(again)} times forward, not {plain / dense:.0f}")


@pytest.mark.claim("next.part4.flash_exact")
def test_flash_attention_is_exact(claim):
    """It differs from a softmax of written scores by rounding alone, within a tile and across many."""
    worst = Fraction(0)
    for dtype in (torch.float32, torch.float64):
        for length in (1, 7, 64, 600, 1100):
            query, key, value = attention_inputs(length, dtype)
            with torch.no_grad():
                gap = (flash(query, key, value) - naive(query, key, value)).abs().max().item()
                # A score is a sum of 8 products, so it errs by 8 roundings of the sum of their sizes, and so does the
                # logarithm of its weight; a sum and a mixture over T tokens err by T each. Both ways are that far.
                size = (query.abs() @ key.abs().mT).max().item() * 8**-0.5
            bound = 2 * (2 * 8 * size + 2 * length + 10) * torch.finfo(dtype).eps * value.abs().max().item()
            worst = max(worst, Fraction(gap) / Fraction(bound))
    claim.holds(worst <= 1, f"at most {float(worst):.1%} of what rounding explains")


@pytest.mark.claim("next.out.p4_ratios")
def test_printed_ratios(claim):
    """Four times the scores and twice the cache at twice the context, of the same weights."""
    built, halved = module(torch.bfloat16, **GPT2), [modules.unique(module(**GPT2))]
    claim.measured(
        [grown(lambda tokens: elements(SPEC, tokens)), grown(lambda tokens: cache.total(SPEC, tokens))],
        observed=[
            grown(lambda tokens: scores(built, 1, tokens)[0].numel()),
            grown(lambda tokens: cached(built, 1, tokens)),
        ],
    )
    claim.holds(modules.unique(built) == halved[0] == params.count(SPEC).unique, f"{halved[0]:,} parameters")
