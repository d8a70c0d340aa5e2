"""Trains adapters: small stand-ins of the layers that a policy skips. `run.heal` is the way in.

The only part of Taper that needs gradients, and PyTorch (the extra `heal`).
"""
