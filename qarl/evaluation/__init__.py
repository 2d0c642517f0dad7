"""What is made of answers to questions: accuracies with intervals, differences, benchmarks. No
engine.
"""
