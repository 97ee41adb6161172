"""Doubles of the device programs: an engine that follows a script and updates that change nothing. Both keep their arguments."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np

from dapo_jax.dapo.metrics import Mean
from dapo_jax.testing import ScriptedEngine
from dapo_jax.text.tokenizers import CharTokenizer
from dapo_jax.training.minibatch import Stack
from dapo_jax.training.update import Updater

ALPHABET = "0123456789+=:,?"
RESPONSES = ("=2", "=3", "1+1=2", "1" * 64)
"""The responses to every prompt: correct, wrong, correct at full length, and cut off. At a limit of 6 they have 3, 3, 6 and 6 tokens,
end token included."""


def script(end):
    """The tokens of each response. The last of `RESPONSES` has no end token."""
    tokens = [CharTokenizer(ALPHABET).encode(text).tolist() for text in RESPONSES]
    return lambda ordinal, index: tokens[index % 4] + [end] * (index % 4 != 3)


class Engine(ScriptedEngine):
    """Has the signature of `DecoderEngine`."""

    def __init__(self, decoder, mesh, spec):
        holders = max(spec.slots, spec.in_flight)
        sizes = spec.page_sizes(decoder, mesh, holders=holders, call_tokens=spec.steps_per_call)
        super().__init__(
            script(end=spec.stop_ids[0]), slots=spec.slots, capacity=spec.capacity, steps_per_call=spec.steps_per_call, stop_ids=spec.stop_ids,
            page_sizes=sizes,
        )  # fmt: skip
        self.decoder, self.mesh, self.prefill_shape = decoder, mesh, spec.prefill
        for name in (
            "compute_dtype",
            "cache_dtype",
            "batch_invariant",
            "has_turns",
            "records_routes",
            "heads",
        ):
            setattr(self, name, getattr(spec, name))
        self.hows, self.keys, self.limits = [], [], set()

    def programs(self, params, decoding):
        return {}

    def insert(self, prefix, state, insertion, key):
        self.keys.append(jax.random.key_data(key).tolist())
        self.limits |= set(insertion.limits.tolist())
        return super().insert(prefix, state, insertion, key)

    def generate(self, params, state, how, min_live, tables, until=None):
        self.hows.append(how)
        return super().generate(params, state, how, min_live, tables, until)


class Updates(Updater):
    """Has the signature of `Updater`. The metrics of an update are `measured`."""

    measured = {}  # noqa: RUF012 - one for all, set by a test

    def __init__(
        self, graph, params, optimizer, mesh, *, objective, options, reference=None, frozen=None, teacher=None
    ):
        self.teacher = teacher
        self.graph, self.params, self.optimizer, self.mesh = graph, params, optimizer, mesh
        self.objective, self.options, self.reference, self.frozen = objective, options, reference, frozen
        self.minibatches, self.rates = [], []

    def prepare(self, state, minibatches):
        return [
            tuple(
                Stack(jax.tree.map(lambda a: jnp.asarray(a[None]), each), np.int32(1)) for each in minibatch
            )
            for minibatch in minibatches
        ]

    def update(self, state, minibatch, *, learning_rate, first):
        self.minibatches.append(minibatch)
        self.rates.append(learning_rate)
        return state, {"update/loss": mean(0.0), **self.measured}

    def scores(self, params):
        return lambda stack: stack.microbatches.old_logprobs

    def ratios(self, state, minibatch, *, first):
        return [np.ones_like(stack.microbatches.old_logprobs) for stack in minibatch]


def mean(value):
    return Mean(np.float32(value), np.float32(1.0))


class Tracker:
    """A tracker without its package."""

    def __init__(self, *arguments, **options):
        pass

    def log(self, step, metrics):
        pass

    def close(self):
        pass


def noting(patch, cls, received, *, instead=None):
    """Notes the arguments of a class in `received` whenever it, or `instead`, is made."""
    make = (instead or cls).__init__
    signature = inspect.signature(cls.__init__)

    def noted(self, *arguments, **options):
        bound = signature.bind(self, *arguments, **options)
        bound.apply_defaults()
        received[cls.__name__] = bound.arguments
        make(self, *arguments, **options)

    noted.__signature__ = signature
    patch.setattr(instead or cls, "__init__", noted)


def once(make):
    """The same function with a cache by arguments."""
    found = {}

    def again(*arguments, **options):
        asked = repr([_named(each) for each in (*arguments, *sorted(options.items()))])
        if asked not in found:
            found[asked] = make(*arguments, **options)
        return found[asked]

    return again


def _named(argument):
    """Replaces arrays by their dtype and shape, for a short text."""
    return jax.tree.map(
        lambda leaf: f"{leaf.dtype}{leaf.shape}" if hasattr(leaf, "dtype") else leaf, argument
    )
