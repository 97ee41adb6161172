"""The needs of a run: memory, traffic and time by roofline, from shapes or from programs compiled for a TPU slice.

Nothing runs, and nothing of size is allocated.
"""
