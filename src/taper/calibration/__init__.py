"""Calibration: which layers a model can skip, how soon, and what that costs.

The way in is `run.calibrate` (a budget or a speed) and `task.calibrate_to_task` (the accuracy on a task). `replay`
scores policies on known outputs, `search` orders the layers, `curve` fits the depth by step, `problems` are what the
model must still solve, `store` keeps every measurement, `statistics` has the intervals, `summary` and `report` say what
was found.
"""
