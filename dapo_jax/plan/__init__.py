"""The memory, traffic and least time of a run, from shapes or from programs compiled for a TPU slice. Nothing runs."""
