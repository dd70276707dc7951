"""Measurement: verify and benchmark a model's splices and edits. Prints nothing."""
