"""Checkpoints: written and restored (`checkpointer`), sealed (`sealing`), verified (`manifest`), kept or removed (`retention`).

`packed_groups` packs groups of rollouts into arrays, and `last_intact` finds the checkpoint from which a run resumes.
"""
