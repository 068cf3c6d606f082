"""The counters that a user would pick instead, each a function of a module and the tokens that run through it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Literal

from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from accounting.authorities import torch_counter


@dataclass(frozen=True)
class Reading:
    """What a counter said of one pass, in its own unit, and of the module's parameters where it counts them."""

    operations: int
    parameters: int | None = None


@dataclass(frozen=True)
class Counter:
    """One way of counting. ``why``: what it leaves out or adds, in a line. ``step``: it counts a step of training."""

    name: str
    package: str
    unit: Literal["FLOPs", "MACs"]
    read: Callable[[PreTrainedModel, Tensor], Reading]
    why: str
    step: bool = False

    @property
    def counts(self) -> str:
        """The unit, and of what."""
        return f"{self.unit} of a step" if self.step else self.unit

    @property
    def flops_per_unit(self) -> int:
        """A multiply-add (MAC) is two FLOPs."""
        return {"FLOPs": 1, "MACs": 2}[self.unit]


def sixnd(module, tokens):
    return Reading(torch_counter.count(lambda: module(tokens)))


def torch_alone(module, tokens):
    with FlopCounterMode(display=False) as counter:
        module(tokens)
    return Reading(counter.get_total_flops())


def fvcore(module, tokens):
    from fvcore.nn import FlopCountAnalysis, parameter_count

    return Reading(FlopCountAnalysis(module, tokens).total(), parameter_count(module)[""])


def torchprofile(module, tokens):
    from torchprofile import profile_macs

    return Reading(profile_macs(module, (tokens,)))


def calflops(module, tokens):
    from calflops import calculate_flops

    return calculate_flops(module, kwargs={"input_ids": tokens}, print_results=False, output_as_string=False)


def deepspeed(module, tokens):
    from deepspeed.profiling.flops_profiler import get_model_profile

    return get_model_profile(module, kwargs={"input_ids": tokens}, print_profile=False, as_string=False)


def flops_of(profile, module, tokens):
    """Of a profiler that says FLOPs, MACs and parameters, the first and the last."""
    flops, _, parameters = profile(module, tokens)
    return Reading(flops, parameters)


def macs_of(profile, module, tokens):
    return Reading(profile(module, tokens)[1])


def ptflops(backend, module, tokens):
    from ptflops import get_model_complexity_info

    macs, parameters = get_model_complexity_info(
        module,
        tuple(tokens.shape),
        input_constructor=lambda _: {"input_ids": tokens},
        backend=backend,
        as_strings=False,
        print_per_layer_stat=False,
    )
    return Reading(macs, parameters)


def thop(module, tokens):
    from thop import profile

    macs, parameters = profile(module, inputs=(tokens,), verbose=False)
    return Reading(int(macs), int(parameters))


def torchinfo(module, tokens):
    from torchinfo import summary

    statistics = summary(module, input_data=tokens, verbose=0)
    return Reading(statistics.total_mult_adds, statistics.total_params)


def transformers(module, tokens):
    from transformers import Trainer

    # The method reads the model alone; a whole trainer would want a folder to write to.
    operations = Trainer.floating_point_ops(SimpleNamespace(model=module), {"input_ids": tokens})
    return Reading(operations, module.num_parameters(exclude_embeddings=True))


FUSED = "fused attention"
COUNTERS = (
    Counter(
        "sixnd's observer",
        "torch",
        "FLOPs",
        sixnd,
        "torch's counter with the formulas that it lacks; it refuses an operator that has none",
    ),
    Counter(
        "torch FlopCounterMode",
        "torch",
        "FLOPs",
        torch_alone,
        f"no formula for {FUSED} on CPU nor for grouped experts; DeepSeek's two head widths are not fused on CPU, "
        "so that its attention counts",
    ),
    Counter(
        "fvcore",
        "fvcore",
        "MACs",
        fvcore,
        f"no handle for {FUSED} nor grouped experts; a layer norm adds 5 for each scalar (GPT-2), an RMS norm nothing",
    ),
    Counter(
        "torchprofile",
        "torchprofile",
        "MACs",
        torchprofile,
        "no handler for grouped experts; each elementwise product counts as a multiply-add, a layer norm's too",
    ),
    Counter(
        "calflops, FLOPs",
        "calflops",
        "FLOPs",
        partial(flops_of, calflops),
        f"replaces Python functions, not `bmm`, {FUSED} nor `grouped_mm`; activations and "
        "a softmax are added, 1 for each scalar, but not operators such as `*`",
    ),
    Counter("calflops, MACs", "calflops", "MACs", partial(macs_of, calflops), "the same, and nothing elementwise"),
    Counter(
        "DeepSpeed, FLOPs",
        "deepspeed",
        "FLOPs",
        partial(flops_of, deepspeed),
        f"as calflops, with `bmm` and {FUSED}; grouped experts are missed",
    ),
    Counter("DeepSpeed, MACs", "deepspeed", "MACs", partial(macs_of, deepspeed), "the same, and nothing elementwise"),
    Counter(
        "ptflops, pytorch",
        "ptflops",
        "MACs",
        partial(ptflops, "pytorch"),
        f"`nn.Linear` modules and some functions, not `F.linear` (routers, experts in a loop), {FUSED} nor "
        "`grouped_mm`; an activation and a softmax add 1 for each scalar",
    ),
    Counter(
        "ptflops, aten",
        "ptflops",
        "MACs",
        partial(ptflops, "aten"),
        f"`mm`, `addmm` and `bmm` alone, so neither {FUSED} nor grouped experts; a bias adds 1 for each output",
    ),
    Counter(
        "thop",
        "thop",
        "MACs",
        thop,
        "`nn.Linear` modules and norms alone: no attention product, router, expert nor GPT-2's `Conv1D`, and of "
        "parameters those of the same modules",
    ),
    Counter(
        "torchinfo",
        "torchinfo",
        "MACs",
        torchinfo,
        "parameters named weight or bias, so no experts, once for each sequence whatever its length, tables and norms "
        "among them; GPT-2's `Conv1D` is taken for a convolution; a tied table is two parameters",
    ),
    Counter(
        "transformers Trainer",
        "transformers",
        "FLOPs",
        transformers,
        "6 x tokens x N, over an exact step; N is the parameters without tables, all experts among them, a tied head "
        "not; no attention product",
        step=True,
    ),
)
