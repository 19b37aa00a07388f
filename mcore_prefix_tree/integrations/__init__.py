"""Folding under other libraries' own interfaces; each module imports its library, and nothing here imports Megatron."""
