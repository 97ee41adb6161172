"""Checkpoints: written and restored (`checkpointer`), verified (`manifest`), kept or removed (`retention`).

`groups` packs groups of rollouts into arrays, and `last` finds the checkpoint that a run goes on from.
"""
