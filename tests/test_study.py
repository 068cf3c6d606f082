"""The command of the study: it may be killed, refuses what cannot be studied, and its JSON redraws its picture."""

import json
import re
import signal
import subprocess
import sys
import time

import pytest

from accounting.files import InputError
from model import study
from tests.trainings import EMPTY, TEXT


def command(monkeypatch, *arguments):
    """The exit code of the command in this process."""
    monkeypatch.setattr(sys, "argv", ["study", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        study.main()
    return ended.value.code


def untimed(path):
    runs = json.loads(path.read_bytes())
    return [run | {"seconds": 0} for run in runs.pop("runs")], runs


def test_the_command_is_killed_and_run_again(tmp_path, monkeypatch, capsys):
    """After a SIGKILL in the middle the next process goes on, and ends at the results of one that never was killed."""
    arguments = ["--sizes", "4", "--steps", 100, "--diet", "fresh", "--save-every", 5, "--threads", 1]
    out = tmp_path / "killed"
    process = subprocess.Popen(
        [sys.executable, "-m", "model.study", *map(str, arguments), "--out", str(out)], stderr=subprocess.DEVNULL
    )
    while not list(out.glob("checkpoints/*.safetensors")) and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (out / "study.json").exists()
    for folder in (out, tmp_path / "whole"):
        assert command(monkeypatch, *arguments, "--out", folder) == 0
    assert "fresh" in capsys.readouterr().out
    assert untimed(out / "study.json") == untimed(tmp_path / "whole" / "study.json")


def test_a_corpus_is_studied_and_the_json_redraws_its_picture(tmp_path, monkeypatch):
    """Text in, and out a JSON that names it without holding it, from which the picture follows to the byte."""
    (tmp_path / "fox.txt").write_text(TEXT * 4)
    arguments = ["--corpus", tmp_path / "fox.txt", "--sizes", "4:1:1,6:1:1", "--steps", 2, "--held-out", 3]
    arguments += ["--evaluate-every", 1, "--rate", "frozen", "--seed", 0, "--seed", 1]
    assert command(monkeypatch, *arguments, "--out", tmp_path / "out") == 0
    loaded = study.load(tmp_path / "out" / "study.json")
    assert study.draw(loaded) == (tmp_path / "out" / "study.svg").read_text()
    assert study.dump(loaded) == (tmp_path / "out" / "study.json").read_bytes()
    assert loaded.diets["corpus"]["files"][0]["name"] == "fox.txt"
    assert [(run.seed, run.width) for run in loaded.runs] == [(0, 4), (0, 6), (1, 4), (1, 6)]
    assert {(run.rate, len(run.evaluations), run.validation_excess) for run in loaded.runs} == {(1e-3, 2, None)}
    assert b"quick" not in study.dump(loaded)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--sizes", "5"], r"expected WIDTH:LAYERS:HEADS or one of 4, 6, 10, 16, 28, got '5'"),
        (["--sizes", "6:1:4"], r"heads: expected a divisor of the width 6, got 4"),
        (["--device", "abacus"], r"--device abacus: "),
        (["--corpus", "none.txt"], r"none\.txt: no such file or directory"),
        (["--corpus", "none.txt", "--diet", "fresh"], r"--diet is of the chain"),
        (["--steps", "0"], r"0 is not in the range"),
        (["--steps", "1000000000000"], r"1000000000000 is not in the range"),
        (["--seed", str(2**64)], r"18446744073709551616 is not in the range"),
        (["--seed", "3", "--seed", "3"], r"--seed: the same one twice"),
        (["--sizes", "4,6,4"], r"--sizes: the same one twice"),
        (["--device", "meta"], r"--device meta: "),
    ],
)
def test_what_cannot_be_studied_is_one_line(arguments, problem, monkeypatch, capsys, tmp_path):
    """Exit code 2, and on standard error one line."""
    assert command(monkeypatch, *arguments, "--out", tmp_path) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("study: ")]
    assert re.search(problem, line)


def test_a_foreign_checkpoint_stops_the_command(tmp_path, monkeypatch, capsys):
    """A checkpoint of other steps is not written over: one line names it, exit code 2."""
    arguments = ["--sizes", "4", "--diet", "fresh", "--out", tmp_path]
    assert command(monkeypatch, "--steps", 2, *arguments) == 0
    before = {path: path.read_bytes() for path in tmp_path.glob("checkpoints/*")}
    assert command(monkeypatch, "--steps", 3, *arguments) == 2
    assert re.search(r"^study: .*fresh-0-4-1-1\.safetensors: .*another design", capsys.readouterr().err, re.MULTILINE)
    assert before == {path: path.read_bytes() for path in tmp_path.glob("checkpoints/*")}


@pytest.mark.parametrize("data", [b"", b"{}", study.dump(EMPTY).replace(b"study/1", b"study/2")])
def test_a_file_that_is_no_study_is_refused(data, tmp_path):
    """By name, in one line: no JSON, none of a study, and none of this schema."""
    (tmp_path / "study.json").write_bytes(data)
    with pytest.raises(InputError, match=r"study\.json: no study: "):
        study.load(tmp_path / "study.json")
