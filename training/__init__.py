"""Training of the tiny model that ships with notes (development only)."""
