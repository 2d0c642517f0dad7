"""`qarl compare`: trains variants of one configuration with every seed, and compares the exports.

comparison  a comparison: variants, seeds, cells and their configurations
file        reads a comparison from a YAML file and options
commands    commands of `qarl` that are left to run of a cell; checks before the first one runs
cells       runs the commands, several cells at a time
figures     figures of finished cells, and of variants over seeds: as a table and as JSON
"""
