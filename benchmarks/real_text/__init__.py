"""Tasks and settings of the comparison on real text (docs/lab/real.md)."""
