"""Typed sections of a run's configuration. Imports neither torch nor vllm."""
