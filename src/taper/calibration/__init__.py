"""What a model can spare: references, search, curve, held-out validation, report. `run.calibrate` is the way in."""
