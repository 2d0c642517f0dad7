"""Configuration: its schema and how it is read, and the shipped runs as YAML files beside the code.

The files are reached alike from a checkout and a wheel: `importlib.resources.files("qarl.configs")
/ "<name>.yaml"`.
"""
