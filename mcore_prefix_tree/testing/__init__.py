"""What tests and the CPU quickstart share: the GPU emulation, gloo worlds, tiny models and their weights."""
