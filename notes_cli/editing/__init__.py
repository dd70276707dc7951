"""Editing: ways of amending a sequence when a field of a spliced skill has another value."""
