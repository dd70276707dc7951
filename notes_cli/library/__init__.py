"""On disk: compiled segments by name, profiles, and what is remembered of models."""
