"""Evaluation: tasks of lm-evaluation-harness at full depth and under policies, on the same problems."""

from .run import Evaluation, evaluate
from .summary import Summary, summarise
from .tasks import Selection, load_tasks

__all__ = ["Evaluation", "Selection", "Summary", "evaluate", "load_tasks", "summarise"]
