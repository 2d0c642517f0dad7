"""Post-training quantization of an unquantized run, by llmcompressor: the baseline QaRL is measured
against.
"""
