"""vLLM's servers as replicas: `replica` (its protocol over `client`'s HTTP), `answers` (completions
read and checked), `start` (replicas of a run's own). Inside a server `worker` (versions taken from
files), `receive` and `access`.
"""
