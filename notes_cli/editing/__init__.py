"""Editing: updates the K/V of a spliced skill in a sequence when one of its fields has a new value."""
