"""Supervised warm start (SFT) from a configuration."""

import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from dapo_jax.config import ConfigError, SftConfig, load_config, to_yaml
from dapo_jax.dapo.batching import Example, example_weights
from dapo_jax.dapo.losses import supervised_loss
from dapo_jax.dapo.metrics import to_scalars
from dapo_jax.dapo.microbatch import Microbatch
from dapo_jax.data.prompts import PairSource
from dapo_jax.evaluation import summarize
from dapo_jax.health.stalls import interrupt
from dapo_jax.parallel.device_memory import bytes_on_device
from dapo_jax.run.end_of_step import evaluates_after
from dapo_jax.run.grader_setup import check_graders, grading
from dapo_jax.run.meshes import mesh_of, meshes_of
from dapo_jax.run.policy import Policy, check_trains, load_policy
from dapo_jax.run.prompt_sets import dated, held_out_prompts, training_prompts
from dapo_jax.run.records import use_compilation_cache
from dapo_jax.run.run_dir import locked, place_of
from dapo_jax.run.sampler_programs import sharing
from dapo_jax.run.sampler_setup import response_sampler
from dapo_jax.run.sources import lora_of
from dapo_jax.run.training_pass import TrainingPass, training_pass
from dapo_jax.run.updater_setup import optimizer_of
from dapo_jax.storage import AnyPath, write_whole
from dapo_jax.storage.locks import Lock
from dapo_jax.trackers import JsonlTracker
from dapo_jax.trackers.progress import Progress
from dapo_jax.training.optimizer import warmed_up
from dapo_jax.training.row_packing import pack
from dapo_jax.training.state import state_structs
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
    config = replace(config, data=dated(config.data))
    run_dir = place_of(config.run_dir, key="run_dir", write=True)
    with locked(run_dir, value=config.run_dir, key="run_dir", lost=interrupt) as lock:
        return _trained(config, run_dir, lock, progress)


def _trained(config: SftConfig, run_dir: AnyPath, lock: Lock, progress: Progress | None) -> SftResult:
    if (run_dir / "config.yaml").exists():
        raise ConfigError(f"run_dir={config.run_dir} already contains a run; choose another run_dir")
    mesh = mesh_of(config.parallel, rows_per_microbatch=config.batch.rows_per_microbatch)
    meshes = meshes_of(config.parallel, mesh)
    # Errors in the grader and the data are raised before the weights load, which takes longer.
    checked, tokenizer = check_graders(config.reward), load_policy(config.model, weights=False).tokenizer
    prompts, _ = training_prompts(config.data, tokenizer, seed=config.seed)
    held_out = held_out_prompts(config.data, config.eval, tokenizer)
    shares = sharing(meshes, config.sampling, dtype=config.model.compute_dtype)
    policy = load_policy(
        config.model,
        lora=lora_of(config.lora),
        seed=config.seed,
        mesh=mesh,
        shares=shares,
        longest=config.data.max_prompt_tokens + config.max_response_tokens,
    )
    check_trains(policy, config.lora, config.model.source)
    how = training_pass(config.model, config.batch, mesh, policy.decoder, row_tokens=config.row_tokens)
    optimizer = optimizer_of(config.optimizer)
    longest = config.max_response_tokens
    pairs = PairSource(prompts, policy.tokenizer, seed=config.seed, max_response_tokens=longest)
    graders = grading(config.reward, policy, stop=config.sampling.stop, graders=checked)
    state = state_structs(policy.params, optimizer, mesh, offload=config.optimizer.offload)
    sampler = response_sampler(
        policy,
        meshes,
        config.sampling,
        seed=config.seed,
        max_prompt_tokens=config.data.max_prompt_tokens,
        compute_dtype=config.model.compute_dtype,
        group_size=config.eval.samples_per_prompt,
        resident=bytes_on_device((state, policy.unshared), mesh.shape),
    )
    updater = Updater(
        policy.graph(compute_dtype=config.model.compute_dtype, remat=config.model.remat, layout=how.layout),
        policy.params,
        optimizer,
        mesh,
        objective=supervised_loss,
        options=UpdateOptions(old_logprobs="sampler", offload=config.optimizer.offload),
        frozen=policy.frozen,
    )
    state = policy.initial_state(config, optimizer, mesh, copy=False)
    write_whole(run_dir / "config.yaml", to_yaml(config).encode())
    metrics: dict[str, float] = {}
    with ExitStack() as stack:
        stack.callback(graders.close)
        shown = stack.enter_context(progress or Progress(config.steps))
        for message in filter(None, (how.note, policy.decoder.length_note, lock.note)):
            shown.message(message)
        tracker = JsonlTracker(run_dir / "metrics.jsonl")
        stack.callback(tracker.close)
        for step in range(1, config.steps + 1):
            began = time.perf_counter()
            [minibatch] = updater.prepare(state, [_minibatch(config, policy, how, pairs, step)])
            warmup = config.optimizer.warmup_steps
            rate = warmed_up(config.optimizer.learning_rate, step=step, warmup_steps=warmup)
            state, measured = updater.update(state, minibatch, learning_rate=rate, first=False)
            scalars = to_scalars(measured)
            scalars |= {"update/learning_rate": rate, "time/step_s": time.perf_counter() - began}
            # Nothing was sampled, so sampling metrics would be meaningless.
            metrics = {key: value for key, value in scalars.items() if not key.startswith("sync/")}
            shown.step(step, metrics)
            if evaluates_after(config, step):
                weights = sampler.transfer(state.params)
                for name, asked in held_out.items():
                    place = {"name": name, "step": step}
                    groups = sampler.evaluate(weights, asked, graders.groups, config.eval, **place)
                    metrics |= summarize(groups, name=name)
                    shown.evaluation(name, metrics, step)
                del weights  # frees the sampler's copy before the next update
            lock.check()
            tracker.log(step, metrics)
    trained = replace(policy, params=state.params)
    lock.check()
    trained.save(run_dir / "model")
    write_whole(run_dir / "model" / "sft.yaml", to_yaml(config).encode())
    return SftResult(policy=trained, metrics=metrics)


def _minibatch(
    config: SftConfig, policy: Policy, how: TrainingPass, pairs: PairSource, step: int
) -> list[Microbatch]:
    """Packs the prompt / response pairs of step `step` (counted from 1) into the microbatches of one update."""
    size = config.batch.pairs_per_step
    examples: list[Example] = []
    for place in range((step - 1) * size, step * size):
        prompt, response = pairs[place]
        blank = (0.0 * response).astype("float32")
        examples.append(Example(prompt_tokens=prompt, response_tokens=response, logprobs=blank))
    return pack(
        examples,
        example_weights(examples),
        row_tokens=how.row_tokens,
        **how.packing,
        rows_per_microbatch=config.batch.rows_per_microbatch,
        pad_id=policy.tokenizer.pad_id,
    )
