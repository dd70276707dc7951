"""Files on disk: compiled segments by name, calibration profiles, global errata, and models by name."""
