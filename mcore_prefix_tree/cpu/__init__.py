"""Megatron-Core on a machine without a GPU: the emulation of one, and what local layers lack there."""
