"""How well a model does a task in each mode: statistics of paired answers, and the methods that are compared."""
