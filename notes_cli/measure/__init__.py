"""Measurement: verify, calibrate and benchmark a model's splices and edits. Prints nothing."""
