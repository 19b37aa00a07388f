"""Worlds of processes, tiny models and their weights, for tests of full layouts."""
