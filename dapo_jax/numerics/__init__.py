"""Matrix products with a chosen rounding, 8-bit weights, and sums over segments. Only jax is needed."""
