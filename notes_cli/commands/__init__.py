"""Subcommands of `notes`: parse options, call the Python API, print the result."""
