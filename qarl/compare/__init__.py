"""`qarl compare`: variants of one configuration, each trained with every seed, by what they deploy.

`comparison`  what is compared: variants, seeds, cells and their configurations
`file`        the same from a YAML file and options
`check`       everything that can be refused before the first cell runs
`commands`    what is left to run of a cell, as commands of `qarl`
`cells`       runs them, some at a time
`figures`     what a finished cell measured, and what its variant comes to over seeds
`table`       the same for a person and as JSON
"""
