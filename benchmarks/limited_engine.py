"""An engine whose responses have lengths that are fixed in advance."""

from dataclasses import replace
from typing import Any

import numpy as np

from dapo_jax.sampling.engine import DecoderEngine
from dapo_jax.sampling.interface import Insertion


class LimitedEngine:
    """An engine whose responses have the lengths in a table. It counts its decode steps, active slots and re-prefilled responses."""

    def __init__(self, engine: DecoderEngine, lengths: np.ndarray) -> None:
        self._engine, self._lengths = engine, lengths
        self._waiting, self.again = lengths.size, 0
        self.steps, self.live_slot_steps = 0, 0
        self.busy_steps, self.busy_live_slot_steps = 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def insert(self, prefix: Any, state: Any, insertion: Insertion, key: Any) -> Any:
        """Inserts prompts with the limits in the table instead of the sampler's single limit."""
        limits = self._lengths[insertion.ordinals, insertion.indices].astype(np.int32)
        self.again += int((insertion.drawn > 0).sum())
        self._waiting -= int((insertion.drawn == 0).sum())
        return self._engine.insert(prefix, state, replace(insertion, limits=limits), key)

    def generate(self, *arguments: Any, **named: Any) -> Any:
        """Decodes, and counts steps and active slots. The `busy` counts include only steps while responses wait for a slot."""
        state, result = self._engine.generate(*arguments, **named)
        valid = np.asarray(result.valid)
        steps, live = int(valid.any(axis=0).sum()), int(valid.sum())
        self.steps, self.live_slot_steps = self.steps + steps, self.live_slot_steps + live
        if self._waiting:
            self.busy_steps += steps
            self.busy_live_slot_steps += live
        return state, result
