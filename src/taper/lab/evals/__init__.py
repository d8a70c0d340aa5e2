"""Evaluation: tasks of lm-evaluation-harness at full depth and under policies, on the same problems.

`load_tasks` (tasks) loads problems, `evaluate` (run) has a model complete and score them into records, `summarise`
(summary) compares policies with full depth. `TaperLM` (harness) is the model class of lm-evaluation-harness.
"""

from .records import Evaluation
from .run import evaluate
from .summary import EvalSummary, summarise
from .tasks import Selection, load_tasks

__all__ = ["EvalSummary", "Evaluation", "Selection", "evaluate", "load_tasks", "summarise"]
