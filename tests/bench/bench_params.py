"""Counting from a config against building the module that it describes, side by side."""

import json
import subprocess
import sys
from time import perf_counter

from accounting import params
from accounting.authorities import huggingface as modules
from accounting.huggingface import load, published_config

NAME = "deepseek-v3"
BUILD = f"""
from accounting import huggingface
from accounting.authorities import huggingface as modules
print(modules.unique(modules.build(huggingface.published_config("{NAME}"))))
"""


def fastest(run, rounds):
    """Seconds of the fastest of some rounds: noise only ever adds."""

    def once():
        start = perf_counter()
        run()
        return perf_counter() - start

    return min(once() for _ in range(rounds))


def process(*arguments):
    """Run Python in a process of its own, and return what it prints."""
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True).stdout


def test_a_whole_process_is_20_times_faster(benchmark):
    """``sixnd params`` from start to end, against transformers on the meta device from start to end."""
    ours = ["-m", "accounting", "params", NAME, "--json"]
    assert json.loads(process(*ours))["parameters"]["unique"] == int(process("-c", BUILD))
    theirs = fastest(lambda: process("-c", BUILD), rounds=3)
    benchmark.pedantic(process, args=ours, rounds=10, warmup_rounds=1)
    ratio = benchmark.extra_info["ratio"] = theirs / benchmark.stats.stats.min
    assert ratio >= 20


def test_counting_in_process_is_5_times_faster(benchmark):
    """Reading the config and counting, against building the module on meta, all imports done."""
    config = published_config(NAME)

    def ours():
        return params.count(load(NAME).spec).unique

    assert ours() == modules.unique(modules.build(config))
    theirs = fastest(lambda: modules.build(config), rounds=5)
    benchmark.pedantic(ours, rounds=50, warmup_rounds=3)
    ratio = benchmark.extra_info["ratio"] = theirs / benchmark.stats.stats.min
    assert ratio >= 5
