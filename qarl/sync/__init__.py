"""Publishing: the tensors that the forward used go into the engine or a checkpoint folder, and are
verified on arrival.
"""
