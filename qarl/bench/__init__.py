"""`qarl bench`: what this machine makes of the schemes. `qarl bench speed` measures sampling,
learning and memory.
"""
