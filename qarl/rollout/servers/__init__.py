"""Servers as an engine: replicas of one policy, and the files by which weight versions reach them.

`replicas` is who is asked and who is left out, `publish` a version to all or none, `sender` and
`versions` its files, `engine` all of it together. `vllm/` speaks to vLLM's servers; another kind is
another folder, and a line in `engine`.
"""
