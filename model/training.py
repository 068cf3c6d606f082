"""One decoder trained on one diet, step by step, so that it may be killed at any of them and resumed to the same bits.

A checkpoint is a safetensors file: the weights and AdamW's two moments, the losses so far, and in its metadata what
was being trained. It is written beside its place and moved there, so that the file is whole whenever it is there.
"""

import hashlib
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Literal, NamedTuple, get_args

import msgspec
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from accounting.files import InputError
from accounting.spec import ModelSpec
from model.diets import Diet, Validation
from model.torch_decoder import Decoder

RateRule = Literal["inverse", "root", "frozen"]
Schedule = Literal["constant", "cosine"]

SCHEMA = "sixnd.checkpoint/1"
POWERS: dict[RateRule, float] = {"inverse": 1.0, "root": 0.5, "frozen": 0.0}
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How every size is trained: AdamW without weight decay, in float32, with no dropout.

    ``batch`` sequences of ``tokens`` a step. The learning rate is ``anchor_rate`` at ``anchor_width`` and goes with
    the width by ``rule``: as its inverse, as the inverse of its root, or not at all. It stays (``constant``) or falls
    to zero along half a cosine. ``evaluate_every`` steps the validation loss is taken, and once at the end.
    """

    steps: int
    batch: int
    tokens: int
    anchor_rate: float
    anchor_width: int
    rule: RateRule
    schedule: Schedule
    evaluate_every: int | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "tokens", "anchor_width", "evaluate_every"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")
        for name, known in (("rule", get_args(RateRule)), ("schedule", get_args(Schedule))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}: expected one of {known}, got {getattr(self, name)!r}")

    def peak_rate(self, width: int) -> float:
        """The learning rate of the first step."""
        ratio: float = (self.anchor_width / width) ** POWERS[self.rule]
        return self.anchor_rate * ratio

    def rate(self, width: int, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        fall = (1 + math.cos(math.pi * step / self.steps)) / 2 if self.schedule == "cosine" else 1.0
        return self.peak_rate(width) * fall

    def evaluations(self, step: int) -> int:
        """How often the validation loss has been taken after so many steps."""
        every = self.evaluate_every or self.steps
        return step // every + (step == self.steps and step % every > 0)


class Evaluation(NamedTuple):
    """The validation loss after so many steps, as ``diets.Validation`` has it."""

    step: int
    batches: float
    tokens: float


class Training:
    """A decoder of one size, its optimizer, and the losses of the steps that are done, each before its update."""

    def __init__(self, spec: ModelSpec, recipe: Recipe, diet: Diet, device: torch.device) -> None:
        self.spec, self.recipe, self.diet, self.device = spec, recipe, diet, device
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(diet.seed)
            self.decoder = Decoder(spec).to(device)
        self.optimizer = torch.optim.AdamW(self.decoder.parameters(), weight_decay=0.0, fused=True)
        self.step, self.seconds = 0, 0.0
        self.losses = torch.zeros(recipe.steps, device=device)
        self.evaluations: list[Evaluation] = []

    def design(self) -> str:
        """A digest of all that decides what is trained: a checkpoint of another design is not continued."""
        diet = {"seed": self.diet.seed, **self.diet.described()}
        design = {"spec": self.spec, "recipe": self.recipe, "diet": diet}
        return hashlib.sha256(msgspec.json.encode(design, order="deterministic")).hexdigest()

    def advance(self) -> None:
        """One step, and what is evaluated after it."""
        tokens_BT = self.diet.batch(self.step, self.recipe.batch).to(self.device)
        logits_BTV = self.decoder(tokens_BT[:, :-1])
        loss = F.cross_entropy(logits_BTV.flatten(0, 1), tokens_BT[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.param_groups[0]["lr"] = self.recipe.rate(self.spec.width, self.step)
        self.optimizer.step()
        self.losses[self.step] = loss.detach()
        self.step += 1
        if self.recipe.evaluations(self.step) > len(self.evaluations):
            self.evaluations.append(Evaluation(self.step, *self.validate()))

    @torch.no_grad()
    def validate(self) -> Validation:
        """The loss on sequences that are held out."""
        return self.diet.validate(lambda tokens_BT: self.decoder(tokens_BT.to(self.device)), self.recipe.batch)

    def tensors(self) -> dict[str, Tensor]:
        """What a run that goes on needs, on the CPU, by name."""
        tensors = {
            "losses": self.losses[: self.step],
            "evaluations": torch.tensor(self.evaluations, dtype=torch.float64).reshape(-1, 3),
        }
        for name, parameter in self.decoder.named_parameters():
            tensors[f"weight.{name}"] = parameter.detach()
            tensors |= {f"{moment}.{name}": self.optimizer.state[parameter][moment] for moment in MOMENTS}
        return {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}

    def save(self, path: Path) -> None:
        """Write a checkpoint, whole or not at all, after at least one step."""
        tensors, spec = self.tensors(), self.spec
        metadata = {
            "schema": SCHEMA,
            "design": self.design(),
            "step": str(self.step),
            "size": f"width {spec.width}, {len(spec.blocks)} layers",
            "seconds": str(self.seconds),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(".new")
        save_file(tensors, beside, metadata | {"checksum": checksum(metadata, tensors)})
        os.replace(beside, path)

    def restore(self, path: Path) -> None:
        """Go on from a checkpoint; InputError in one line for a file that is not a whole one of this design."""
        metadata, tensors = read_checkpoint(path)
        if metadata["design"] != self.design():
            raise InputError(path, "of another design: other sizes, data, seed or steps; name another folder")
        parameters = dict(self.decoder.named_parameters())
        expected = {
            f"{part}.{name}": parameter.shape for part in ("weight", *MOMENTS) for name, parameter in parameters.items()
        }
        step = int(metadata["step"])
        expected |= {"losses": torch.Size([step]), "evaluations": torch.Size([self.recipe.evaluations(step), 3])}
        for name in expected | tensors:
            if name not in expected or name not in tensors or tensors[name].shape != expected[name]:
                raise InputError(path, f"{name}: not the tensor that this decoder has after {step} steps")
        self.step, self.seconds = step, float(metadata["seconds"])
        self.losses[:step] = tensors["losses"]
        self.evaluations = [Evaluation(int(row[0]), row[1], row[2]) for row in tensors["evaluations"].tolist()]
        for name, parameter in parameters.items():
            parameter.data.copy_(tensors[f"weight.{name}"])
            moments = {moment: tensors[f"{moment}.{name}"].to(self.device) for moment in MOMENTS}
            self.optimizer.state[parameter] = {"step": torch.tensor(float(step), device=self.device), **moments}


def checksum(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """The sha256 of what is said and of the tensors' names and bytes."""
    digest = hashlib.sha256(msgspec.json.encode(metadata, order="deterministic"))
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def read_checkpoint(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Metadata and tensors of a checkpoint; InputError for a file that is none, or not what was written."""
    if not path.is_file():
        raise InputError(path, "expected a regular file")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except OSError as error:
        raise InputError(path, (error.strerror or "cannot be read").lower()) from None
    except SafetensorError as error:
        raise InputError(path, f"not a whole checkpoint ({error})") from None
    if metadata.get("schema") != SCHEMA:
        raise InputError(path, f"expected a checkpoint of schema {SCHEMA}, got {metadata.get('schema')}")
    if metadata.pop("checksum", None) != checksum(metadata, tensors):
        raise InputError(path, "not the checkpoint that was written: its checksum is another")
    return metadata, tensors


def train(training: Training, checkpoint: Path, *, save_every: int, done: Callable[[int], object]) -> None:
    """Train to the recipe's last step, from the checkpoint on if there is one, and leave one every so many steps.

    ``done`` is told how many steps are done that were not before. Raises the errors of ``restore``.
    """
    if checkpoint.exists():
        training.restore(checkpoint)
        done(training.step)
    while training.step < training.recipe.steps:
        before = perf_counter()
        training.advance()
        training.seconds += perf_counter() - before
        done(1)
        if training.step % save_every == 0 or training.step == training.recipe.steps:
            training.save(checkpoint)
