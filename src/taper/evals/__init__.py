"""Evaluation: tasks of lm-evaluation-harness at full depth and under policies, on the same problems."""

from .run import Evaluation, evaluate
from .tasks import Selection, load_tasks

__all__ = ["Evaluation", "Selection", "evaluate", "load_tasks"]
