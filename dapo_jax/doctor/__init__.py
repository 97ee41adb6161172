"""`dapo-jax doctor`: checks before a run whether a configuration can train on this machine.

The checks are listed in `examination`. The doctor leaves the run's folder unchanged and removes the temporary files that it creates.
"""
