"""`dapo-jax doctor`: checks whether a configuration can train on this machine, before a run does.

The lists of checks are in `examination`. Nothing is written into the run's folder; files written elsewhere are removed again.
"""
