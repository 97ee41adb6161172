"""The object in a sample worker's process: it samples responses in flight for a trainer, round by round. It does not know how calls reach it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from jaxtyping import PyTree, UInt32

from dapo_jax.dapo.rollouts import Prompt
from dapo_jax.parallel.weights import SamplerWeights, held_checksums
from dapo_jax.rollout.response_sampler import ResponseSampler
from dapo_jax.rollout.virtual_clock import ResponseId
from dapo_jax.sampling.decoding import decoding
from dapo_jax.sampling.requests import EpisodeLimits, Request
from dapo_jax.sampling.round_sampler import Drawn, RoundSampler

PROBE_TOKENS = 16
"""Number of tokens that trainer and workers sample to compare their results."""

_PROBE = Prompt(ordinal=0, text="", answer="", tokens=np.array([1, 2, 3], np.int32))


def id_of(request: Request) -> ResponseId:
    """Returns the name of a request's response."""
    return ResponseId(request.prompt.ordinal, request.index)


def probe(sampler: ResponseSampler, weights: SamplerWeights, temperature: float) -> Drawn:
    """Samples 16 tokens after a fixed prompt. Equal programs on equal devices return equal bits."""
    rounds = sampler.rounds(weights, decoding=decoding(temperature=temperature))
    [drawn] = rounds.draw([Request(_PROBE, 0, 0)], PROBE_TOKENS)
    rounds.close()
    return drawn


class SampleWorker:
    """Samples for one trainer. Its state is a function of the calls since `take` received a new version, so a new worker that gets the same calls replaces it."""

    def __init__(
        self,
        load: Callable[[], tuple[ResponseSampler, Mapping[str, str]]],
        *,
        temperature: float,
        limits: EpisodeLimits | None,
    ) -> None:
        """`load` builds the sampler and compiles its programs. It also returns facts about this process that the trainer compares with its own. With `limits`, responses
        are episodes."""
        self._load, self._temperature, self._limits = load, temperature, limits
        self._version = -1
        self._parts: dict[int, PyTree] = {}
        self._weights: SamplerWeights | None = None
        self._rounds: RoundSampler | None = None
        self._requests: dict[ResponseId, Request] = {}

    def prepare(self) -> Mapping[str, str]:
        """Loads the model and compiles the programs. Returns the facts."""
        self._sampler, facts = self._load()
        return facts

    def take(self, version: int, index: int, leaves: Sequence[np.ndarray]) -> None:
        """Receives one part of the weights of a version, as arrays. The first part of a version frees the weights and the cache of the last version."""
        if version != self._version:
            if self._rounds is not None:
                self._rounds.close()
            self._version, self._parts, self._requests = version, {}, {}
            self._rounds = self._weights = None
        self._parts[index] = self._sampler.transfer.placed(index, leaves)

    def begin(self, version: int, checksums: UInt32[np.ndarray, " parts"]) -> int:
        """Begins to sample with the version that `take` received, and returns it. Raises ValueError if parts are missing, or differ from the trainer's checksums."""
        if version == self._version and self._rounds is not None:
            return version
        expected = set(range(len(checksums)))
        if version != self._version or (missing := expected - self._parts.keys()):
            lacks = f"lacks the parts {sorted(missing)}" if version == self._version else self._other(version)
            raise ValueError(
                f"the weights of version {version} have not arrived whole: this sample worker {lacks}"
            )
        weights = self._sampler.transfer.whole([self._parts[index] for index in sorted(expected)])
        held = held_checksums(weights)
        if differ := np.flatnonzero(held != checksums).tolist():
            raise ValueError(
                f"the weights of version {version} have not arrived whole: the parts {differ} have the checksums {held[differ].tolist()} in this sample worker, "
                f"but {checksums[differ].tolist()} in the trainer"
            )
        options = decoding(temperature=self._temperature)
        self._weights, self._parts = weights, {}
        self._rounds = self._sampler.rounds(weights, decoding=options, limits=self._limits)
        return version

    def draw(
        self,
        version: int,
        number: int,
        new: Sequence[Request],
        over: Sequence[ResponseId],
        asked: Sequence[ResponseId],
        tokens: int,
    ) -> tuple[int, list[Drawn]]:
        """Samples round `number`: at most `tokens` tokens for each response in `asked`. Returns the number and the new tokens in the same order.

        `new` has the requests that this worker does not have, or that an environment has changed. `over` names the responses that do not continue here. Raises ValueError
        if the worker has other weights than `version`.
        """
        if version != self._version or self._rounds is None:
            raise ValueError(f"this sample worker {self._other(version)}")
        for response in over:
            if (request := self._requests.pop(response, None)) is not None:
                request.finish_reason = request.finish_reason or "stop"  # so that its pages are freed
        for request in (replace(each, record=each.record.copy()) for each in new):
            known = self._requests.get(id_of(request))
            if known is not None and request.turns and known.drawn == request.turns[-1].stop:
                kept = {name: getattr(known, name) for name in ("row", "order", "place")}
                vars(known).update(vars(replace(request, **kept)))  # the next turn continues from its pages
            else:
                self._requests[id_of(request)] = request
        return number, self._rounds.draw([self._requests[response] for response in asked], tokens)

    def probe(self) -> Drawn:
        """Samples the probe with the current weights (see `probe`)."""
        assert self._weights is not None
        return probe(self._sampler, self._weights, self._temperature)

    def _other(self, version: int) -> str:
        has = "has no whole weights" if self._version < 0 else f"has the weights of version {self._version}"
        return f"{has}, asked {version}"


def sent(request: Request) -> Request:
    """Returns a copy of a request for a worker, without the prompt's text, answer and row. The tokens that an environment appended are still to be fed, if the worker has
    the response's pages."""
    prompt = replace(request.prompt, text="", answer="", row={})
    return replace(request.rest(), prompt=prompt, fed=request.fed.copy())
