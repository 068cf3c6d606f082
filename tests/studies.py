"""Recorded results of the scaling study, by the texts that it was trained on."""

import tomllib
from dataclasses import replace
from pathlib import Path

from model.study import TEXT, load

FIXTURES = Path(__file__).parents[1] / "fixtures"
DATA = {entry["path"]: entry for entry in tomllib.loads((FIXTURES / "data.toml").read_text("utf-8"))["file"]}


def is_file(described, path):
    """Whether a study read the file that ``fixtures/data.toml`` has under a path, by its sha256 where that is known."""
    sha256 = DATA[path].get("sha256", described["sha256"])
    return (described["name"], described["sha256"]) == (Path(path).name, sha256)


def recorded(*texts, rule=TEXT.rule, steps=TEXT.steps, folder=FIXTURES / "baselines"):
    """The studies of these texts, one after the other, by the textbook's recipe but for its rule and its steps.

    ``steps`` None takes any number: at a constant rate a short run is the beginning of a longer one.
    """
    found = []
    for path in sorted(folder.glob("*/study/*.json")):
        study = load(path)
        files = study.diets.get("corpus", {}).get("files", [])
        same = len(files) == len(texts) and all(map(is_file, files, texts))
        recipe = replace(TEXT, rule=rule, steps=steps or study.recipe.steps)
        if same and replace(study.recipe, evaluate_every=None) == recipe:
            found.append(study)
    return found
