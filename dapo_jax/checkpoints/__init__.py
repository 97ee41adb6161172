"""Checkpoints: written, restored and kept (`checkpointer`), described and verified (`manifest`)."""
