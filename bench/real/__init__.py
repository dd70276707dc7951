"""Splices and corrections measured on real texts with any GGUF: `python -m bench.real`, `make real`."""
