"""A small hybrid, Mamba-2 and attention, that carrying a state is measured by: its recipe, and held-out questions."""
