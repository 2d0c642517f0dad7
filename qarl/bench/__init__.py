"""`qarl bench`: measurements of the schemes on this machine. `qarl bench speed` measures sampling,
learning and memory.
"""
