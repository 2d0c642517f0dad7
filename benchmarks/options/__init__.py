"""The benchmarks' options, a module each."""
