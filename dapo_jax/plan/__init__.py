"""Estimates a run's memory, traffic and minimum time from shapes, or from programs compiled for a TPU slice or GPUs."""
