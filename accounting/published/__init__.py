"""Published architectures: the fields of a config.json that determine the decoder, by name."""

import tomllib
from difflib import get_close_matches
from importlib import resources
from typing import Any


def names() -> list[str]:
    """The names of the published configs that come with the package."""
    entries = (entry.name for entry in resources.files(__name__).iterdir())
    return sorted(name.removesuffix(".json") for name in entries if name.endswith(".json"))


def data(name: str) -> bytes:
    """The ``config.json`` of one of ``names``."""
    return resources.files(__name__).joinpath(f"{name}.json").read_bytes()


def sources() -> dict[str, Any]:
    """Where each is published, by name."""
    return tomllib.loads(resources.files(__name__).joinpath("sources.toml").read_text("utf-8"))


def suggestion(name: str) -> str:
    """What a person who wrote ``name`` may have meant, or all names there are."""
    close = get_close_matches(name.rpartition("/")[2].lower(), names(), n=1)
    return f"did you mean {close[0]}?" if close else f"the published models are {', '.join(names())}"
