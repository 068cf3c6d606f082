"""Dive into Deep Learning 11.7.2.2, 11.7.2.3 and the exercises on them: five sizes on one diet, and their bend.

What the chapter reads off its table of losses is read off the printed numbers here, and must hold wherever in half a
hundredth of them the losses were. The numbers themselves are compared with a study of ours, where one is recorded.
"""

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise, product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import linprog
from torch.utils.data import DataLoader

from accounting import conventions, params
from accounting.authorities import huggingface as modules
from accounting.ledger import case
from accounting.scaling import effective_tokens, fit_power_law
from model import study
from model.diets import Corpus, Synthetic
from model.recipes import RECIPES, STUDY_SIZES, d2l_gpt
from model.source import MarkovSource
from model.study import TEXT
from model.torch_decoder import Decoder
from model.training import Training
from tests import tables
from tests.studies import DATA, FIXTURES, recorded

TABLE = tables.columns("d2l_sweep")
WIDTHS = [width for width, _, _ in STUDY_SIZES]
SIZES = [params.count(RECIPES[f"study-{width}"]).non_embedding for width in WIDTHS]
TABS, PARTS = ("torch", "jax"), ("train", "val")
HALF_A_UNIT = 0.005  # of the last printed place
NEAR = 0.02  # nats: the tabs differ by 0.01, and so may seeds
EXTRA = (512, 10, 8)  # exercise 6: width and blocks; heads change no count
UNIQUE = 39_491 * 128  # characters in the printed number of windows
DIET = TEXT.steps * TEXT.batch * TEXT.tokens
TEXTS = ("text/timemachine.txt", "text/ptb.train.txt")


def llama(width, layers, heads, *, device="meta", dropout=0.0):
    """Hugging Face's module of a size: the architecture is a Llama's."""
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    sizes |= {"vocab_size": 28, "intermediate_size": round(8 * width / 3), "tie_word_embeddings": True}
    return modules.build({"model_type": "llama", "attention_dropout": dropout, **sizes}, device)


def non_embedding(width, layers, heads):
    """The N of a size, counted and built."""
    module = llama(width, layers, heads)
    built = modules.unique(module) - module.model.embed_tokens.weight.numel()
    return params.count(d2l_gpt(28, width, heads, layers)).non_embedding, built


def corners(losses):
    """All losses half a unit above or below the printed ones: what is monotone in each is extreme at one of them."""
    return [losses + HALF_A_UNIT * np.array(signs) for signs in product((-1, 1), repeat=len(losses))]


class Fall(NamedTuple):
    """How steeply losses fall on logarithmic axes: by least squares, and its range wherever they were rounded from."""

    slope: float
    least: float
    most: float

    def __str__(self):
        return f"{self.slope:.4f} ({self.least:.4f} to {self.most:.4f})"


def fall(losses, sizes):
    slopes = [-fit_power_law(sizes, each).exponent for each in (losses, *corners(losses))]
    return Fall(slopes[0], min(slopes), max(slopes))


def departure(losses):
    """Along the four smaller sizes, and from there to the largest."""
    return fall(losses[:4], SIZES[:4]), fall(losses[3:], SIZES[3:])


def fed(characters):
    """The parameters that have twenty characters each."""
    return Fraction(characters, conventions.twenty_tokens(1))


def printed(tab, part):
    return TABLE[f"{tab}_{part}"]


# The sizes and their diet


