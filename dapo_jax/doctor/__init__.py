"""`dapo-jax doctor`: checks before a run whether a configuration can train on this machine.

The checks are listed in `examination`. Nothing is written to the run's folder, and files written elsewhere are removed again.
"""
