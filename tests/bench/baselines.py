"""Stored results of the benchmarks, one folder a device: where they lie, and when a ratio has fallen since."""

import json
import platform
import re
from pathlib import Path
from typing import Any

import torch
from cpuinfo import get_cpu_info

DEVICE, DTYPE = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
THREADS = 2
ROOT = Path(__file__).parents[2] / "fixtures" / "baselines"


def device_name() -> str:
    """What torch calls its accelerator, else the brand of the CPU."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    brand: str = get_cpu_info().get("brand_raw") or platform.machine()
    return brand


def folder(root: Path, device: str) -> Path:
    """The folder of a device: its name in lower case, words joined by hyphens."""
    return root / "-".join(re.findall(r"[a-z0-9.]+", device.lower()))


def last(device_folder: Path, name: str) -> dict[str, Any] | None:
    """``extra_info`` of a benchmark in the newest stored result that has it; None where none has."""
    for path in sorted(device_folder.glob("*/[0-9]*_*.json"), key=lambda path: path.name, reverse=True):
        for bench in json.loads(path.read_text())["benchmarks"]:
            if bench["name"] == name:
                extra: dict[str, Any] = bench["extra_info"]
                return extra
    return None


def fell(before: list[float], now: list[float]) -> bool:
    """Whether every round now is under every round before.

    Where nothing changed, n and m rounds come in this order by chance once in C(n + m, n): 252 for five and five.
    """
    return max(now) < min(before)
