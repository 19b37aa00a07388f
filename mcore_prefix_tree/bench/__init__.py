"""Measurements of training steps, and the machine that they belong to."""
