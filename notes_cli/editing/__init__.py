"""Editing: ways of amending a notebook when a field of a spliced skill has another value."""
