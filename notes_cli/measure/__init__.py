"""Measuring: two notebooks compared. Nothing here prints."""
