"""Post-training quantization of an unquantized run by llmcompressor, the baseline for QaRL."""
