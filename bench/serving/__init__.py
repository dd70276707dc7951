"""`notes serve` with errata against llama.cpp's own server with the prompt edited, under the same load."""
