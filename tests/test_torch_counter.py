"""The counter that refuses: products are counted, by formulas that read the right axes, or their operators named."""

from functools import partial

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from accounting import flops, pairs
from accounting.authorities import UncountedError, torch_counter
from accounting.authorities import huggingface as modules
from accounting.huggingface import read
from model.recipes import tutor
from model.torch_decoder import Decoder

aten = torch.ops.aten
BATCH, HEADS, QUERIES, KEYS, WIDTH = 2, 4, 6, 10, 8  # no two alike, so that no axis can pass for another
PAIRS = BATCH * HEADS * QUERIES * KEYS
EXPERTS = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
}
QWEN3_MOE = {**EXPERTS, "model_type": "qwen3_moe", "moe_intermediate_size": 40, "num_experts": 8}
MIXTRAL = {**EXPERTS, "model_type": "mixtral", "num_local_experts": 4}


def alone(run):
    """What torch's counter says without the formulas that it lacks."""
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def meta(*shape):
    return torch.empty(shape, device="meta")


def heads_first(heads=HEADS, device="cpu"):
    """Query (B, H, S, D), and key and value (B, K, T, D), all to be trained."""
    shapes = (BATCH, HEADS, QUERIES, WIDTH), (BATCH, heads, KEYS, WIDTH), (BATCH, heads, KEYS, WIDTH)
    return [torch.ones(shape, device=device, requires_grad=True) for shape in shapes]


def attend(backward, backend, heads=HEADS, **options):
    q, k, v = heads_first(heads)
    with sdpa_kernel(backend):
        mixed = F.scaled_dot_product_attention(q, k, v, enable_gqa=heads != HEADS, **options)
        if backward:
            mixed.sum().backward()


def test_a_matrix_product_is_two_flops_for_each_multiply_add():
    """(3, 5) by (5, 7) multiplies and adds 3 x 5 x 7 times."""
    left, right = torch.ones(3, 5), torch.ones(5, 7)
    assert torch_counter.by_operator(lambda: left @ right) == {"aten.mm": 2 * 3 * 5 * 7}


def test_nothing_is_nothing():
    """A lookup and an elementwise sum multiply no matrices."""
    table, tokens = torch.ones(9, 8), torch.tensor([1, 2])
    assert torch_counter.by_operator(lambda: F.embedding(tokens, table) + 1) == {}
    assert torch_counter.count(lambda: torch.nn.utils.clip_grad_norm_([table], 1.0)) == 0


@pytest.mark.parametrize(
    ("run", "multiply_adds"),
    [
        (lambda: torch.ones(4, 3) @ torch.ones(3), 4 * 3),
        (lambda: torch.addmv(torch.ones(4), torch.ones(4, 3), torch.ones(3)), 4 * 3),
        (lambda: torch.ones(4).addmv_(torch.ones(4, 3), torch.ones(3)), 4 * 3),
        (lambda: torch.ones(3) @ torch.ones(3), 3),
        (lambda: torch.ones(4, 5).addmm_(torch.ones(4, 3), torch.ones(3, 5)), 4 * 3 * 5),
        (lambda: torch.ones(2, 4, 5).baddbmm_(torch.ones(2, 4, 3), torch.ones(2, 3, 5)), 2 * 4 * 3 * 5),
        (lambda: torch.addbmm(torch.ones(4, 5), torch.ones(2, 4, 3), torch.ones(2, 3, 5)), 2 * 4 * 3 * 5),
    ],
    ids="mv addmv addmv_ dot addmm_ baddbmm_ addbmm".split(),
)
def test_products_that_torch_counts_as_nothing(run, multiply_adds):
    """Products with a vector, in place, and summed over the batch have their multiply-adds."""
    assert alone(run) == 0
    assert torch_counter.count(run) == 2 * multiply_adds


@pytest.mark.parametrize("shape", [(4, 3), (3,)], ids=["MvBackward0", "DotBackward0"])
def test_a_product_with_a_vector_is_refused_in_training(shape):
    """Its gradients are taken elementwise, where a counter of products sees nothing."""
    weight = torch.ones(shape, requires_grad=True)
    with pytest.raises(UncountedError, match=r"(Mv|Dot)Backward0, a product done elementwise"):
        torch_counter.count(lambda: (weight @ torch.ones(3)).sum().backward())


