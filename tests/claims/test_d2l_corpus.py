"""Dive into Deep Learning 11.7.2.1: the corpus, its windows, and what the novel alone does."""

from fractions import Fraction
from math import ceil
from string import ascii_lowercase

import jax.numpy as jnp
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accounting import params
from accounting.conventions import twenty_tokens
from model.diets import Corpus, read_text, windows
from model.recipes import RECIPES, STUDY_SIZES
from model.tokens import LETTERS, clean
from tests.studies import recorded

NOVEL, TREEBANK = "text/timemachine.txt", "text/ptb.train.txt"
WINDOWS, TOKENS, HELD_OUT = 39_491, 128, 2_000  # as printed
NEAR = 0.02  # nats, as for the printed losses
SIZES = [params.count(RECIPES[f"study-{width}"]).non_embedding for width, _, _ in STUDY_SIZES]


def cut(text, tokens):
    """The textbook's windows, by slices."""
    return [text[start : start + tokens + 1] for start in range(0, len(text) - tokens, tokens)]


@pytest.fixture
def printed_windows(tmp_path):
    """A corpus of as many windows as the textbook prints, of text that is made up."""
    text = ascii_lowercase * ceil(((WINDOWS - 1) * TOKENS + TOKENS + 1) / 26)
    (tmp_path / "text.txt").write_text(text[: (WINDOWS - 1) * TOKENS + TOKENS + 1], "utf-8")
    return Corpus([tmp_path / "text.txt"], tokens=TOKENS, held_out=HELD_OUT)


def both_texts(claim):
    return [claim.data(NOVEL, "data:timemachine"), claim.data(TREEBANK, "data:ptb")]


@pytest.mark.claim("d2l.corpus.wells_180kb")
def test_size_of_the_novel(claim):
    """The novel's file has 180 KB, to two digits, of a thousand bytes each."""
    path = claim.data(NOVEL)
    claim.measured(path.stat().st_size, observed=len(path.read_bytes()))


@pytest.mark.claim("d2l.corpus.ptb_5mb")
def test_size_of_the_treebank(claim):
    """The Treebank's training text has 5 MB, to one digit."""
    path = claim.data(TREEBANK)
    claim.measured(path.stat().st_size, observed=len(path.read_bytes()))


@pytest.mark.claim("d2l.corpus.overlap_5gb")
def test_overlapping_windows(claim):
    """A window at every character takes 5 GB in torch's integers, for any text of as many windows as printed."""
    itemsizes = [torch.tensor([0]).element_size(), jnp.array([0]).dtype.itemsize]
    shortest = (WINDOWS - 1) * TOKENS + TOKENS + 1
    for characters in (shortest, shortest + TOKENS - 1):
        ids = torch.empty(characters, dtype=torch.tensor([0]).dtype, device="meta")
        overlapping = ids.unfold(0, TOKENS + 1, 1)
        assert len(ids.unfold(0, TOKENS + 1, TOKENS)) == WINDOWS
        in_torch, in_jax = (overlapping.numel() * size for size in itemsizes)
        claim.measured(in_torch, observed=torch.empty_like(overlapping).nbytes)
        claim.otherwise(in_jax, f"at JAX's {itemsizes[1]} bytes an id")


@pytest.mark.claim("d2l.corpus.windows")
def test_number_of_windows(claim):
    """The novel and the Treebank's text make 39,491 windows."""
    text, _ = read_text(both_texts(claim))
    claim.measured(len(windows(LETTERS.encode(text), TOKENS)), observed=len(cut(text, TOKENS)))


@pytest.mark.claim("d2l.corpus.chars")
def test_printed_characters(claim, printed_windows):
    """128 characters in each of 39,491 windows are 5.1M, and so is every text that makes as many."""
    cut_up = torch.cat([printed_windows.training_WT, printed_windows.validation_WT])
    claim.measured(WINDOWS * TOKENS, observed=cut_up[:, 1:].numel())
    for characters in (len(printed_windows.text), len(printed_windows.text) + TOKENS - 1):
        claim.measured(characters)


@pytest.mark.claim("d2l.corpus.vocab")
def test_vocabulary(claim):
    """All 26 letters are in the novel, so that with a space and <unk> it has 28 symbols, whatever text is added."""

    @given(st.text())
    def everywhere(text):
        assert set(clean(text)) <= set(LETTERS.vocabulary)

    everywhere()
    claim.measured(len(LETTERS), observed=len({"<unk>", *clean(claim.data(NOVEL).read_text("utf-8"))}))


