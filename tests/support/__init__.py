"""Helpers that tests share. No test imports another test."""

from collections.abc import Callable
from pathlib import Path

Policies = Callable[[bool], Path]
"""Type of the fixtures `random_policy` and `random_experts`: whether embeddings are tied → the
model's folder.
"""