def test_the_smallest_fused_attention_of_the_bug_report():
    """pytorch#195460: (1, 12, 64, 64) multiplies 12,582,912 FLOPs' worth, of which torch counts none on CPU."""
    q = torch.ones(1, 12, 64, 64)
    mask = torch.ones(64, 64, dtype=torch.bool).tril()
    for options in {}, {"is_causal": True}, {"attn_mask": mask}:
        run = partial(F.scaled_dot_product_attention, q, q, q, **options)
        assert (alone(run), torch_counter.count(run)) == (0, 12_582_912)
    on_meta = q.to("meta")
    assert torch_counter.count(lambda: F.scaled_dot_product_attention(on_meta, on_meta, on_meta)) == 12_582_912


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "step"])
@pytest.mark.parametrize("heads", [HEADS, 2, 1], ids=["MHA", "GQA", "MQA"])
def test_fused_attention_on_cpu_is_what_its_plain_form_multiplies(backward, heads):
    """Query and key spans and the head count all differ, and key/value heads change nothing."""
    fused = torch_counter.by_operator(lambda: attend(backward, SDPBackend.FLASH_ATTENTION, heads))
    assert all("flash_attention_for_cpu" in operator for operator in fused)
    assert sum(fused.values()) == torch_counter.count(lambda: attend(backward, SDPBackend.MATH, heads))
    assert sum(fused.values()) == 2 * 2 * PAIRS * WIDTH * (3 if backward else 1)


def test_scores_that_the_kernel_computes_again_are_counted_on_request():
    """A fused backward pass executes five products and differentiates two: the fifth is not the model's."""
    run = partial(attend, True, SDPBackend.FLASH_ATTENTION)
    assert torch_counter.count(run, recomputed=True) - torch_counter.count(run) == 2 * PAIRS * WIDTH


def test_two_widths_of_a_head():
    """Latent attention scores over 192 and mixes over 128: 2 H S S (192 + 128), forward; and as much twice, back."""
    shapes = (1, 4, 16, 192), (1, 4, 16, 192), (1, 4, 16, 128)
    q, k, v = (torch.ones(shape, device="meta", requires_grad=True) for shape in shapes)
    forward = 2 * 4 * 16 * 16 * (192 + 128)
    assert torch_counter.count(lambda: F.scaled_dot_product_attention(q, k, v)) == forward
    assert torch_counter.count(lambda: F.scaled_dot_product_attention(q, k, v).sum().backward()) == 3 * forward
    assert torch_counter.count(lambda: aten._scaled_dot_product_efficient_attention(q, k, v, None, True)) == forward


def test_grouped_query_heads_on_meta():
    """pytorch#177169: 32 query heads over 8 key/value heads of 128, 64 tokens: the query heads alone count."""
    q, k = meta(1, 32, 64, 128), meta(1, 8, 64, 128)
    assert torch_counter.count(lambda: F.scaled_dot_product_attention(q, k, k, enable_gqa=True)) == 67_108_864


SDPA_BACKWARD = {
    "flash": lambda q, k: (q, q, k, k, q, q[..., 0], None, None, QUERIES, KEYS, 0.0, False, meta(2), meta(0)),
    "efficient": lambda q, k: (
        *(q, q, k, k, None, q, q[..., 0], torch.tensor(0), torch.tensor(0), 0.0),
        [True, True, True, False],
    ),
}


@pytest.mark.parametrize("kind", SDPA_BACKWARD)
def test_the_scores_that_torch_itself_counts_again(kind):
    """The formula that torch has of a fused backward pass has five products, and the count four unless asked."""
    q, k = meta(BATCH, HEADS, QUERIES, WIDTH), meta(BATCH, HEADS, KEYS, WIDTH)
    operator = getattr(aten, f"_scaled_dot_product_{kind}_attention_backward")
    run = partial(operator, *SDPA_BACKWARD[kind](q, k))
    assert alone(run) == torch_counter.count(run, recomputed=True) == 5 * 2 * PAIRS * WIDTH
    assert torch_counter.count(run) == 4 * 2 * PAIRS * WIDTH


KERNELS = {
    "flash": lambda q, k, ends: (q, k, k, ends, ends, QUERIES, KEYS, 0.0, False, False),
    "efficient": lambda q, k, ends: (q, k, k, None, ends, ends, QUERIES, KEYS, 0.0, 0),
}


@pytest.mark.parametrize("kind", KERNELS)
def test_the_kernels_under_fused_attention_have_tokens_before_heads(kind):
    """pytorch#184348: (2, 1024, 16, 64) is 1,024 tokens of 16 heads, and torch's formula reads it the other way."""
    operator = getattr(aten, f"_{kind}_attention_forward")
    run = partial(operator, *KERNELS[kind](*[meta(2, 1024, 16, 64)] * 2, None))
    assert (alone(run), torch_counter.count(run)) == (134_217_728, 8_589_934_592)
    q, k = meta(BATCH, QUERIES, HEADS, WIDTH), meta(BATCH, KEYS, HEADS, WIDTH)
    assert torch_counter.count(partial(operator, *KERNELS[kind](q, k, None))) == 2 * 2 * PAIRS * WIDTH


