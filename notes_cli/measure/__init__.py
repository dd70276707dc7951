"""Measuring: two sequences compared. Nothing here prints."""