@pytest.mark.claim("d2l.corpus.unk_words")
def test_markers_become_words(claim):
    """The Treebank's markers for rare words and for numbers come out as the words unk and n."""
    line = " the <unk> rose N % to $ N million in N \n"
    words = clean(line).split()
    claim.holds(
        (words.count("unk"), words.count("n")) == (line.count("<unk>"), line.count("N")) and "<" not in clean(line),
        f"{line.strip()!r} is read as {' '.join(words)!r}",
    )


@pytest.mark.claim("d2l.corpus.stride")
def test_windows_stride(claim):
    """Windows begin num_steps apart, their targets one further on, and each character but the first is one once."""

    @given(st.text("abc ", min_size=2, max_size=80), st.integers(1, 20))
    def everywhere(text, tokens):
        ids = list(range(len(text)))
        if len(text) <= tokens:
            return
        found = windows(ids, tokens).tolist()
        assert found == cut(ids, tokens)
        targets = [target for row in found for target in row[1:]]
        assert targets == list(range(1, len(found) * tokens + 1))
        assert len(ids) - len(targets) - 1 < tokens

    everywhere()
    one, other = windows(range(3 * TOKENS + 1), TOKENS)[:2].tolist()
    claim.holds(
        other[0] - one[0] == TOKENS and one[-1] == other[0] and not set(one[1:]) & set(other[1:]),
        f"windows begin at {one[0]} and {other[0]}, with targets {one[1]} to {one[-1]} and {other[1]} to {other[-1]}",
    )


@pytest.mark.claim("d2l.corpus.holdout")
def test_last_windows_are_held_out(claim, printed_windows):
    """Of 39,491 windows the last 2,000 are for validation, and 37,491 are trained on."""
    training, validation = printed_windows.training_WT, printed_windows.validation_WT
    rows = cut(LETTERS.encode(printed_windows.text), TOKENS)
    claim.holds(
        (len(training), len(validation)) == (WINDOWS - HELD_OUT, HELD_OUT)
        and training[-1].tolist() == rows[-HELD_OUT - 1]
        and validation[[0, -1]].tolist() == [rows[-HELD_OUT], rows[-1]],
        f"{len(training):,} trained on, {len(validation):,} held out, from window {len(training):,} on",
    )


@pytest.mark.claim("d2l.corpus.range_fifty_errata")
def test_range_of_sizes(claim):
    """At twenty tokens a parameter the sizes are 1.3 to 56 times the largest that the corpus can feed."""
    for characters in (WINDOWS * TOKENS, 51 * 10**5):
        past = [Fraction(twenty_tokens(size), characters) for size in (SIZES[0], SIZES[-1])]
        claim.measured(past)
        claim.right(*past)


def on_the_novel(claim, least):
    """By size, the best and the last validation of our runs on the novel alone that are past their best; or unrun.

    Past it: 0.02 above it at the end, or trained for a thousand steps, in which that would have come.
    """
    seen = {}
    for run in (run for one in recorded(NOVEL, steps=None) for run in one.runs if run.parameters > least):
        best, last = min(run.evaluations, key=lambda each: each.batches), run.evaluations[-1]
        if last.batches - best.batches > NEAR or last.step >= 1000:
            seen[run.parameters] = best, last, run.train
    return seen or claim.unrun("long-training")


@pytest.mark.claim("d2l.corpus.wells_overfits")
def test_the_novel_is_learnt_by_heart(claim):
    """4.7M parameters have their best validation loss in a few hundred steps; training loss falls on below it."""
    best, last, train = on_the_novel(claim, 10**6).get(SIZES[3]) or claim.unrun("long-training")
    claim.holds(
        100 <= best.step < 1000 and train < best.batches < last.batches - NEAR,
        f"best {best.batches:.3f} at step {best.step}; {last.batches:.3f} at step {last.step}, {train:.3f} in training",
    )


@pytest.mark.claim("d2l.corpus.saturates_1e5")
def test_the_novel_saturates(claim):
    """On the novel, of sizes beyond 1e5 parameters that are ten times apart, none is better than the smallest."""
    best = {size: run[0].batches for size, run in on_the_novel(claim, 10**5).items()}
    if max(best) < 10 * min(best):
        claim.unrun("long-training")
    claim.holds(
        best[min(best)] - min(best.values()) < NEAR, ", ".join(f"{best[size]:.3f} at {size:,}" for size in sorted(best))
    )
