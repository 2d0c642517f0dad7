"""Servers as an engine: replicas of one policy, and the files that carry weight versions to them.

- `replicas`: which server is asked next, and which are left out.
- `publish`: load a version on all servers or on none.
- `sender`, `versions`: the files of a version.
- `engine`: the engine built from these.
- `vllm/`: the client of vLLM's servers. Another kind of server is another folder, and one line in
  `engine`.
"""
