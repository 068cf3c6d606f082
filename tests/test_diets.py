"""What a study reads: windows of text, sequences of the chain, and the order in which they come."""

import math
from math import ceil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accounting.files import InputError
from model.diets import Corpus, Synthetic, places, windows
from model.tokens import LETTERS
from tests.trainings import CHAIN, TEXT


@given(text=st.text("ab .", max_size=60), tokens=st.integers(1, 9))
def test_windows_stride_by_their_length(text, tokens):
    """ceil((len - T) / T) windows; targets are shifted by one, and cover the text after its first character once."""
    text = "x" * (tokens + 1) + text
    found = windows([ord(character) for character in text], tokens).tolist()
    assert len(found) == ceil((len(text) - tokens) / tokens)
    inputs, targets = ([row[:-1] for row in found], [row[1:] for row in found])
    for index, (before, after) in enumerate(zip(inputs, targets, strict=True)):
        assert "".join(map(chr, before)) == text[index * tokens :][:tokens]
        assert "".join(map(chr, after)) == text[index * tokens + 1 :][:tokens]


def corpus(folder, *texts, **fields):
    paths = []
    for index, text in enumerate(texts):
        paths.append(folder / f"{index}.txt")
        paths[-1].write_text(text, "utf-8")
    return Corpus(paths, **({"tokens": 16, "held_out": 5} | fields))


def test_a_corpus_joins_its_files_by_a_space(tmp_path):
    """Files follow in the order given, cleaned as one text; the last windows are held out."""
    one = corpus(tmp_path, "Über 3 men", TEXT)
    assert one.text.startswith(" ber men the quick")
    joined = torch.cat((one.training_WT, one.validation_WT))
    assert torch.equal(joined, windows(LETTERS.encode(one.text), 16))
    assert len(one.validation_WT) == 5
    assert [file["size"] for file in one.described()["files"]] == [len("Über 3 men".encode()), len(TEXT)]


@pytest.mark.parametrize("held_out", [0, 200])
def test_a_corpus_without_a_window_to_train_on_is_refused(held_out, tmp_path):
    """And one with none to hold out, in one line that says how many there are."""
    with pytest.raises(InputError, match=rf"0\.txt: \d+ windows of 16 characters, {held_out} to be held out$"):
        corpus(tmp_path, TEXT, held_out=held_out)


def test_a_file_that_is_no_text_is_refused(tmp_path):
    """Bytes that are not UTF-8, and a file that is not there."""
    (tmp_path / "1.txt").write_bytes(b"\xff")
    for name, problem in (("1.txt", "not UTF-8 text"), ("2.txt", "no such file or directory")):
        with pytest.raises(InputError, match=rf"{name}: {problem}$"):
            Corpus([tmp_path / name])


@given(seed=st.integers(0, 2**40), batch=st.integers(1, 9), count=st.integers(1, 9), first=st.integers(0, 30))
def test_a_pass_reads_every_sequence_once(seed, batch, count, first):
    """The steps' places, one after the other, are permutations one after the other, whichever step is asked first."""
    steps = range(math.lcm(batch, count) // batch * (1 + first // 10))
    alone = places(seed, first, batch, count)
    stream = torch.cat([places(seed, step, batch, count) for step in steps]).reshape(-1, count)
    assert all(row == list(range(count)) for row in stream.sort(1).values.tolist())
    assert torch.equal(alone, places(seed, first, batch, count))


def test_passes_and_seeds_have_orders_of_their_own():
    """Two passes over 50 sequences, or one of two seeds, have the same order by chance in one case of 50!."""
    orders = {tuple(places(seed, step, 50, 50).tolist()) for seed in (0, 1) for step in (0, 1)}
    assert len(orders) == 4


@pytest.mark.parametrize("repeated", [None, 5])
def test_a_step_follows_from_the_seed_and_its_number(repeated):
    """Two diets of a seed agree on every step in any order; another seed, or another step, is another batch."""
    one, two, other = (Synthetic(CHAIN, 6, seed, repeated) for seed in (0, 0, 1))
    assert torch.equal(one.batch(3, 4), [two.batch(step, 4) for step in (5, 3)][1])
    assert not torch.equal(one.batch(3, 4), one.batch(4, 4))
    assert not torch.equal(one.batch(3, 4), other.batch(3, 4))
    seen = {tuple(row) for step in range(10) for row in one.batch(step, 4).tolist()}
    assert (len(seen) == 5) is (repeated == 5)


def test_validation_is_the_mean_of_means_and_the_mean_over_tokens(tmp_path):
    """With a short last batch, of 1 window after 2 of 2, its tokens weigh twice in the mean of the batches' means."""
    one = corpus(tmp_path, TEXT)
    table = torch.randn(28, 28, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    nats = -table.log_softmax(-1)[one.validation_WT[:, :-1], one.validation_WT[:, 1:]]
    found = one.validate(lambda tokens_BT: table[tokens_BT], 2)
    expected = (nats[:2].mean() + nats[2:4].mean() + nats[4:].mean()) / 3
    assert math.isclose(found.batches, expected, rel_tol=1e-12)  # sums of 80 float64 in another order
    assert math.isclose(found.tokens, nats.mean(), rel_tol=1e-12)
    assert abs(found.batches - found.tokens) > 1e-3
