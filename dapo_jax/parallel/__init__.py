"""Meshes, array sharding, the weight transfer from trainer to sampler, and the processes of a run."""
