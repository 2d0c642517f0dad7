"""Publishing: the tensors the forward used, into the engine or a checkpoint folder, proven on
arrival.
"""
