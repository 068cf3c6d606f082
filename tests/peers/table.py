"""What each counter says of the same small models, over the exact count, as Markdown.

Linear maps and attention are told apart from outside: the work of the first grows with the length of the sequences,
of the second with its square, so that half the second difference over three lengths is attention's.
"""

from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, partial
from importlib.util import find_spec
from io import StringIO
from itertools import product
from multiprocessing import get_context

import torch
from tabulate import tabulate
from transformers import PreTrainedModel

from accounting import flops, pairs, params
from accounting.authorities import huggingface as modules
from accounting.huggingface import read
from tests.peers.counters import COUNTERS, Counter

BEGIN, END = "<!-- peers -->", "<!-- /peers -->"
BATCH, SEQ = 2, 16
GPT2 = {"model_type": "gpt2", "vocab_size": 53, "n_positions": 3 * SEQ, "n_embd": 32, "n_layer": 2, "n_head": 4}
LLAMA = {
    "model_type": "llama",
    "vocab_size": 53,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "max_position_embeddings": 3 * SEQ,
    "tie_word_embeddings": False,
}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
DEEPSEEK = {
    **LLAMA,
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
MODELS = {
    "GPT-2": GPT2,
    "GPT-2 untied": {**GPT2, "tie_word_embeddings": False},
    "Llama": LLAMA,
    "Mixtral": MIXTRAL,
    "DeepSeek": DEEPSEEK,
}
KERNELS = {
    "eager": {"attn_implementation": "eager", "experts_implementation": "eager"},
    "batched": {"attn_implementation": "eager", "experts_implementation": "batched_mm"},
    # Experts are left to the library's default, a grouped product, which a dense model may not ask for.
    "fused": {"attn_implementation": "sdpa"},
}


@dataclass(frozen=True)
class Case:
    """A model, and the kernels that it runs on."""

    model: str
    kernels: str

    def build(self, seq: int) -> tuple[PreTrainedModel, torch.Tensor]:
        """The module and tokens (BATCH, seq) for it."""
        torch.manual_seed(0)
        config = {**MODELS[self.model], "use_cache": False}
        module = modules.build(config, device="cpu", **KERNELS[self.kernels]).eval()
        return module, torch.arange(BATCH * seq).reshape(BATCH, seq) % module.config.vocab_size


CASES = tuple(
    Case(model, kernels)
    for model, kernels in product(MODELS, KERNELS)
    if kernels != "batched" or model in ("Mixtral", "DeepSeek")
)
#: A tied head changes no count of work, which the tests hold each counter to: such a column would be its neighbour's.
SHOWN = tuple(case for case in CASES if case.model != "GPT-2 untied")


@dataclass(frozen=True)
class Measured:
    """FLOPs of BATCH sequences of SEQ tokens, and the module's parameters where the counter counts them."""

    linear: int | Fraction
    attention: int | Fraction
    parameters: int | None = None


def exact(counter: Counter, case: Case) -> Measured:
    """What a counter should say: every query by every key, as each of these kernels executes it."""
    spec = read(MODELS[case.model]).spec
    count = (flops.training if counter.step else flops.forward)(spec, seq=SEQ, batch=BATCH, pairs=pairs.full)
    attention = count.scores + count.mixture
    return Measured(count.total - attention, attention, params.count(spec).unique)


def measure(counter: Counter, case: Case) -> Measured | str:
    """What a counter says, or in words why it says nothing."""
    if find_spec(counter.package) is None:
        return "not installed"
    try:
        # What the counters print on their way is no part of the table.
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()), torch.no_grad():
            readings = [counter.read(*case.build(times * SEQ)) for times in (1, 2, 3)]
    except Exception as error:
        return f"raises: {type(error).__name__}: {error}".splitlines()[0]
    once, twice, thrice = (counter.flops_per_unit * reading.operations for reading in readings)
    attention = Fraction(thrice - 2 * twice + once, 2)
    return Measured(once - attention, attention, readings[0].parameters)


@cache
def results() -> dict[tuple[Counter, Case], Measured | str]:
    """Every counter on every case.

    Each is measured in a process of its own: some counters replace torch's functions, and leave them so when they fail.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])
    combinations = list(product(COUNTERS, CASES))
    with ProcessPoolExecutor(mp_context=context, max_tasks_per_child=1) as pool:
        return dict(zip(combinations, pool.map(measure, *zip(*combinations, strict=True)), strict=True))


def ratio(measured: int | Fraction, exactly: int) -> str:
    """Three decimals, and none for equality and for nothing: 1.000 is not 1."""
    return str(measured // exactly) if measured in (0, exactly) else f"{float(measured / exactly):.3f}"


def work(counter: Counter, case: Case) -> str:
    """Linear maps and attention, each over what is exact."""
    measured, right = results()[counter, case], exact(counter, case)
    if isinstance(measured, str):
        return measured
    shares = ratio(measured.linear, right.linear), ratio(measured.attention, right.attention)
    return "exact" if shares == ("1", "1") else ", ".join(shares)


def parameters(counter: Counter, case: Case) -> str:
    """Parameters over the scalars of distinct ones."""
    measured = results()[counter, case]
    return measured if isinstance(measured, str) else ratio(measured.parameters, exact(counter, case).parameters)


def markdown() -> str:
    """Both tables, and between them a line of each counter on what it leaves out or adds."""
    github = partial(tabulate, tablefmt="github", disable_numparse=True)
    counted = [[c.name, c.counts, *(work(c, case) for case in SHOWN)] for c in COUNTERS]
    reasons = [f"- {counter.name}: {counter.why}." for counter in COUNTERS]
    eager = [case for case in CASES if case.kernels == "eager"]
    held = {c.package: c for (c, _), seen in results().items() if isinstance(seen, Measured) and seen.parameters}
    sizes = [[package, *(parameters(c, case) for case in eager)] for package, c in held.items()]
    return "\n".join(
        [
            github(counted, ["FLOPs / exact", "counts", *(f"{case.model}, {case.kernels}" for case in SHOWN)]),
            "",
            *reasons,
            "",
            github(sizes, ["parameters / exact", *(case.model for case in eager)]),
        ]
    )


def renewed(text: str) -> str:
    """A text with this run's tables between its marks."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{markdown()}\n\n{END}{after}"
