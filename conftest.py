"""Plugins of the whole suite, and the Hypothesis profiles."""

import os

from hypothesis import settings

pytest_plugins = ["accounting.ledger.plugin", "pytester"]

settings.register_profile("dev", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.register_profile("thorough", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))
