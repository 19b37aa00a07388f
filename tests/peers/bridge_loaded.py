"""Imports what ranks of jobs on Hugging Face folders need, for a server that forks them."""

from bridge_models import auto_bridge

auto_bridge()
