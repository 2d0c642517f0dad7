"""Evaluation of answers to questions, without an engine: accuracies with intervals, differences,
benchmarks.
"""
