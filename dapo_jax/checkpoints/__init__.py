"""Checkpoints: written and restored (`checkpointer`), sealed (`sealing`), verified (`manifest`), kept or removed (`retention`).

`last_intact` finds the checkpoint from which a run resumes.
"""
