"""A checkpoint held against what its config says, tensor by tensor, and one checkpoint against another.

What a config's files must hold follows from the census, the naming table of the family and the quantisation section.
What they may hold besides is recognised by name and shape, and named; any other tensor is a difference.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from accounting import census, naming, params, quantization
from accounting.census import Part
from accounting.checkpoint import FLOATS, Checkpoint, Difference, Tensor, inconsistencies
from accounting.files import InputError
from accounting.huggingface import Reading
from accounting.naming import Published
from accounting.quantization import Rule, Stored
from accounting.spec import LatentAttention, SpecError

#: What a config's words for a dtype are called in a header.
DTYPES: Mapping[str, str] = MappingProxyType(
    {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64", "half": "F16", "float": "F32"}
)


@dataclass(slots=True, kw_only=True)
class Group:
    """Tensors of a checkpoint that are there for one reason.

    ``scalars`` are logical: those of the weights that packed tensors stand for.
    """

    name: str
    tensors: int = 0
    scalars: int = 0
    bytes: int = 0
    dtypes: set[str] = field(default_factory=set)

    def add(self, tensor: Tensor, scalars: int | None = None) -> None:
        """Count a tensor in, which stands for so many scalars, by default its own."""
        self.tensors += 1
        self.scalars += tensor.scalars if scalars is None else scalars
        self.bytes += tensor.bytes
        self.dtypes.add(tensor.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """What was found: ``decoder``, what the census lists; ``extras``, what a file may hold besides; the rest."""

    decoder: Group
    extras: tuple[Group, ...]
    differences: tuple[Difference, ...]


#: Tensors of a config's decoder that an audit lists; the largest published ones have some hundred thousand.
MAX_TENSORS = 10**6


def audit(reading: Reading, checkpoint: Checkpoint) -> Audit:
    """What differs between a config and a checkpoint.

    Raises InputError for a config whose dtype or quantisation has no rule here.
    """
    try:
        rule = None if reading.quantization is None else quantization.rule(reading.quantization)
        return _Auditor(reading, checkpoint, rule).run()
    except SpecError as error:
        raise InputError(reading.path or reading.name, f"{error.field}: {error.problem}") from None


def compare(one: Checkpoint, other: Checkpoint) -> tuple[Difference, ...]:
    """Where two checkpoints differ in names, shapes and dtypes, the tensors of ``other`` being expected."""
    differences = [*inconsistencies(one), *inconsistencies(other)]
    found = dict(one.tensors)
    for name, tensor in other.tensors.items():
        held = found.pop(name, None)
        if held is None:
            problem = f"expected {_described(tensor.shape, {tensor.dtype})}"
            differences.append(Difference(kind="missing", name=name, problem=problem))
        else:
            differences += _differing(name, held, tensor.shape, {tensor.dtype})
    differences += [_unknown(name, tensor) for name, tensor in found.items()]
    return tuple(differences)


class _Auditor:
    """One audit under way: what was not yet recognised, and what was found."""

    def __init__(self, reading: Reading, checkpoint: Checkpoint, rule: Rule | None) -> None:
        self.reading, self.rule = reading, rule
        self.differences = list(inconsistencies(checkpoint))
        self.left = dict(checkpoint.tensors)
        self.index = checkpoint.index
        #: What the index lists and no file holds has been said, and is not said again.
        self.listed = self.index.weight_map if self.index else {}
        self.decoder = Group(name="decoder")
        self.extras: dict[str, Group] = {}
        self.optional: list[tuple[Stored, Group]] = []
        self.floats = FLOATS
        if reading.dtype is not None:
            if reading.dtype not in DTYPES:
                raise SpecError("dtype", f"expected one of {', '.join(DTYPES)}, got {reading.dtype!r}")
            self.floats = frozenset({DTYPES[reading.dtype]})
        self.bare = _bare(reading, checkpoint)

    def run(self) -> Audit:
        reading, layers = self.reading, len(self.reading.spec.blocks)
        model_type, spec = reading.model_type, reading.spec
        bill = census.take(replace(spec, blocks=spec.blocks + reading.prediction))
        if (tensors := sum(weight.copies for weight in bill.weights)) > MAX_TENSORS:
            raise SpecError("config", f"describes {tensors:,} tensors, more than {MAX_TENSORS:,}")
        for tensor in naming.published(bill, model_type):
            layer = tensor.weights[0].layer
            ahead = layer is not None and layer >= layers
            self.expect(tensor, self.group("prediction_layers") if ahead else self.decoder, needed=not ahead)
        for name, shape in naming.prediction(spec, reading.prediction):
            tables = name.endswith(("head.weight", "embed_tokens.weight"))
            self.may(name, shape, self.group("prediction_layer_tables" if tables else "prediction_layers"))
        for stored, group in self.optional:  # behind the decoder's own, whose names they may have
            self.take(stored.name, stored.shape, stored.dtypes, group, needed=False)
        self.masks()
        self.tied_head()
        for name in [name for name in self.left if name.startswith(reading.beside)]:
            self.group("vision_tower").add(self.left.pop(name))
        self.claims()
        self.differences += [_unknown(name, tensor) for name, tensor in self.left.items()]
        extras = tuple(group for group in self.extras.values() if group.tensors)
        return Audit(decoder=self.decoder, extras=extras, differences=tuple(self.differences))

    def group(self, name: str) -> Group:
        return self.extras.setdefault(name, Group(name=name))

    def expect(self, tensor: Published, group: Group, *, needed: bool) -> None:
        """A tensor of the census, as it is or as the quantisation stores it."""
        if (name := self.bare(tensor.name)) != tensor.name:
            tensor = replace(tensor, name=name)
        scalars = sum(weight.scalars for weight in tensor.weights)
        if self.rule is None or not self.rule.covers(tensor):
            buffer = tensor.weights[0].part is Part.ROUTER  # DeepSeek's bias and some routers are kept in float32
            floats = self.floats | {"F32"} if buffer else self.floats
            self.take(tensor.name, tensor.shape, floats, group, needed=needed, scalars=scalars)
            return
        for stored in self.rule.store(tensor):
            where = group if stored.weight else self.group(f"{self.rule.method}_scales")
            if not stored.needed:
                self.optional.append((stored, where))
                continue
            count = scalars if stored.weight else None
            self.take(stored.name, stored.shape, stored.dtypes, where, needed=needed, scalars=count)

    def may(self, name: str, shape: tuple[int, ...], group: Group) -> None:
        """A tensor that a file may hold, of any dtype."""
        self.take(name, shape, frozenset(), group, needed=False)

    def take(
        self,
        name: str,
        shape: tuple[int, ...] | None,
        dtypes: frozenset[str],
        group: Group,
        *,
        needed: bool,
        scalars: int | None = None,
    ) -> None:
        """Recognise a tensor, and say what is wrong with it."""
        held = self.left.pop(name, None)
        if held is None:
            if needed and name not in self.listed:
                problem = f"expected {_described(shape, dtypes)}"
                self.differences.append(Difference(kind="missing", name=name, problem=problem))
            return
        wrong = list(_differing(name, held, shape, dtypes))
        self.differences += wrong
        if not any(difference.kind == "shape" for difference in wrong):
            group.add(held, scalars)

    def masks(self) -> None:
        """Buffers that files of some families keep: causal masks, and the frequencies of rotary positions."""
        spec = self.reading.spec
        for layer, block in enumerate(spec.blocks):
            if spec.learned_positions:
                module = self.bare(f"transformer.h.{layer}.attn")
                self.may(f"{module}.bias", (1, 1, spec.context, spec.context), self.group("mask_buffers"))
                self.may(f"{module}.masked_bias", (), self.group("mask_buffers"))
            elif not isinstance(block.attention, LatentAttention) and block.attention.rotary is not None:
                name = self.bare(f"model.layers.{layer}.self_attn.rotary_emb.inv_freq")
                self.may(name, (block.attention.rotary.dim // 2,), self.group("rotary_frequencies"))

    def tied_head(self) -> None:
        """A tied model has one table: a head beside it is a copy."""
        name = naming.holder("head.weight", self.reading.model_type)
        if held := self.left.pop(name, None):  # an untied one has been taken
            problem = f"stored twice, as the token table and as {_described(held.shape, {held.dtype})}"
            self.differences.append(Difference(kind="tied head", name=name, problem=problem))

    def claims(self) -> None:
        """The number of parameters that an index claims; transformers counts no packed weight as what it stands for."""
        claimed = self.index and self.index.total_parameters
        unique = params.count(self.reading.spec).unique
        if claimed not in (None, unique) and self.rule is None:
            problem = f"the index says {claimed:,}, the config {unique:,}"
            self.differences.append(Difference(kind="total_parameters", name="index", problem=problem))


def _bare(reading: Reading, checkpoint: Checkpoint) -> Callable[[str], str]:
    """What a name is in a file of the model without its head, whose names lack the model's own (GPT-2's published)."""
    prefix = "transformer." if reading.spec.learned_positions else "model."
    listed = checkpoint.index.weight_map if checkpoint.index else {}  # of an absent file, the index knows the names
    names = checkpoint.tensors.keys() | listed.keys()
    bare = not any(name.startswith(prefix) for name in names)
    return lambda name: name.removeprefix(prefix) if bare else name


def _differing(name: str, held: Tensor, shape: tuple[int, ...] | None, dtypes: Iterable[str]) -> Iterator[Difference]:
    """What is wrong with a tensor; no dtypes stand for any, and no shape for any vector."""
    if held.shape != shape if shape is not None else len(held.shape) != 1:
        turned = ", transposed" if shape is not None and held.shape == shape[::-1] else ""
        problem = f"expected {_sizes(shape)}, got {_sizes(held.shape)}{turned}"
        yield Difference(kind="shape", name=name, problem=problem)
    if dtypes and held.dtype not in dtypes:
        yield Difference(kind="dtype", name=name, problem=f"expected {' or '.join(sorted(dtypes))}, got {held.dtype}")


def _unknown(name: str, tensor: Tensor) -> Difference:
    return Difference(kind="unknown", name=name, problem=_described(tensor.shape, {tensor.dtype}))


def _described(shape: tuple[int, ...] | None, dtypes: Iterable[str]) -> str:
    return f"{' or '.join(sorted(dtypes)) or 'any dtype'} of {_sizes(shape)}"


def _sizes(shape: tuple[int, ...] | None) -> str:
    if shape is None:
        return "any length"
    return " x ".join(map(str, shape)) if shape else "one scalar"
