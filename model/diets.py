"""What a study's models read: each diet says the sequences of every step, and how a model does on unseen ones.

A diet knows nothing of the model's size, so that every size reads the same. The sequences of a step follow from the
seed and the step alone: a run that is resumed needs no generator's state.

Dimension suffixes: B batch, W windows, T tokens of a sequence, V vocabulary.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from accounting.files import InputError, read
from model.source import MarkovSource
from model.tokens import LETTERS, clean

Model = Callable[[Tensor], Tensor]
LIMIT_BYTES = 2**30


class Validation(NamedTuple):
    """Nats a token on unseen sequences: the mean of the batches' means, and the mean over tokens.

    They differ where the last batch is short.
    """

    batches: float
    tokens: float


class Diet(Protocol):
    """Sequences of T + 1 tokens, each but the last to be followed by the next."""

    @property
    def vocab(self) -> int:
        """Token ids lie below it."""

    @property
    def seed(self) -> int:
        """What all that is drawn follows from."""

    @property
    def entropy_rate(self) -> float | None:
        """Nats a token that no model gets below, where that is known."""

    def described(self) -> dict[str, object]:
        """What tells this diet from others of the same seed, as JSON has it."""

    def batch(self, step: int, sequences: int) -> Tensor:
        """The sequences of a step: (B, T + 1) int64, on the CPU."""

    def validate(self, model: Model, sequences: int) -> Validation:
        """The loss on unseen sequences of a model that gives logits (B, T, V), so many sequences at a time."""

    def floor(self, symbols_BT: Tensor) -> float | None:
        """Nats a token of these sequences under what they were drawn from, where that is known."""


def generator(*purpose: object) -> torch.Generator:
    """A generator for one purpose, by its name, the seed and the step."""
    digest = hashlib.sha256(repr(purpose).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)  # below 2^63, which is what torch takes


def places(seed: int, step: int, batch: int, count: int) -> Tensor:
    """Which of ``count`` sequences a step reads, (B,): pass after pass over all, each in an order of its own."""
    first = step * batch
    passes = range(first // count, (first + batch - 1) // count + 1)
    order = torch.cat([torch.randperm(count, generator=generator("order", seed, index)) for index in passes])
    return order[first % count : first % count + batch]


@dataclass(frozen=True)
class Synthetic:
    """Sequences of the chain: new ones at every step, or with ``repeated`` the same few over and over."""

    source: MarkovSource
    tokens: int
    seed: int
    repeated: int | None = None
    held_out: int = 1024

    @property
    def vocab(self) -> int:
        """The chain's symbols."""
        return self.source.symbols

    @property
    def entropy_rate(self) -> float:
        """The chain's, exactly."""
        return self.source.entropy_rate

    def described(self) -> dict[str, object]:
        """The chain, and what is drawn from it."""
        chain = {name: getattr(self.source, name) for name in ("symbols", "decay", "seed")}
        return {
            "chain": chain,
            "entropy_rate": self.entropy_rate,
            "repeated": self.repeated,
            "held_out": self.held_out,
        }

    def _sample(self, sequences: int, *purpose: object) -> Tensor:
        return self.source.sample(sequences, self.tokens + 1, generator(self.seed, *purpose))

    @cached_property
    def _repeated(self) -> Tensor:
        return self._sample(self.repeated or 0, "repeated")

    def batch(self, step: int, sequences: int) -> Tensor:
        if self.repeated is None:
            return self._sample(sequences, "step", step)
        return self._repeated[places(self.seed, step, sequences, self.repeated)]

    def validate(self, model: Model, sequences: int) -> Validation:
        """The chain's entropy rate and the model's divergence from it: no noise of drawn targets."""
        symbols_BT = self._sample(self.held_out, "held out")[:, :-1]
        nats_BT = torch.cat([self.source.divergence(model(part), part) for part in symbols_BT.split(sequences)])
        loss = self.entropy_rate + float(nats_BT.mean())
        return Validation(loss, loss)

    def floor(self, symbols_BT: Tensor) -> float:
        return float(self.source.surprise(symbols_BT).mean())


def read_text(paths: Sequence[Path]) -> tuple[str, list[dict[str, object]]]:
    """Files of UTF-8 joined by a space, cleaned as the textbook does; and the name, size and sha256 of each.

    Raises InputError for one that cannot be read.
    """
    texts, described = [], []
    for path in paths:
        data = read(path, LIMIT_BYTES)
        try:
            texts.append(data.decode())
        except UnicodeDecodeError:
            raise InputError(path, "not UTF-8 text") from None
        described.append({"name": path.name, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()})
    return clean(" ".join(texts)), described


def windows(ids: Sequence[int], tokens: int) -> Tensor:
    """Windows of ``tokens`` + 1 ids that step by ``tokens``, (W, T + 1): every id but the first a target at most once.

    What is left at the end and fills no window is left out (d2l 11.7.2.1, ``ScalingCorpus``).
    """
    return torch.tensor(ids).unfold(0, tokens + 1, tokens)


class Corpus:
    """The textbook's pipeline on files of text: 28 symbols, the last ``held_out`` windows for validation.

    Raises InputError for files that cannot be read, and where they leave no window to train on.
    """

    vocab, entropy_rate = len(LETTERS), None

    def __init__(self, paths: Sequence[Path], *, tokens: int = 128, held_out: int = 2000, seed: int = 0) -> None:
        self.seed = seed
        self.text, self.files = read_text(paths)
        windows_WT = windows(LETTERS.encode(self.text), tokens) if len(self.text) > tokens else torch.empty(0)
        if not 1 <= held_out < len(windows_WT):
            source = ", ".join(str(path) for path in paths)
            raise InputError(source, f"{len(windows_WT):,} windows of {tokens} characters, {held_out:,} to be held out")
        self.training_WT, self.validation_WT = windows_WT[:-held_out], windows_WT[-held_out:]

    def described(self) -> dict[str, object]:
        """The files, and what the pipeline makes of them."""
        count = {"training_windows": len(self.training_WT), "validation_windows": len(self.validation_WT)}
        return {"files": self.files, "characters": len(self.text), **count}

    def batch(self, step: int, sequences: int) -> Tensor:
        return self.training_WT[places(self.seed, step, sequences, len(self.training_WT))]

    def validate(self, model: Model, sequences: int) -> Validation:
        losses, counts = [], []
        for part_BT in self.validation_WT.split(sequences):
            logits_BTV = model(part_BT[:, :-1])
            targets_BT = part_BT[:, 1:].to(logits_BTV.device)
            losses.append(F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten()).item())
            counts.append(targets_BT.numel())
        weighted = sum(loss * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)
        return Validation(sum(losses) / len(losses), weighted)

    def floor(self, symbols_BT: Tensor) -> None:
        return None
