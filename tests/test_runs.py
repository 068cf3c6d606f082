"""A table of runs from a file that somebody else wrote: read exactly, or refused in one line."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accounting import runs
from accounting.files import InputError

NUMBERS = st.floats(1e-300, 1e300)
TITLES = {"N": "Model Size", "D": "tokens", "C": "Training FLOP", "loss": "Loss"}


def written(path, text, encoding="utf-8"):
    path.write_bytes(text.encode(encoding))
    return path


@given(rows=st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), min_size=1, max_size=5), crlf=st.booleans())
def test_numbers_are_read_as_they_are_written(tmp_path_factory, rows, crlf):
    """Each number is the float that its digits say, whatever else a line holds."""
    end = "\r\n" if crlf else "\n"
    lines = ["name,N,loss,D", *(f'"a, b",{n!r},{loss!r},{d!r}' for n, d, loss in rows)]
    path = written(tmp_path_factory.mktemp("runs") / "runs.csv", end.join(lines) + end)
    table = runs.load(path)
    assert list(zip(table.parameters, table.tokens, table.losses, strict=True)) == rows
    assert (len(table), table.tokens_from) == (len(rows), "D")


def test_tokens_come_from_compute_where_they_are_not_given(tmp_path):
    """D is C / 6 N; where D is given, C is left alone."""
    path = written(tmp_path / "runs.csv", "\ufeffModel Size,Training FLOP,loss\n1e9,6e20,2.5\n\n2e9,1.2e21,2.25\n")
    table = runs.load(path)
    assert table.tokens == (1e11, 1e11)
    assert table.tokens_from == "C / 6 N"
    both = written(tmp_path / "both.csv", "N,D,C,loss\n1e9,3,unknown,2.5\n")
    assert runs.load(both).tokens == (3.0,)


@given(losses=st.lists(NUMBERS, min_size=1, max_size=8), count=st.integers(0, 9))
def test_the_highest_losses_are_left_out_and_the_order_stays(losses, count):
    """What is left are the lowest losses, in the order of the file."""
    table = runs.Runs(
        path="", sha256="", tokens_from="D", parameters=tuple(losses), tokens=tuple(losses), losses=tuple(losses)
    )
    kept = table.without_highest(count)
    assert sorted(kept.losses) == sorted(losses)[: max(len(losses) - count, 0)]
    assert kept.parameters == kept.tokens == kept.losses
    places = iter(losses)
    assert all(loss in places for loss in kept.losses)


BAD = {
    "empty": ("", "expected a header and a run on each line, the file is empty"),
    "no-loss": ("N,D\n1,2\n", "expected a column for loss (loss, l), got N, D"),
    "no-tokens": ("N,loss\n1,2\n", "expected a column for D (d, tokens, training tokens) or C (c, flops, flop,"),
    "twice": ("N,params,D,loss\n1,1,2,3\n", "two columns for N: 'N' and 'params'"),
    "word": ("N,D,loss\n1,2,3\n1,two,3\n", "row 3, column 'D': expected a positive number, got 'two'"),
    "zero": ("N,D,loss\n0,2,3\n", "row 2, column 'N': expected a positive number, got '0'"),
    "infinite": ("N,D,loss\n1,2,inf\n", "row 2, column 'loss': expected a positive number, got 'inf'"),
    "nan": ("N,D,loss\n1,nan,1\n", "row 2, column 'D': expected a positive number, got 'nan'"),
    "short": ("N,D,loss\n1,2\n", "row 2: expected 3 columns as in the header, got 2"),
    "comma": ("N,D,loss\n70,5,1400,2.5\n", "row 2: expected 3 columns as in the header, got 4"),
    "blank": ("N,D,loss\n1,2, \n", "row 2, column 'loss': expected a positive number, got ' '"),
    "underscore": ("N,D,loss\n1_0,2,3\n", "row 2, column 'N': expected a positive number, got '1_0'"),
    "script": ("N,D,loss\n\u0663,2,3\n", "row 2, column 'N': expected a positive number, got '\u0663'"),
    "quote": ('N,D,loss\n"1,2,3\n', "not a CSV file: unexpected end of data"),
    "control": ("N,D,\x1b[31mloss\n1,2,3\n", "expected a column for loss (loss, l), got N, D, \\x1b[31mloss"),
    "long": ("N,D,loss\n" + "1" * 200_000 + ",2,3\n", "not a CSV file: field larger than field limit (131072)"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_table_of_runs_is_refused(tmp_path, name):
    """One line says which file, which row and which column, and what was expected there."""
    text, problem = BAD[name]
    path = written(tmp_path / "runs.csv", text)
    with pytest.raises(InputError) as refused:
        runs.load(path)
    assert str(refused.value).startswith(f"{path}: {problem}")
    assert "\n" not in str(refused.value)


def test_other_files_are_refused(tmp_path, monkeypatch):
    """Bytes that are no text, a folder, nothing, and more than is read at once."""
    cases = {
        "expected text in UTF-8": written(tmp_path / "latin.csv", "N,D,loss\né", "latin-1"),
        "expected a regular file": tmp_path,
        "no such file or directory": tmp_path / "absent.csv",
        "more than 2 runs": written(tmp_path / "many.csv", "N,D,loss\n" + "1,2,3\n" * 3),
        "larger than 64 bytes": written(tmp_path / "large.csv", "N,D,loss\n" + "1,2,3\n" * 10),
    }
    monkeypatch.setattr(runs, "LIMIT_RUNS", 2)
    monkeypatch.setattr(runs, "LIMIT_BYTES", 64)
    for problem, path in cases.items():
        with pytest.raises(InputError) as refused:
            runs.load(path)
        assert str(refused.value) == f"{path}: {problem}"


def test_tokens_that_overflow_are_refused(tmp_path):
    """A quotient that float64 cannot hold is no number of tokens."""
    path = written(tmp_path / "runs.csv", "N,C,loss\n1e-300,1e300,2\n")
    with pytest.raises(InputError, match=r"row 2: C / 6 N is inf, no number of tokens$"):
        runs.load(path)
