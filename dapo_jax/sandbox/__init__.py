"""Runs programs that a model wrote, isolated from this machine. A program and its input go in; its output and the way it ended come out.

Expected answers never enter a sandbox together with a program, so a program cannot find them. `protocol` has the types, `by_name` loads a back-end.
"""

from dapo_jax.sandbox.by_name import load_sandbox as load_sandbox
from dapo_jax.sandbox.protocol import Limits as Limits
from dapo_jax.sandbox.protocol import Outcome as Outcome
from dapo_jax.sandbox.protocol import Program as Program
from dapo_jax.sandbox.protocol import SandboxError as SandboxError
