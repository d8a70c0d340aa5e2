"""Evaluation: tasks of lm-evaluation-harness at full depth and under policies, on the same problems.

`load_tasks` (tasks) loads problems, `evaluate` (run) has a model complete and score them into records, `summarise`
(summary) compares policies with full depth. `TaperLM` (harness) is the model class of lm-evaluation-harness. `methods`
and `TaskStudy` (comparison) make policies of published methods and compare them on a task, and `reproduce` (reproduce)
repeats the paper's experiment with them.
"""

import warnings
from typing import Any

from .run import Evaluation, evaluate
from .summary import EvalSummary, summarise
from .tasks import Selection, load_tasks

__all__ = ["EvalSummary", "Evaluation", "Selection", "evaluate", "load_tasks", "summarise"]


def __getattr__(name: str) -> Any:
    if name == "Summary":
        warnings.warn("taper.evals.Summary is now EvalSummary", DeprecationWarning, stacklevel=2)
        return EvalSummary
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
