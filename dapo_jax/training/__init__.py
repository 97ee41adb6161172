"""The train state, the packing of examples into rows, and the jitted update."""
