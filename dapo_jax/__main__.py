"""Runs the command line for `python -m dapo_jax`."""

import sys

from dapo_jax.cli import main

sys.exit(main())
