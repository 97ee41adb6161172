"""One file per system. Each runs in an environment of its own; only `ours` imports dapo_jax."""
