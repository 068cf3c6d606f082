"""Two processes that train together: each holds the bytes that are predicted for its rank."""

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
import torch.multiprocessing as processes
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from accounting import memory, params
from accounting.authorities import torch_memory
from model.recipes import d2l_gpt, tutor
from model.torch_decoder import Decoder

RANKS, LAYOUT = 2, "adam_float32"
#: Odd vocabularies and widths, and a row for fewer ranks than there are: no share is as long as the other.
SPECS = {
    "odd": d2l_gpt(vocab=7, width=6, heads=1, layers=1),
    "one row": tutor(vocab=1, width=3, context=5, layers=2, heads=1),
    "untied": tutor(vocab=9, width=8, context=6, layers=1, heads=2, tied=False),
}


def step(decoder, optimizer):
    decoder(torch.zeros((1, 2), dtype=torch.long)).sum().backward()
    optimizer.step()


def held(parameters, optimizer):
    """Bytes of this rank's arrays by a layout's names, and of its counts of steps."""
    parameters, state = list(parameters), torch_memory.optimizer_state(optimizer)
    return {
        "weights": sum(torch_memory.local(p).nbytes for p in parameters),
        "gradients": sum(torch_memory.local(p.grad).nbytes for p in parameters),
        "first_moment": state.arrays["exp_avg"],
        "second_moment": state.arrays["exp_avg_sq"],
        "step_counts": state.scalars,
    }


def replicated(decoder):
    """Every rank has everything."""
    parallel = DistributedDataParallel(decoder)
    optimizer = torch.optim.AdamW(parallel.parameters())
    step(parallel, optimizer)
    return held(parallel.parameters(), optimizer)


def optimizer_sharded(decoder):
    """Every rank has all weights and gradients, and the state of some parameters."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # whose import warns, which is an error in the suite

    parallel = DistributedDataParallel(decoder)
    optimizer = ZeroRedundancyOptimizer(parallel.parameters(), torch.optim.AdamW)
    step(parallel, optimizer)
    return held(parallel.parameters(), optimizer.optim)


def fully_sharded(decoder):
    """Every rank has some rows of everything, in storage as long as the longest share."""
    fully_shard(decoder, mesh=init_device_mesh("cpu", (RANKS,)))
    optimizer = torch.optim.AdamW(decoder.parameters())
    step(decoder, optimizer)
    storage = sum(p.to_local().untyped_storage().nbytes() for p in decoder.parameters())
    return held(decoder.parameters(), optimizer) | {"weight_storage": storage}


WAYS = {"none": replicated, "zero1": optimizer_sharded, "zero3": fully_sharded}


def work(rank, folder):
    """One rank's process: every way of sharding, on every decoder."""
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS)
    found = {f"{shard} {name}": way(Decoder(spec)) for shard, way in WAYS.items() for name, spec in SPECS.items()}
    Path(folder, str(rank)).write_text(json.dumps(found))
    distributed.destroy_process_group()


@cache
def observed():
    """What each rank found."""
    with TemporaryDirectory() as folder:
        processes.spawn(work, args=(folder,), nprocs=RANKS)
        return [json.loads(Path(folder, str(rank)).read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("shard", WAYS)
def test_a_rank_holds_what_is_predicted(shard, name, rank):
    """Replicated, with the optimizer's state by whole parameters, and fully sharded by rows, uneven ones included."""
    found = observed()[rank][f"{shard} {name}"]
    predicted = memory.training(SPECS[name], LAYOUT, ranks=RANKS, rank=rank, shard=shard)
    assert {each.array.name: each.logical for each in predicted.arrays} == {
        array: found[array] for array in ("weights", "gradients", "first_moment", "second_moment")
    }
    assert predicted.step_counts == found["step_counts"]
    if shard == "zero3":
        assert predicted.arrays[0].padded == found["weight_storage"]


@pytest.mark.parametrize("name", SPECS)
def test_shares_are_uneven_and_nothing_is_lost(name):
    """The ranks' rows are as many as there are, and not the same for both."""
    shares = [found[f"zero3 {name}"]["weights"] for found in observed()]
    assert sum(shares) == memory.weight_bytes(SPECS[name], "float32")
    assert len(set(shares)) == RANKS
    assert all(found[f"none {name}"]["weights"] == 4 * params.count(SPECS[name]).unique for found in observed())
