"""Results are stored by device, without the name of the machine; they are written only when asked for."""

from collections.abc import Iterator

import pytest
import torch

from tests.bench import baselines


def pytest_configure(config: pytest.Config) -> None:
    """Point pytest-benchmark's storage at the device's folder."""
    config.option.benchmark_storage = baselines.folder(baselines.ROOT, baselines.device_name()).as_uri()


def pytest_benchmark_update_machine_info(machine_info: dict[str, object]) -> None:
    """A host's name is nobody's business; the device's is the point."""
    del machine_info["node"], machine_info["release"]
    machine_info["device"] = baselines.device_name()


@pytest.fixture
def two_threads() -> Iterator[None]:
    """A CPU's work on two threads, whatever the machine has."""
    before = torch.get_num_threads()
    torch.set_num_threads(baselines.THREADS)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def baseline(request: pytest.FixtureRequest) -> dict[str, object] | None:
    """What the newest stored result on this device says of the benchmark; None where there is none."""
    return baselines.last(baselines.folder(baselines.ROOT, baselines.device_name()), request.node.name)
