"""How fast a model runs: times by depth, policy and length, against memory bandwidth and against other programs."""
