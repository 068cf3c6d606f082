"""Stored benchmarks: found by device, and compared by ratios, never by time."""

import json

import pytest

from tests.bench import baselines


@pytest.mark.parametrize(
    ("device", "expected"),
    [("NVIDIA H200", "nvidia-h200"), ("Intel(R) Xeon(R) CPU @ 2.20GHz", "intel-r-xeon-r-cpu-2.20ghz")],
)
def test_a_devices_name_is_its_folder(tmp_path, device, expected):
    """Lower case, and nothing but letters, digits, dots and hyphens."""
    assert tmp_path / expected == baselines.folder(tmp_path, device)


def test_the_newest_result_that_has_the_benchmark_counts(tmp_path):
    """A later file without it hides nothing; other benchmarks, and other results of the device, say nothing of it."""
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "chain.json").write_text("{}")
    for number, name, ratio in [(1, "step", 1.2), (2, "step", 1.3), (3, "other", 1.4)]:
        path = tmp_path / "Linux" / f"{number:04}_x.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"benchmarks": [{"name": name, "extra_info": {"ratio": ratio}}]}))
    assert {"ratio": 1.3} == baselines.last(tmp_path, "step")
    assert baselines.last(tmp_path, "absent") is None


@pytest.mark.parametrize(("now", "expected"), [([1.0, 1.1], True), ([1.0, 1.2], False), ([1.3, 1.4], False)])
def test_a_ratio_fell_when_no_round_reaches_the_worst_before(now, expected):
    """Rounds that overlap are noise."""
    assert expected == baselines.fell([1.2, 1.3], now)
