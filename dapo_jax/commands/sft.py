"""Supervised warm start (SFT) from a configuration."""

import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from dapo_jax.config import ConfigError, SftConfig, evaluation_of, load_config, to_yaml
from dapo_jax.config.keys import prefixed
from dapo_jax.dapo.batching import Example, example_weights
from dapo_jax.dapo.losses import supervised_loss
from dapo_jax.dapo.metrics import to_scalars
from dapo_jax.dapo.microbatch import Microbatch
from dapo_jax.dapo.tokens import Tokens
from dapo_jax.data.prompts import PairSource
from dapo_jax.evaluation import lost_verdicts, summarize
from dapo_jax.health.stalls import interrupt
from dapo_jax.run.disk_space import EXPORT_BYTES, check_room
from dapo_jax.run.end_of_step import evaluates_after
from dapo_jax.run.grader_setup import check_graders, grading
from dapo_jax.run.learner import load_learner
from dapo_jax.run.meshes import meshes_of
from dapo_jax.run.policy import Policy
from dapo_jax.run.prompt_sets import prompt_sets, with_template_date
from dapo_jax.run.records import use_compilation_cache
from dapo_jax.run.run_dir import checked_folder, locked
from dapo_jax.run.sampler_setup import evaluation_spec
from dapo_jax.run.sources import tokenizer_of
from dapo_jax.storage import AnyPath, write_whole
from dapo_jax.storage.locks import Lock
from dapo_jax.trackers import JsonlTracker
from dapo_jax.trackers.progress import Progress
from dapo_jax.training.row_packing import pack
from dapo_jax.training.state import TrainState
from dapo_jax.training.update import UpdateOptions, Updater


@dataclass(frozen=True, kw_only=True)
class SftResult:
    """The trained policy and the last metrics, returned by `sft`."""

    policy: Policy
    metrics: dict[str, float]
    """Metrics of the last step, including the evaluation after it."""


def sft(config: SftConfig | str | Path, *, progress: Progress | None = None) -> SftResult:
    """Trains a model on prompt / response pairs and writes it to `run_dir/model`.

    The loss is the negative log-likelihood of the responses, including the end token, averaged over all response tokens.

    Raises:
        ConfigError: the configuration cannot be run, or another process is training in the same folder. Training has not started.
        LockLostError: another run has taken over the folder in a bucket, because this run did not renew its lease in time.
    """
    config = config if isinstance(config, SftConfig) else load_config(config, schema=SftConfig)
    use_compilation_cache()
    config = replace(config, data=with_template_date(config.data))
    run_dir = checked_folder(config.run_dir, key="run_dir", write=True)
    with locked(run_dir, value=config.run_dir, key="run_dir", lost=interrupt) as lock:
        if (run_dir / "config.yaml").exists():
            raise ConfigError(f"run_dir={config.run_dir} already contains a run; choose another run_dir")
        warm_start = _WarmStart(config)
        state = warm_start.learner.initial_state(copy=False)
        write_whole(run_dir / "config.yaml", to_yaml(config).encode())
        state, metrics = warm_start.train(state, run_dir, lock, progress or Progress(config.steps))
        trained = replace(warm_start.learner.policy, params=state.params)
        lock.check()
        try:
            trained.save(run_dir / "model")
            write_whole(run_dir / "model" / "sft.yaml", to_yaml(config).encode())
        except OSError as error:
            error.add_note(f"the model is not complete; remove run_dir={config.run_dir}, and train again")
            raise
        return SftResult(policy=trained, metrics=metrics)


