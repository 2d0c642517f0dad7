"""Configuration: its schema, its reader, and the shipped runs as YAML files beside the code.

The files have the same address in a checkout and in a wheel:
`importlib.resources.files("qarl.configs") / "<name>.yaml"`.
"""
