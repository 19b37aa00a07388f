"""Measurements: attention back-ends beside their alternatives, training steps beside unfolded ones."""