class _WarmStart:
    """The policy, pairs, graders, sampler and updater of a warm start."""

    def __init__(self, config: SftConfig) -> None:
        """Loads the data and the model, and starts the graders. Raises ConfigError for an invalid configuration, or an invalid pair in any step."""
        self._config = config
        meshes = meshes_of(config.parallel, rows_per_microbatch=config.batch.rows_per_microbatch)
        # Errors in the keys, the grader and the data are raised before the weights load, which takes longer.
        spec = evaluation_spec(evaluation_of(config))
        graders, tokenizer = check_graders(config.reward, config.sandbox), tokenizer_of(config.model)
        prompts = prompt_sets(config, tokenizer)
        self._prompts, most = prompts, config.max_response_tokens
        self._pairs = PairSource(prompts.training, tokenizer, seed=config.seed, max_response_tokens=most)
        with prefixed("data"):
            for index in range(config.steps * config.batch.pairs_per_step):
                self._pairs[index]  # an invalid pair in a later step would end the run without a model
        self.learner = learner = load_learner(config, meshes)
        policy, layout = learner.policy, learner.training_pass.layout
        size = EXPORT_BYTES * policy.decoder.trained_parameters
        self._little_room = check_room({"run_dir": (config.run_dir, size)})
        self._graders = grading(config, policy, graders=graders)
        self._sampler = learner.sampler(spec)
        self._updater = Updater(
            policy.graph(compute_dtype=config.model.compute_dtype, remat=config.model.remat, layout=layout),
            policy.params,
            learner.optimizer,
            meshes.train,
            objective=supervised_loss,
            options=UpdateOptions(old_logprobs="sampler", offload=config.optimizer.offload),
            frozen=policy.frozen,
        )

    def train(
        self, state: TrainState, run_dir: AnyPath, lock: Lock, shown: Progress
    ) -> tuple[TrainState, dict[str, float]]:
        """Runs all steps, and logs their metrics. Returns the last state and the metrics of the last step."""
        config, learner, metrics = self._config, self.learner, dict[str, float]()
        with ExitStack() as stack:
            stack.callback(self._graders.close)
            stack.enter_context(shown)
            notes = (
                learner.training_pass.note,
                learner.policy.decoder.length_note,
                lock.note,
                self._little_room,
            )
            for message in filter(None, (*self._prompts.notes, *notes)):
                shown.message(message)
            tracker = JsonlTracker(run_dir / "metrics.jsonl")
            stack.callback(tracker.close)
            for step in range(1, config.steps + 1):
                state, metrics = self._update(state, step)
                shown.step(step, metrics)
                if evaluates_after(config, step):
                    metrics |= self._evaluate(state, step, shown)
                lock.check()
                tracker.log(step, metrics)
        return state, metrics

    def _update(self, state: TrainState, step: int) -> tuple[TrainState, dict[str, float]]:
        """Runs the update of a step, and returns the new state and its metrics."""
        began, rate = time.perf_counter(), self.learner.learning_rate(step)
        [minibatch] = self._updater.prepare(state, [self._minibatch(step)])
        state, measured = self._updater.update(state, minibatch, learning_rate=rate, first=False)
        scalars = to_scalars(measured)
        scalars |= {"update/learning_rate": rate, "time/step_s": time.perf_counter() - began}
        # Nothing was sampled, so sampling metrics would be meaningless.
        return state, {key: value for key, value in scalars.items() if not key.startswith("sync/")}

    def _evaluate(self, state: TrainState, step: int, shown: Progress) -> dict[str, float]:
        """Evaluates the policy on all datasets, and returns the scores. The sampler's weights are freed before the next update."""
        scores, weights = dict[str, float](), self._sampler.transfer(state.params)
        for name, prompts in self._prompts.held_out.items():
            grade, options = self._graders.groups, self._config.eval
            groups = self._sampler.evaluate(weights, prompts, grade, options, name=name, step=step)
            scores |= summarize(groups, name=name)
            shown.evaluation(name, scores, step)
            if lost := lost_verdicts(groups):
                shown.message(f"eval  {name}  {lost}")
        return scores

    def _minibatch(self, step: int) -> list[Microbatch]:
        """Packs the prompt / response pairs of step `step` (counted from 1) into the microbatches of one update."""
        batch, training_pass = self._config.batch, self.learner.training_pass
        examples: list[Example] = []
        for index in range((step - 1) * batch.pairs_per_step, step * batch.pairs_per_step):
            prompt, response = self._pairs[index]
            examples.append(Example(prompt=Tokens(prompt), response=Tokens(response)))
        return pack(
            examples,
            example_weights(examples),
            row_tokens=training_pass.row_tokens,
            **training_pass.packing,
            rows_per_microbatch=batch.rows_per_microbatch,
            pad_id=self.learner.policy.tokenizer.pad_id,
        )
