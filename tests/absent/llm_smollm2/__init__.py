"""A package of this name without its model: see tests/conftest.py."""