@pytest.mark.parametrize("kind", ["flash", "efficient"])
def test_the_backward_kernels_have_tokens_before_heads(kind):
    """The same layout, and two products for each forward one."""
    q, k, lse = meta(BATCH, QUERIES, HEADS, WIDTH), meta(BATCH, KEYS, HEADS, WIDTH), meta(BATCH, HEADS, QUERIES)
    seed = torch.tensor(0)
    arguments = {
        "flash": (q, q, k, k, q, lse, None, None, QUERIES, KEYS, 0.0, False, meta(2), meta(0)),
        "efficient": (q, q, k, k, None, q, None, None, QUERIES, KEYS, lse, 0.0, seed, seed, 0, False),
    }
    run = partial(getattr(aten, f"_{kind}_attention_backward"), *arguments[kind])
    assert torch_counter.count(run) == 2 * 2 * 2 * PAIRS * WIDTH
    assert torch_counter.count(run, recomputed=True) == 5 * 2 * PAIRS * WIDTH


@pytest.mark.parametrize("kind", KERNELS)
def test_packed_documents_attend_to_themselves(kind):
    """Ten tokens in documents of four and six have 16 + 36 pairs; on meta nobody knows where they end."""
    q = meta(1, 10, HEADS, WIDTH) if kind == "efficient" else meta(10, HEADS, WIDTH)
    ends = torch.tensor([0, 4, 10], dtype=torch.int32)
    operator = getattr(aten, f"_{kind}_attention_forward")
    assert torch_counter.count(partial(operator, *KERNELS[kind](q, q, ends))) == 2 * 2 * HEADS * WIDTH * (16 + 36)
    with pytest.raises(UncountedError, match="does not say how long its documents are"):
        torch_counter.count(partial(operator, *KERNELS[kind](q, q, ends.to("meta"))))


GROUP_ENDS = torch.tensor([8, 8, 24], dtype=torch.int32)
GROUPED = {
    "rows": (24, 16, 32, lambda: (torch.ones(24, 16), torch.ones(3, 16, 32))),
    "columns": (8, 16, 24, lambda: (torch.ones(3, 8, 16), torch.ones(16, 24))),
    "inner": (8, 24, 16, lambda: (torch.ones(8, 24), torch.ones(24, 16))),
}


@pytest.mark.parametrize("cut", GROUPED)
def test_a_grouped_product_is_its_groups(cut):
    """Whichever span the groups cut, all of them together multiply it once, an empty one nothing."""
    rows, inner, columns, operands = GROUPED[cut]
    run = partial(torch._grouped_mm, *(x.bfloat16() for x in operands()), offs=GROUP_ENDS)
    assert (alone(run), torch_counter.count(run)) == (0, 2 * rows * inner * columns)


def test_a_grouped_product_ends_where_its_last_group_does():
    """Rows after the last group multiply nothing, as where another device has their expert."""
    left, right = torch.ones(40, 16).bfloat16(), torch.ones(3, 16, 32).bfloat16()
    assert torch_counter.count(lambda: torch._grouped_mm(left, right, offs=GROUP_ENDS)) == 2 * 24 * 16 * 32


def test_a_batch_of_grouped_products():
    """Without ends each group has all of its own."""
    left, right = torch.ones(3, 8, 16).bfloat16(), torch.ones(3, 16, 32).bfloat16()
    assert torch_counter.count(lambda: torch._grouped_mm(left, right)) == 2 * 3 * 8 * 16 * 32


def test_the_gradients_of_a_grouped_product():
    """Each is a grouped product of as many FLOPs as the forward one."""
    left = torch.ones(24, 16, dtype=torch.bfloat16, requires_grad=True)
    right = torch.ones(3, 16, 32, dtype=torch.bfloat16, requires_grad=True)
    run = partial(torch._grouped_mm, left, right, offs=GROUP_ENDS)
    assert torch_counter.count(lambda: (run() * 2).sum().backward()) == 3 * 2 * 24 * 16 * 32


