"""Engines of several processes: they hold masters, sum gradients, step, and write checkpoints."""