@pytest.mark.claim("d2l.sweep.configs")
def test_sizes(claim):
    """Widths from 96 to 384 and depths from 3 to 8, whose heads are as wide as rotary positions need, evenly."""
    dials = [tuple(map(int, row)) for row in zip(*(TABLE[name] for name in ("width", "layers", "heads")), strict=True)]
    found = []
    for size, width in zip(dials, WIDTHS, strict=True):
        module = llama(*size)
        body = module.model
        found.append((body.embed_tokens.weight.shape[1], len(body.layers), width // body.layers[0].self_attn.head_dim))
        assert modules.unique(module) == params.count(RECIPES[f"study-{width}"]).unique
    heads = [width // heads for width, _, heads in found]
    claim.holds(
        found == dials == list(STUDY_SIZES) and not any(width % 2 for width in heads), f"{found}; head widths {heads}"
    )


@pytest.mark.parametrize("size", [case(f"d2l.sweep.n_{size[0]}", size) for size in STUDY_SIZES])
def test_printed_sizes(claim, size):
    """N, without the table, as printed."""
    predicted, built = non_embedding(*size)
    claim.measured(predicted, observed=built)


@pytest.mark.claim("d2l.sweep.range")
def test_range(claim):
    """From 0.33M to 14.2M."""
    (small, small_built), (large, large_built) = (non_embedding(*STUDY_SIZES[end]) for end in (0, -1))
    claim.measured([small, large], observed=[small_built, large_built])


@pytest.mark.claim("d2l.sweep.factor_forty")
def test_factor(claim):
    """The largest is forty times the smallest, to one digit."""
    (small, small_built), (large, large_built) = (non_embedding(*STUDY_SIZES[end]) for end in (0, -1))
    claim.measured(Fraction(large, small), observed=Fraction(large_built, small_built))


@pytest.mark.claim("d2l.sweep.diet")
def test_diet(claim):
    """2,000 steps of 64 sequences of 128 are 16.4M tokens."""
    diet = Synthetic(MarkovSource(symbols=28), TEXT.tokens, seed=0)
    step = diet.batch(0, TEXT.batch)[:, 1:].numel()
    claim.measured(DIET, observed=TEXT.steps * step)


@pytest.mark.claim("d2l.sweep.three_passes")
def test_passes(claim):
    """That is three passes, to one digit, over all windows and over those that are trained on."""
    for windows in (39_491, 37_491):
        claim.measured(Fraction(DIET, windows * 128))


@pytest.mark.claim("d2l.sweep.lr_rule")
def test_learning_rate(claim):
    """The rate of AdamW is 1e-3 at width 256, and as much more as the width is less, at every step."""
    diet, rates = Synthetic(MarkovSource(symbols=28), 4, seed=0), {}
    for width, _, heads in STUDY_SIZES:
        training = Training(d2l_gpt(28, width, heads, 1), replace(TEXT, tokens=4, batch=1), diet, torch.device("cpu"))
        training.advance()
        (group,) = training.optimizer.param_groups
        assert group["lr"] == TEXT.rate(width, 0) == TEXT.rate(width, TEXT.steps - 1)
        assert group["weight_decay"] == 0
        rates[width] = group["lr"]
    # A quotient and a product, each rounded.
    claim.holds(
        all(rate * width == pytest.approx(0.256, rel=2**-51) for width, rate in rates.items()) and rates[256] == 1e-3,
        ", ".join(f"{rate:.3g} at {width}" for width, rate in rates.items()),
    )


@pytest.mark.claim("d2l.sweep.zero_dropout")
def test_no_dropout(claim):
    """Training or not, both modules give the same logits; with dropout they would not."""
    torch.manual_seed(0)
    ids, ours = torch.randint(28, (2, 16)), Decoder(RECIPES["study-96"])
    plain, dropping = (llama(*STUDY_SIZES[0], device="cpu", dropout=dropout) for dropout in (0.0, 0.1))

    def same(module, run):
        return torch.equal(*(run(module.train(training)) for training in (True, False)))

    agree = [same(ours, lambda module: module(ids)), same(plain, lambda module: module(ids).logits)]
    claim.holds(
        all(agree) and not same(dropping, lambda module: module(ids).logits),
        "the same logits in both modes, ours and Hugging Face's; other ones with dropout",
    )


@pytest.mark.claim("d2l.sweep.val_mean_of_means")
def test_validation_is_a_mean_of_means(claim, tmp_path):
    """The loss is the plain mean of the batches' means, in which the 16 windows of the last batch weigh 3.9 times."""
    generator = torch.Generator().manual_seed(0)
    letters, held_out, batch = torch.randint(26, (4 * 2001 + 1,), generator=generator), 2000, TEXT.batch
    (tmp_path / "text.txt").write_text("".join(chr(97 + letter) for letter in letters), "utf-8")
    corpus, logits = Corpus([tmp_path / "text.txt"], tokens=4, held_out=held_out), torch.randn(28, 28)
    ours = corpus.validate(lambda ids: logits[ids], batch)
    losses = [
        F.cross_entropy(logits[rows[:, :-1]].flatten(0, 1), rows[:, 1:].flatten()).item()
        for rows in DataLoader(corpus.validation_WT, batch_size=batch)
    ]
    weight = Fraction(held_out, len(losses) * (held_out % batch))
    assert (len(losses), held_out % batch) == (32, 16)
    claim.holds(
        ours.batches == sum(losses) / len(losses) != ours.tokens,
        f"{ours.batches:.4f} for made-up windows, {ours.tokens:.4f} by tokens; the last weigh {float(weight):.1f} fold",
    )


@pytest.mark.claim("d2l.sweep.tabs_differ_errata")
def test_tabs_differ(claim):
    """Three of the ten losses are not the same in both tabs, by 0.01 each."""
    differ = {
        f"{part} at {width}": (torch_loss.item(), jax_loss.item())
        for part in PARTS
        for width, torch_loss, jax_loss in zip(WIDTHS, printed("torch", part), printed("jax", part), strict=True)
        if torch_loss != jax_loss
    }
    claim.holds(
        set(differ) == {"train at 384", "val at 96", "val at 256"}
        and all(round(100 * abs(left - right)) == 1 for left, right in differ.values()),
        ", ".join(f"{left:.2f} and {right:.2f} ({cell})" for cell, (left, right) in differ.items()),
    )


# What a recorded study of ours says


def by_width(claim, **which):
    """Runs of recorded studies of both texts that have the printed number of windows, by width; or it is unrun."""
    runs = {}
    for one in recorded(*TEXTS, **which):
        diet = one.diets["corpus"]
        if diet["training_windows"] + diet["validation_windows"] == 39_491:
            for run in one.runs:
                runs.setdefault(run.width, []).append(run)
    return runs or claim.unrun("long-training")


def ours(claim, width, **which):
    return by_width(claim, **which).get(width, [None])[0] or claim.unrun("long-training")


def agrees(run, part, loss):
    """Whether a run of ours has a printed loss; and both."""
    found = run.train if part == "train" else run.validation
    return abs(found - loss) <= NEAR, f"{found:.4f}, {found - loss:+.4f} from the printed one"


@pytest.mark.parametrize(
    ("tab", "part", "width"),
    [case(f"d2l.sweep.{tab}_{part}_{width}", tab, part, width) for width in WIDTHS for tab in TABS for part in PARTS],
)
def test_printed_losses(claim, tab, part, width):
    """The loss of our run of that width is within 0.02 of the printed one, whichever framework printed it."""
    claim.holds(*agrees(ours(claim, width), part, printed(tab, part)[WIDTHS.index(width)]))


@pytest.mark.claim("d2l.sweep.seed_noise")
def test_seeds(claim):
    """Losses of one size from several seeds are less than 0.01 apart."""
    losses = {width: [(run.train, run.validation) for run in runs] for width, runs in by_width(claim).items()}
    spreads = {width: np.ptp(found, axis=0).max().item() for width, found in losses.items() if len(found) > 1}
    if not spreads:
        claim.unrun("long-training")
    claim.holds(
        max(spreads.values()) < 0.01, ", ".join(f"{spread:.4f} at {width}" for width, spread in spreads.items())
    )


def frozen_and_scaled(claim):
    """Validation losses of our five sizes, with one rate for all and with the rule."""
    return [np.array([ours(claim, width, rule=rule).validation for width in WIDTHS]) for rule in ("frozen", "inverse")]


@pytest.mark.claim("d2l.sweep.frozen_lr_handicap")
def test_one_rate_handicaps_an_end(claim):
    """With one rate for all sizes the smallest or the largest loses more than a seed may."""
    frozen, scaled = frozen_and_scaled(claim)
    lost = frozen - scaled
    claim.holds(max(lost[0], lost[-1]) > 0.01, f"lost by width: {lost.round(4)}")


@pytest.mark.claim("d2l.bend.lr_artifact")
def test_one_rate_bends_the_line(claim):
    """With one rate for all sizes the last step of the curve is flatter than with the rule."""
    last = [-fit_power_law(SIZES[-2:], losses[-2:]).exponent for losses in frozen_and_scaled(claim)]
    claim.holds(last[0] < last[1], f"slope of the last step {last[0]:.4f} with one rate, {last[1]:.4f} with the rule")


@pytest.mark.claim("d2l.ex5.frozen_lr")
def test_points_that_one_rate_moves(claim):
    """With one rate all sizes but the anchor lose: for the smaller ones it is too low, for the largest too high."""
    frozen, scaled = frozen_and_scaled(claim)
    anchor = np.array(WIDTHS) == TEXT.anchor_width
    claim.holds(bool(np.all(frozen[~anchor] > scaled[~anchor])), f"moved by {(frozen - scaled).round(4)}")


@pytest.mark.claim("d2l.sweep.figure")
def test_figure(claim):
    """A record of ours draws both losses of the five sizes, on logarithmic axes."""
    whole = [one for one in recorded(*TEXTS) if {run.width for run in one.runs} >= set(WIDTHS)]
    picture = study.draw(whole[0] if whole else claim.unrun("long-training"))
    claim.holds("corpus, train" in picture and "corpus, validation" in picture, f"{len(whole[0].runs)} sizes")


@pytest.mark.claim("d2l.ex6.run")
def test_a_sixth_size(claim):
    """The loss of 31M parameters lies between the line through the small sizes and the largest one's."""
    loss = ours(claim, EXTRA[0]).validation
    line = [prediction(tab, 3) for tab in TABS]
    saturated = printed("torch", "val")[-1]
    claim.holds(
        min(line) < loss < saturated + HALF_A_UNIT,
        f"{loss:.4f}; the lines say {line[0]:.3f} and {line[1]:.3f}, saturation {saturated:.2f}",
    )


def test_a_wrong_loss_is_refuted(tmp_path):
    """A record is found by its texts and its recipe, and a loss 0.03 off the printed one does not agree."""
    path = tmp_path / "device" / "study" / "made-up.json"
    path.parent.mkdir(parents=True)
    files = [{"name": Path(text).name, "size": 1, "sha256": DATA[text].get("sha256", "")} for text in TEXTS]
    diet = {"files": files, "training_windows": 37_491, "validation_windows": 2000}
    run = dict.fromkeys(study.Run.__dataclass_fields__, 1) | {
        "diet": "corpus",
        "width": 96,
        "train": 1.21,
        "validation": 1.23,
        "evaluations": (),
    }
    made_up = study.Study(
        schema="sixnd.study/1", torch="", device="", threads=1, recipe=TEXT, diets={"corpus": diet}, runs=()
    )
    path.write_bytes(study.dump(replace(made_up, runs=(study.Run(**run),))))
    (found,) = by_width(None, folder=tmp_path)[96]
    assert agrees(found, "train", 1.21)[0]
    assert not agrees(found, "val", 1.20)[0]


# What the chapter reads off its table


def off_a_line(losses, sizes):
    """How far the farthest loss is from the line of logarithms that is nearest to all: a share of the loss."""
    x, y, one = np.log(sizes), np.log(losses), np.ones(len(sizes))
    sides = np.concatenate([np.stack([one, x, -one], 1), np.stack([-one, -x, -one], 1)])
    free = [(None, None)] * 3
    return linprog([0, 0, 1], A_ub=sides, b_ub=np.concatenate([y, -y]), bounds=free).fun


@pytest.mark.claim("d2l.bend.small_sizes_line")
def test_four_sizes_are_on_a_line(claim):
    """The losses of the four smaller sizes are within a hundredth of a line, as much as the chapter allows a seed."""
    curves = [printed(tab, part) for tab, part in product(TABS, PARTS)]
    four = max(off_a_line(corner, SIZES[:4]) for losses in curves for corner in corners(losses[:4]))
    five = [off_a_line(losses, SIZES) for losses in curves]
    claim.holds(
        four < 0.01,
        f"off by {four:.2%} at most, however rounded; all five, as printed, by {min(five):.2%} to {max(five):.2%}",
    )


@pytest.mark.claim("d2l.bend.times_three_errata")
def test_steps_between_sizes(claim):
    """The sizes grow by 1.8, 3, 2.7 and 3: not by three at each step."""
    counted, built = zip(*(non_embedding(*size) for size in STUDY_SIZES), strict=True)
    steps, steps_built = ([Fraction(after, before) for before, after in pairwise(sizes)] for sizes in (counted, built))
    claim.measured(steps, observed=steps_built)
    claim.right(*steps, observed=steps_built)


@pytest.mark.claim("d2l.bend.largest_departs")
def test_the_largest_size_departs(claim):
    """The validation loss falls less in the last step than along the four smaller sizes, however losses are rounded."""
    seen = {tab: departure(printed(tab, "val")) for tab in TABS}
    claim.holds(
        all(last.most < trend.least for trend, last in seen.values()),
        "; ".join(f"{tab}: slope {trend}, then {last}" for tab, (trend, last) in seen.items()),
    )
    chain, *_ = sorted(FIXTURES.glob("baselines/*/study/chain.json"))
    caption = "The same bend in our study of a language whose entropy rate is known, by what is read: new or repeated"
    claim.picture(study.draw(study.load(chain)), caption)


@pytest.mark.claim("d2l.bend.train_on_schedule_errata")
def test_the_training_loss_departs_too(claim):
    """In the last step the training loss falls less than before, however losses are rounded: not on schedule."""
    seen = {tab: departure(printed(tab, "train")) for tab in TABS}
    claim.holds(
        any(last.most >= trend.least for trend, last in seen.values()),
        "; ".join(f"{tab}: slope {trend}, then {last}" for tab, (trend, last) in seen.items()),
    )
    claim.right(seen["torch"][0].slope, *(last.slope for _, last in seen.values()))


@pytest.mark.claim("d2l.bend.gap_grows")
def test_the_gap_grows(claim):
    """Validation less training goes from about nothing to hundredths, and grows however losses are rounded."""
    gaps = {tab: (printed(tab, "val") - printed(tab, "train")).round(2) for tab in TABS}
    slack = 2 * HALF_A_UNIT
    claim.holds(
        all(
            bool(np.all(np.diff(gap) >= 0)) and abs(gap[0]) <= 0.01 and gap[-1] >= 0.03 and gap[-1] - gap[0] > 2 * slack
            for gap in gaps.values()
        ),
        "; ".join(f"{tab}: {', '.join(f'{each:.2f}' for each in gap)}" for tab, gap in gaps.items()),
    )


@pytest.mark.claim("d2l.bend.five_point_one_over_20")
def test_what_the_corpus_feeds(claim):
    """5.1M characters feed what reads 0.26M; the printed windows, which are 5.05M characters, 0.25M."""
    claim.measured(fed(51 * 10**5))
    claim.otherwise(fed(UNIQUE), f"by {UNIQUE:,} characters")


@pytest.mark.claim("d2l.bend.our_smallest")
def test_the_smallest_size_is_the_nearest(claim):
    """To one digit the smallest size is what the corpus feeds, and none is nearer; to two it is a third larger."""
    size, size_fed = SIZES[0], fed(UNIQUE)
    nearest = min(SIZES, key=lambda other: abs(np.log(other / float(size_fed))))
    claim.holds(
        nearest == size and round(size / 10**5) == round(size_fed / 10**5), f"{size:,} and {float(size_fed):,.0f}"
    )
    claim.otherwise(round(size / 10**4) == round(size_fed / 10**4), f"{float(size / size_fed):.2f} times as many")


@pytest.mark.claim("d2l.bend.all_starved")
def test_all_sizes_are_starved(claim):
    """No size has twenty characters of its own for each parameter."""
    counted, built = zip(*(non_embedding(*size) for size in STUDY_SIZES), strict=True)
    assert counted == built
    shares = [UNIQUE / size for size in counted]
    claim.holds(max(shares) < 20, f"{', '.join(f'{share:.3g}' for share in shares)} characters a parameter")


@pytest.mark.claim("d2l.bend.repetition")
def test_repetition_decays(claim):
    """The diet's passes, and four, are worth nine tenths of new text and more; one after twelve is not worth half."""
    passes = DIET / UNIQUE
    worth = {count: effective_tokens(1, count) for count in (passes, 4)}
    another = {count: effective_tokens(1, count + 1) - effective_tokens(1, count) for count in (5, 12, 36)}
    claim.holds(
        all(tokens > 0.9 * count for count, tokens in worth.items()) and another[12] < 0.5 and another[36] < 0.1,
        f"{passes:.2f} passes are worth {worth[passes]:.2f}, 4 are {worth[4]:.2f}; another one after 12 is worth "
        f"{another[12]:.2f}, after 36 {another[36]:.2f}",
    )
    claim.otherwise(another[5] < 0.5, f"after a handful, five, another one is worth {another[5]:.2f}")


@pytest.mark.claim("d2l.ex2.wants")
def test_tokens_wanted(claim):
    """Twenty tokens for each parameter of the five sizes."""
    counted, built = zip(*(non_embedding(*size) for size in STUDY_SIZES), strict=True)
    claim.measured([conventions.twenty_tokens(size) for size in counted], observed=[20 * size for size in built])


@pytest.mark.claim("d2l.ex2.exceed")
def test_all_sizes_want_more(claim):
    """Each size wants more than the corpus has, the smallest a third more."""
    wants = [conventions.twenty_tokens(non_embedding(*size)[1]) for size in STUDY_SIZES]
    claim.holds(min(wants) > UNIQUE, f"{min(wants):,} and more, of {UNIQUE:,}")


@pytest.mark.claim("d2l.ex2.double_passes")
def test_more_passes_do_not_feed_the_largest(claim):
    """Twice the passes are worth 2 tokens a parameter of the largest size, and passes without end 6: not 20."""
    largest, endless = SIZES[-1], 1e6
    worth = [effective_tokens(UNIQUE, tokens) for tokens in (DIET, 2 * DIET, endless * UNIQUE)]
    claim.holds(
        max(worth) < conventions.twenty_tokens(largest),
        ", ".join(f"{each / largest:.2f}" for each in worth)
        + " tokens a parameter now, with twice the passes, at best",
    )


# A sixth size


def predicted(losses):
    """The sixth size's loss by the line through those of the smallest sizes."""
    return fit_power_law(SIZES[: len(losses)], losses).at(non_embedding(*EXTRA)[0])


def prediction(tab, sizes):
    """Its validation loss by the line through the so many smallest."""
    return predicted(printed(tab, "val")[:sizes])


@pytest.mark.claim("d2l.ex6.size")
def test_size_of_the_sixth(claim):
    """Width 512 and ten blocks have 31M parameters without the table."""
    predicted, built = non_embedding(*EXTRA)
    claim.measured(predicted, observed=built)


@pytest.mark.claim("d2l.ex6.flops")
def test_cost_of_the_sixth(claim):
    """6 N D on the same diet."""
    predicted, built = non_embedding(*EXTRA)
    claim.measured(conventions.six_nd(predicted, DIET), observed=6 * built * DIET)


@pytest.mark.claim("d2l.ex6.predict_line")
def test_prediction_of_the_line(claim):
    """The line through the three smallest sizes; through four it says more, and rounding moves it by 0.02."""
    claim.measured([prediction(tab, 3) for tab in TABS])
    claim.otherwise([prediction(tab, 4) for tab in TABS], "through four sizes")
    for tab in TABS:
        rounded = [predicted(corner) for corner in corners(printed(tab, "val")[:3])]
        assert max(rounded) - prediction(tab, 3) == pytest.approx(0.02, abs=HALF_A_UNIT)
        assert prediction(tab, 3) - min(rounded) == pytest.approx(0.02, abs=HALF_A_UNIT)


@pytest.mark.claim("d2l.ex6.predict_saturated")
def test_prediction_of_saturation(claim):
    """The largest size's loss, which is the least, in both tabs."""
    for tab in TABS:
        claim.measured(printed(tab, "val")[-1], observed=printed(tab, "val").min())


@pytest.mark.claim("d2l.bend.six_orders")
def test_cited(claim):
    """A paper reports it."""
    claim.cited()
