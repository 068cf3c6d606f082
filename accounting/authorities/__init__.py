"""Observers that share no code with the counts: what is built and measured, not derived.

Each refuses to return a number that it knows to be incomplete.
"""


class UncountedError(RuntimeError):
    """An observer met work that it has no number for, so that its total would not be the total."""
