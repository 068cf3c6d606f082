"""Which of a backward pass's products run: a walk through the decoder, from the tokens on.

A product y = W x of the forward pass has two in the backward one: with respect to W, if W
trains, and with respect to x, if anything that x was made from trains. Attention's products
of two activations likewise, for each of the two.
"""

from collections.abc import Callable, Mapping

from accounting.adapters import DOWN, UP
from accounting.census import Census, Weight

Trains = Callable[[Weight], bool]


def everything(_weight: Weight) -> bool:
    """All weights train."""
    return True


def products(census: Census, trains: Trains = everything) -> dict[str, int]:
    """How many products the backward pass has, 0 to 2, for each of the forward pass.

    Keys are the names of the weights that multiply, and ``blocks.N.scores`` and
    ``blocks.N.mixture``. Raises ValueError for a part of a census.
    """
    walk = _Walk({weight.name: trains(weight) for weight in census.weights})
    x = walk.trained("embedding") | walk.trained("position")
    for layer in dict.fromkeys(product.layer for product in census.products):
        x = walk.block(f"blocks.{layer}", x)
    walk.linear("head" if "head.weight" in walk.trains else "embedding", walk.norm("norm", x))
    if missed := {weight.name for weight in census.weights if weight.multiplies} - walk.backward.keys():
        raise ValueError(f"{min(missed)}: not met on the way from the tokens: a backward pass is a whole decoder's")
    return walk.backward


class _Walk:
    """Follows whether an activation needs a gradient, and notes the products that this costs."""

    def __init__(self, trains: Mapping[str, bool]) -> None:
        self.trains = trains
        self.backward: dict[str, int] = {}

    def trained(self, module: str) -> bool:
        """Whether the module has a weight or an offset that trains."""
        return any(self.trains.get(f"{module}.{name}", False) for name in ("weight", "bias"))

    def norm(self, module: str, x: bool) -> bool:
        return x or self.trained(module)

    def linear(self, module: str, x: bool) -> bool:
        """Whether the module's output needs a gradient; a module that is not there passes nothing on."""
        if f"{module}.weight" not in self.trains:
            return False
        self.backward[f"{module}.weight"] = x + self.trains[f"{module}.weight"]
        adapted = self.linear(f"{module}.{UP}", self.linear(f"{module}.{DOWN}", x))
        return x or adapted or self.trained(module)

    def block(self, block: str, x: bool) -> bool:
        attended = self.attention(block, self.norm(f"{block}.attention_norm", x))
        x = x | self.norm(f"{block}.attention_post_norm", attended)
        fed = self.feed_forward(f"{block}.feed_forward", self.norm(f"{block}.feed_forward_norm", x))
        return x | self.norm(f"{block}.feed_forward_post_norm", fed)

    def attention(self, block: str, x: bool) -> bool:
        module = f"{block}.attention"
        if f"{module}.kv_down.weight" in self.trains:
            query, key, value = self.latent(module, x)
        else:
            query = self.norm(f"{module}.query_norm", self.linear(f"{module}.query", x))
            key = self.norm(f"{module}.key_norm", self.linear(f"{module}.key", x))
            value = self.linear(f"{module}.value", x)
        weights = query | key | self.trains.get(f"{module}.sinks", False)
        self.backward[f"{block}.scores"] = query + key
        self.backward[f"{block}.mixture"] = weights + value
        return self.linear(f"{module}.output", weights | value)

    def latent(self, module: str, x: bool) -> tuple[bool, bool, bool]:
        """Whether query, key and value need gradients: the key's rotated part skips the expansion."""
        query = self.linear(f"{module}.query", x)
        if f"{module}.query_down.weight" in self.trains:
            down = self.norm(f"{module}.query_norm", self.linear(f"{module}.query_down", x))
            query = self.linear(f"{module}.query_up", down)
        compressed = self.linear(f"{module}.kv_down", x)
        value = self.linear(f"{module}.kv_up", self.norm(f"{module}.kv_norm", compressed))
        return query, compressed | value, value

    def feed_forward(self, module: str, x: bool) -> bool:
        routed = self.linear(f"{module}.router", x)
        experts = self.gated(f"{module}.experts.{{expert}}", x)
        shared = self.gated(f"{module}.shared", x)
        return self.gated(module, x) | routed | experts | shared

    def gated(self, module: str, x: bool) -> bool:
        gate, up = self.linear(f"{module}.gate", x), self.linear(f"{module}.up", x)
        return self.linear(f"{module}.down", gate | up)
