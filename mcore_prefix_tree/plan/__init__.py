"""Assignment of a step's samples to micro-batches on ranks."""

from mcore_prefix_tree.plan.balance import least_makespan
from mcore_prefix_tree.plan.carry import Carrying, ForestPlan, TreePart
from mcore_prefix_tree.plan.cost import CostModel
from mcore_prefix_tree.plan.flops import Bound, Counts, ExpectedSpeedup, ModelWork, Parts, work_ratios
from mcore_prefix_tree.plan.forest_plan import BudgetError, fewest_micro_batches, plan_step
from mcore_prefix_tree.plan.model_shape import LatentAttention
from mcore_prefix_tree.plan.pack import Dealt, deal
from mcore_prefix_tree.plan.plan_report import (
    MicroBatchReport,
    PlanReport,
    Spread,
    StepsReport,
    report_plan,
    report_steps,
)
