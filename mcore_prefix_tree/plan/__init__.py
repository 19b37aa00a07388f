"""A step's samples to micro-batches on ranks."""

from mcore_prefix_tree.plan.plan import BudgetError, ForestPlan, plan_step

__all__ = ["BudgetError", "ForestPlan", "plan_step"]
