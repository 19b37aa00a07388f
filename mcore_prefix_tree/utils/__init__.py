"""Helpers that know nothing of folding: errors, files that users name, signals, memory, random states, versions."""
