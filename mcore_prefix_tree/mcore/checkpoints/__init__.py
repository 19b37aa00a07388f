"""Checkpoints in Megatron's distributed format: written, checked, read, kept and locked."""
