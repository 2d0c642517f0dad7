"""Threads, compilation and sharding, independent of what is computed."""
