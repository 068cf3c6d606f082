"""Closed-form counts for decoder-only language models, checked against built modules."""

__version__ = "0.1.0"
