"""Checkpoints: `checkpointer` saves, restores and retains them, and `manifest` describes and verifies their files."""