@pytest.mark.parametrize("groups", [1, 4], ids=["dense", "depthwise"])
@pytest.mark.parametrize("transposed", [False, True], ids=["convolution", "transposed"])
def test_a_convolution_goes_back_twice_for_each_time_forward(groups, transposed):
    """Grouped ones too, whose weight gradient torch's formula takes for a dense one's."""
    convolve = F.conv_transpose1d if transposed else F.conv1d
    x, weight = torch.ones(2, 4, 11, requires_grad=True), torch.ones(4, 4 // groups, 3, requires_grad=True)
    run = partial(convolve, x, weight, bias=torch.ones(4, requires_grad=True), groups=groups)
    assert torch_counter.count(lambda: run().sum().backward()) == 3 * torch_counter.count(run)


@torch.library.custom_op("sixnd_tests::opaque", mutates_args=())
def opaque(x: torch.Tensor) -> torch.Tensor:
    return x @ x


@pytest.mark.parametrize(
    ("run", "operator"),
    [
        (lambda: F.bilinear(torch.ones(2, 3), torch.ones(2, 4), torch.ones(5, 3, 4)), "aten._trilinear"),
        (lambda: torch._int_mm(torch.ones(32, 32).char(), torch.ones(32, 32).char()), "aten._int_mm"),
        (lambda: torch.linalg.inv(torch.eye(3)), "aten.linalg_inv_ex"),
        (lambda: torch.sparse.mm(torch.eye(3).to_sparse(), torch.eye(3)), "aten._sparse_addmm"),
        (lambda: torch.nn.LSTM(3, 4)(torch.ones(5, 1, 3)), "aten.mkldnn_rnn_layer"),
        (lambda: opaque(torch.ones(2, 2)), "sixnd_tests.opaque"),
    ],
    ids="bilinear int8 inverse sparse lstm custom".split(),
)
def test_an_operator_without_a_formula_is_named(run, operator):
    """What torch's counter takes for nothing is an error here."""
    with pytest.raises(UncountedError, match=rf"no formula for {operator}$"):
        torch_counter.count(run)


def test_inference_mode_hides_nothing():
    """There operators reach the counter whole, and what they are made of is watched too."""
    with torch.inference_mode():
        assert torch_counter.count(lambda: F.linear(torch.ones(2, 5, 3), torch.ones(4, 3))) == 2 * 2 * 5 * 4 * 3
        with pytest.raises(UncountedError, match=r"aten\._trilinear"):
            torch_counter.count(lambda: F.bilinear(torch.ones(2, 3), torch.ones(2, 4), torch.ones(5, 3, 4)))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_fused_attention_leaves_the_decoder_as_it_was(device):
    """A step of the minimal decoder multiplies as much with either attention, and as predicted."""
    spec = tutor(vocab=11, width=8, context=6, layers=2, heads=2)
    counts = {flops.training(spec, seq=5, batch=3, pairs=pairs.full).total}
    with torch.device(device):
        tokens = torch.zeros((3, 5), dtype=torch.long)
        for attention in "eager", "fused":
            decoder = Decoder(spec, attention=attention)
            counts.add(torch_counter.count(lambda decoder=decoder: decoder(tokens).sum().backward()))
    assert len(counts) == 1


def step(config, tokens, **options):
    module = modules.build(config, device="cpu", **options)
    return torch_counter.by_operator(lambda: module(tokens, use_cache=False).logits.sum().backward())


@pytest.mark.parametrize("config", [QWEN3_MOE, MIXTRAL], ids=lambda config: config["model_type"])
def test_hugging_face_at_its_defaults(config):
    """Fused attention and grouped experts multiply as much as eager attention and batched experts, and as predicted."""
    tokens = torch.arange(14).reshape(2, 7)
    default = step(config, tokens)
    assert {"aten._grouped_mm", "aten._scaled_dot_product_flash_attention_for_cpu_backward"} <= set(default)
    plain = step(config, tokens, attn_implementation="eager", experts_implementation="batched_mm")
    predicted = flops.training(read(config).spec, seq=7, batch=2, pairs=pairs.full).total
    assert sum(default.values()) == sum(plain.values()) == predicted


def test_grouped_experts_on_meta():
    """Which expert a token goes to is not known there, and makes no difference; bfloat16 is all that they take."""
    module = modules.build(QWEN3_MOE, attn_implementation="eager", dtype=torch.bfloat16)
    tokens = torch.zeros((2, 7), dtype=torch.long, device="meta")
    run = partial(module, tokens, attention_mask=torch.ones_like(tokens), use_cache=False)
    assert torch_counter.count(run) == flops.forward(read(QWEN3_MOE).spec, seq=7, batch=2, pairs=pairs.full).total


def test_the_experts_of_a_mixtral_block():
    """32 tokens through 2 of 8 experts and the router: 3,178,496 FLOPs, of which torch sees the router's 32,768."""
    config = {**MIXTRAL, "hidden_size": 64, "intermediate_size": 128, "num_local_experts": 8}
    block = modules.build(config, device="cpu").model.layers[0].mlp
    hidden = torch.ones(1, 32, 64)
    assert (alone(lambda: block(hidden)), torch_counter.count(lambda: block(hidden))) == (32_768, 3_178_496)
