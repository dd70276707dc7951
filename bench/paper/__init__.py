"""The experiments of "Models Take Notes at Prefill" (arXiv:2606.17107) on any GGUF: `make paper`.

The finding, the methods and the tasks are the author's (19PINE-AI/programmable-kv); the code is ours, on the engine of
`notes`. docs/paper.md is the report of the two models that a user can get from PyPI.
"""
