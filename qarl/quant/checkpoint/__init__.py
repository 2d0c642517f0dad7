"""The contents of a checkpoint: names, shapes, families of models, and which layer takes which
scheme.
"""
