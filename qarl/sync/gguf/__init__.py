"""Write an export as a GGUF file for llama.cpp, with the very codes.

`exported` reads the folder, `blocks` lays its codes out as llama.cpp's blocks, `families` knows the
architectures, `vocabulary` the tokenizers. `write` joins them, and proves the file by reading it
back.
"""
