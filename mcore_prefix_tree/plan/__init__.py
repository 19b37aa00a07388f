"""A step's samples to micro-batches on ranks."""

from mcore_prefix_tree.plan.ahead import Ahead
from mcore_prefix_tree.plan.bound import makespan_bound
from mcore_prefix_tree.plan.cost import CostModel, Measured
from mcore_prefix_tree.plan.plan import BudgetError, ForestPlan, plan_step
from mcore_prefix_tree.plan.report import MicroBatchReport, PlanReport, report_plan

__all__ = [
    "Ahead",
    "BudgetError",
    "CostModel",
    "ForestPlan",
    "Measured",
    "MicroBatchReport",
    "PlanReport",
    "makespan_bound",
    "plan_step",
    "report_plan",
]
