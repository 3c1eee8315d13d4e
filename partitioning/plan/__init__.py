"""Laid-out states: every array with its spec and reasons, as data, as a file, and as an audit."""

from partitioning.plan.difference import Change, PlanDiff, diff
from partitioning.plan.plan_file import from_json, load_plan, save_plan, to_json
from partitioning.plan.resolved import ResolvedPlan
from partitioning.plan.rows import PlannedArray

__all__ = [
    'Change',
    'PlanDiff',
    'PlannedArray',
    'ResolvedPlan',
    'diff',
    'from_json',
    'load_plan',
    'save_plan',
    'to_json',
]
