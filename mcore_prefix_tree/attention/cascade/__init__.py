"""Back-end ``cascade`` for CPUs: an ordinary attention, called once for the runs and once per nesting depth."""

from mcore_prefix_tree.attention.cascade.cascade import attention, check, plan, refusal

__all__ = ["attention", "check", "plan", "refusal"]
