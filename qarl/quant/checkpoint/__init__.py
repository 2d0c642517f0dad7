"""What a checkpoint holds: names, shapes, families of models, and which layer takes which
scheme.
"""
