"""Trains adapters: small stand-ins for the layers that a policy skips. `run.heal` is the way in.

It is the only part of Taper that computes gradients, and needs PyTorch (the extra `heal`).
"""
