"""Shipped run configurations: YAML files only, installed next to the code as package data.

Reached the same way from a checkout and from a wheel: `importlib.resources.files("qarl.configs") / "<name>.yaml"`.
"""
