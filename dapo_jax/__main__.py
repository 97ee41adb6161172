"""Runs the command line for `python -m dapo_jax`."""

import dapo_jax.cli.__main__  # noqa: F401
