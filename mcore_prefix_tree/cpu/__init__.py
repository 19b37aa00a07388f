"""Megatron-Core on a machine without a GPU: the emulation of one, and classes that local layers lack there."""
