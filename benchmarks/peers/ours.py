"""Runs this library: the engine and the sampler for rollouts, `Updater` for updates, and both for a whole step."""

import time
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np

import dapo_jax
from benchmarks.limited_engine import LimitedEngine
from benchmarks.workload import Workload, reward_of
from dapo_jax.config import BatchConfig, ModelConfig
from dapo_jax.dapo.advantages import step_advantages
from dapo_jax.dapo.batching import example_weights, training_examples
from dapo_jax.dapo.losses import dapo_loss
from dapo_jax.dapo.rollouts import Group, Prompt, Response, Rollout, Verdict
from dapo_jax.dapo.tokens import Tokens
from dapo_jax.models.decoder import graph_of
from dapo_jax.models.folder import load_model
from dapo_jax.parallel.mesh import make_mesh
from dapo_jax.parallel.weights import WeightTransfer
from dapo_jax.run.training_pass import training_pass
from dapo_jax.sampling.continuous_batching import Sampler
from dapo_jax.sampling.decoding import decoding
from dapo_jax.sampling.engine import DecoderEngine
from dapo_jax.sampling.engine_spec import EngineSpec
from dapo_jax.training.optimizer import make_optimizer
from dapo_jax.training.row_packing import pack
from dapo_jax.training.state import init_state
from dapo_jax.training.update import UpdateOptions, Updater

NO_TOKEN = -1
"""An end token that is never sampled, so that every response reaches its length limit."""


