"""Observers that share no code with the counts: what is built and measured, not derived.

Each refuses to return a number that it knows to be incomplete.
"""
