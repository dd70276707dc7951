"""Compiled segments on disk: the container, the names, and the digests of models."""
