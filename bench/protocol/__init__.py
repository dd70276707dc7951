"""The hypotheses of docs/protocol.md, measured on a model of training/next: python -m bench.protocol --help."""
