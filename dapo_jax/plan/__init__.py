"""Estimates a run's memory, traffic and minimum time without executing it, from shapes or from programs compiled for a TPU slice."""
