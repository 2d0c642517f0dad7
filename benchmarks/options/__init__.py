"""Options of the benchmarks, one module for each benchmark."""
