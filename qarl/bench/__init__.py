"""Benchmarks: `qarl bench NAME`. Each prints a table and, with --json, writes its data."""
