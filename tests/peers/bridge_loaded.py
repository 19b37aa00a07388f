"""Imports for ranks of jobs on Hugging Face folders, for a server that forks them."""

from bridge_models import auto_bridge

auto_bridge()
