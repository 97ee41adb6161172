"""`dapo-jax doctor`: checks whether a configuration can train on this machine, before a run does.

The list of checks is `examination.CHECKS`. Nothing is written into the run's folder; files written elsewhere are removed again.
"""
