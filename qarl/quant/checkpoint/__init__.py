"""The contents of a checkpoint: names, shapes, families of models, and each layer's scheme."""
