"""Calibration: which layers a model can skip, how soon, and what that costs.

`run.calibrate` calibrates to a budget or a speed, `task.calibrate_to_task` to the accuracy on a task. `replay` scores
policies on known outputs, `search` orders the layers and fits the curve, `problems` are what the model must still
solve, `store` keeps every measurement, `statistics` has the intervals, `summary` and `report` say what was found.
"""
