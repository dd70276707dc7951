"""Files on disk: compiled segments by name, global errata, and models by name."""
