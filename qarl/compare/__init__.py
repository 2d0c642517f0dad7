"""`qarl compare`: variants of one configuration, each trained with every seed, by what they deploy.

`comparison`  what is compared: variants, seeds, cells and their configurations `file`        the
same from a YAML file and options `commands`    what is left to run of a cell, as commands of
`qarl`; what can be refused before the first runs `cells`       runs them, some at a time `figures`
what a finished cell measured, and what its variant comes to over seeds, for a person and as JSON
"""
