"""The train state, packing of examples into rows, and the jitted update."""
