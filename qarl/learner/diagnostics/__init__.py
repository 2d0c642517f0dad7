"""Diagnostics that watch a batch being learned, a file for each; `observers` lists them."""
