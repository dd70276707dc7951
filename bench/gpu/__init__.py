"""Checks and timings of a build with a GPU backend, on a machine that has the GPU for a few minutes."""
