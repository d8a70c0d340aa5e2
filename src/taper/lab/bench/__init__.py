"""How fast a model runs, by depth, policy and length, beside other programs. The way in is `run` in `bench/run.py`."""
