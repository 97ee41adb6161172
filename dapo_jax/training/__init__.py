"""Train state, the jitted update, and the loop."""
