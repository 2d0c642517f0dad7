"""vLLM servers as an engine: replicas of one policy over HTTP, and the files by which weight versions reach them.

On the run's side `engine` (the protocol), `client` (HTTP), `answers` (completions read and checked), `publish` (vLLM's
weight-transfer phases on all replicas), `start` (replicas of a run's own). Inside a server `worker` and `access`.
"""