class System:
    """A loaded model. Options: for_training, rows_per_microbatch, logprob_chunk_vocab, remat, attention, steps_per_call."""

    def __init__(self, workload: Workload) -> None:
        self.workload, options = workload, workload.options
        self.version = f"dapo_jax {getattr(dapo_jax, '__version__', 'working tree')}, jax {jax.__version__}"
        self.config, params = load_model(workload.model)
        self.mesh = make_mesh()
        self.transfer = WeightTransfer(params, self.mesh, dtype=workload.dtype)
        if options.get("for_training"):
            optimizer = make_optimizer()
            chosen = {name: options[name] for name in ("attention",) if name in options}
            model = ModelConfig(compute_dtype=workload.dtype, remat=options.get("remat", "none"), **chosen)
            row_tokens = workload.prompt_tokens + self._together * workload.new_tokens
            self.passed = training_pass(model, BatchConfig(), self.mesh, self.config, row_tokens=row_tokens)
            how = {"compute_dtype": workload.dtype, "remat": model.remat, "layout": self.passed.layout}
            chunk = options.get("logprob_chunk_vocab", 2048)
            self.updater = Updater(
                graph_of(self.config, **how),
                params,
                optimizer,
                self.mesh,
                objective=partial(dapo_loss, clip_ratio_low=0.2, clip_ratio_high=0.28),
                options=UpdateOptions(logprob_chunk_vocab=chunk),
            )
            self.state = init_state(params, optimizer, self.mesh)
            self._first_weight = np.asarray(self._weight())
        else:
            self.weights = self.transfer(params)
        engine: Any = self.engine()
        if workload.mixed:
            engine = LimitedEngine(
                engine, np.reshape(workload.lengths(), (workload.prompts, workload.samples))
            )
        self.sampler = Sampler(engine, prefill_prompts=workload.prompts)

    def engine(self) -> DecoderEngine:
        """The engine that samples rollouts, with one slot per response."""
        workload = self.workload
        return DecoderEngine(
            self.config,
            self.mesh,
            EngineSpec(
                slots=workload.sequences,
                capacity=workload.prompt_tokens + workload.new_tokens,
                steps_per_call=workload.options.get("steps_per_call", workload.new_tokens),
                stop_ids=(),
                compute_dtype=workload.dtype,
            ),
        )

    def rollout(self, seed: int) -> list[list[int]]:
        """Samples one round of responses at temperature 1, and returns them in the order of the prompts."""
        return [
            response.tokens.tolist() for _, group in self._sample(self.weights, seed) for response in group
        ]

    def greedy(self) -> list[list[int]]:
        """Returns the greedy response to each prompt."""
        groups = self._sample(self.weights, 0, temperature=0.0)
        return [group[0].tokens.tolist() for _, group in groups]

    def update(self) -> dict[str, float]:
        """Runs one update on synthetic responses."""
        return self._update(self._made_up_groups)

    def step(self, seed: int) -> dict[str, float]:
        """Runs a whole step: weight transfer to the sampler, rollouts, rewards and one update."""
        start = time.perf_counter()
        weights = self.transfer(self.state.params)
        groups = [_rewarded(prompt, responses) for prompt, responses in self._sample(weights, seed)]
        del weights
        sampled = time.perf_counter()
        parts = self._update(groups)
        return {**parts, "rollout_s": sampled - start}

    def moved(self) -> float:
        """Returns the mean absolute change of the first layer's query weight since the start."""
        return float(np.abs(np.asarray(self._weight()) - self._first_weight).mean())

    def card(self) -> str | None:
        """Returns the name of this machine's GPU in the library's table of chips, or None if there is no GPU."""
        from dapo_jax.plan.topologies import here

        found = here()
        return found.chip.name if found else None

    def peak_gib(self) -> float | None:
        """Returns the peak memory of the device in GiB, or None on a CPU."""
        stats = jax.devices()[0].memory_stats()
        return stats["peak_bytes_in_use"] / 2**30 if stats else None

    @property
    def _together(self) -> int:
        """Number of responses in a packed row, which share one prompt."""
        return min(8, self.workload.samples)

    def _weight(self) -> jax.Array:
        return self.state.params["blocks"]["query"][...][0]

    def _sample(
        self, weights: Any, seed: int, *, temperature: float = 1.0
    ) -> list[tuple[Prompt, tuple[Response, ...]]]:
        workload = self.workload
        waiting = _prompts(workload)

        def draw(count: int) -> list[Prompt]:
            taken, waiting[:] = waiting[:count], waiting[count:]
            return taken

        sampled = self.sampler.sample(
            weights,
            draw,
            key=jax.random.key(seed),
            decoding=decoding(temperature=temperature),
            samples_per_prompt=workload.samples,
            max_response_tokens=workload.new_tokens,
        )
        return sorted(sampled, key=lambda pair: pair[0].ordinal)

    @cached_property
    def _made_up_groups(self) -> list[Group]:
        responses = iter(self.workload.responses())
        return [
            _rewarded(
                prompt,
                [
                    Response(record=Tokens(np.array(next(responses), np.int32)), finish_reason="length")
                    for _ in range(self.workload.samples)
                ],
            )
            for prompt in _prompts(self.workload)
        ]

    def _update(self, groups: list[Group]) -> dict[str, float]:
        start, workload = time.perf_counter(), self.workload
        rows = training_examples(groups, step_advantages(groups))
        # A microbatch has as many responses as in the other systems.
        microbatches = pack(
            rows,
            example_weights(rows),
            row_tokens=self.passed.row_tokens,
            rows_per_microbatch=max(1, workload.options.get("rows_per_microbatch", 16) // self._together),
            **self.passed.packing,
        )
        [minibatch] = self.updater.prepare(self.state, [microbatches])
        self.state, _ = self.updater.update(self.state, minibatch, learning_rate=1e-6, first=True)
        jax.block_until_ready(self.state)
        return {"update_s": time.perf_counter() - start}


def _prompts(workload: Workload) -> list[Prompt]:
    return [
        Prompt(ordinal=ordinal, tokens=np.array(ids, np.int32), text="", answer="")
        for ordinal, ids in enumerate(workload.prompt_ids())
    ]


def _rewarded(prompt: Prompt, responses: Any) -> Group:
    rollouts = []
    for response in responses:
        reward = reward_of(response.tokens.tolist())
        rollouts.append(
            Rollout(response=response, text="", verdict=Verdict(correct=reward > 0), reward=reward)
        )
    return Group(prompt=prompt, rollouts=tuple(rollouts))
