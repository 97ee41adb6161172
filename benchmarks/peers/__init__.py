"""One module per system. Each system runs in its own environment, and only `ours` imports dapo_jax."""
