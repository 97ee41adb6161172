"""Builds the sample workers of a run: the trainer's side, and the sampler in a worker's process."""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import jax

from dapo_jax.cluster.engine import Actor, Cluster, check_facts
from dapo_jax.cluster.remote_rounds import RemoteWorkers
from dapo_jax.cluster.sample_worker import SampleWorker
from dapo_jax.config import ConfigError, ParallelConfig, TrainConfig
from dapo_jax.health.stalls import Watch
from dapo_jax.models.presets import DecoderConfig
from dapo_jax.parallel import gpu_settings
from dapo_jax.parallel.mesh import Meshes
from dapo_jax.rollout.response_sampler import ResponseSampler
from dapo_jax.run.learner import Learner, load_learner
from dapo_jax.run.meshes import meshes_of
from dapo_jax.run.policy import Policy
from dapo_jax.run.records import use_compilation_cache
from dapo_jax.run.sampler_setup import response_sampler, rollout_spec
from dapo_jax.run.updater_setup import recorded_values
from dapo_jax.sampling.requests import EpisodeLimits

_PACKAGES = ("jax", "jaxlib", "numpy")
"""The packages that must have the same version in trainer and workers."""


@dataclass(frozen=True, kw_only=True)
class WorkerSetup:
    """The part of a training run that its sample workers need."""

    config: TrainConfig
    decoder: DecoderConfig
    """The trainer's decoder, whose vocabulary is padded for the trainer's mesh."""
    tensor: int
    """Number of devices over which a copy of the weights is sharded. It decides the shapes of the weights that the trainer sends."""
    samplers: int
    """Number of sample workers of all training processes."""
    limits: EpisodeLimits | None


def sample_worker(setup: WorkerSetup) -> SampleWorker:
    """Returns the object of a sample worker's process. `SampleWorker.prepare` loads the model."""
    load, temperature = partial(load_sampler, setup), setup.config.sampling.temperature
    return SampleWorker(load, temperature=temperature, limits=setup.limits)


def load_sampler(setup: WorkerSetup) -> tuple[ResponseSampler, dict[str, str]]:
    """Builds the sampler of a worker on all devices of its process, and compiles its programs. Also returns the facts about the worker (see `facts_of`)."""
    config = setup.config
    gpu_settings.apply()
    use_compilation_cache()
    meshes = meshes_of(ParallelConfig(sampler_tensor=setup.tensor))
    # The trainer sends all weights except the base under adapters.
    policy = load_learner(config, meshes, weights=config.lora.rank > 0).policy
    facts = facts_of(policy.files(weights=config.lora.rank > 0))
    if not config.lora.rank:
        policy = replace(policy, decoder=setup.decoder)
    sampler = worker_sampler(config, policy, meshes, samplers=setup.samplers)
    sampler.compile({"temperature": config.sampling.temperature})
    return sampler, facts


def worker_sampler(
    config: TrainConfig, policy: Policy, meshes: Meshes, *, samplers: int, memory: int | None = None
) -> ResponseSampler:
    """Builds the sampler of one of `samplers` sample workers. For `memory`, see `response_sampler`."""
    records = any(name == "routes" for name, *_ in recorded_values(config, policy.decoder))
    spec = rollout_spec(config, samplers=samplers, records_routes=records)
    if not config.sampling.batch_invariant:
        # A round of a lost worker's responses comes after a round of this worker's own, which then leave their slots. All other workers may be lost.
        in_flight = max(spec.engine.in_flight * config.cluster.samplers, spec.engine.slots + 1)
        spec = spec._replace(engine=replace(spec.engine, in_flight=in_flight))
    return response_sampler(policy, meshes, spec, seed=config.seed, memory=memory)


def facts_of(files: Mapping[str, str]) -> dict[str, str]:
    """Returns facts about this process: the digests of the model's `files`, and its devices."""
    devices = jax.local_devices()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    numbers = [device.local_hardware_id or 0 for device in devices]
    chips = [visible[number] if number < len(visible) and visible[number] else number for number in numbers]
    return {
        **{f"the model's {name}": digest for name, digest in files.items()},
        "platform": devices[0].platform,
        "device": devices[0].device_kind,
        "devices": str(len(devices)),
        "chips": f"{socket.gethostname()}: {', '.join(map(str, chips))}",
    }


def check_devices(
    own: Mapping[str, str], found: Mapping[str, str], resources: Mapping[str, int], who: str
) -> None:
    """Raises ConfigError if a worker does not have the devices of `cluster.resources`, or has devices of this process."""
    for name, count in resources.items():
        if name in ("GPU", "TPU") and (found["platform"], found["devices"]) != (name.lower(), str(count)):
            raise ConfigError(
                f"{who} has {found['devices']} x {found['platform']}, but cluster.resources={dict(resources)} gives it {count} x {name.lower()}: "
                "install jax for this platform on its node, or start the node with other resources"
            )
    host, _, numbers = own["chips"].partition(": ")
    there, _, others = found["chips"].partition(": ")
    shared = set(numbers.split(", ")) & set(others.split(", "))
    if own["platform"] == found["platform"] != "cpu" and host == there and shared:
        raise ConfigError(
            f"{who} has the devices {found['chips']}, but this process trains on {own['chips']}: start Ray on this machine without them, with --num-gpus=0 and with a TPU count of 0 in --resources"
        )


def remote_workers(
    config: TrainConfig,
    learner: Learner,
    sampler: ResponseSampler,
    cluster: Cluster,
    *,
    limits: EpisodeLimits | None,
    watch: Watch,
) -> RemoteWorkers:
    """Starts the sample workers of this process, each on `cluster.resources`. Raises ConfigError or ValueError if a worker differs from this process."""
    resources, count = config.cluster.resources, config.cluster.samplers
    setup = WorkerSetup(
        config=config,
        decoder=learner.policy.decoder,
        tensor=learner.meshes.sampler.shape["tensor"],
        samplers=count * learner.meshes.count,
        limits=limits,
    )
    own = facts_of(learner.policy.files(weights=config.lora.rank > 0))
    compared = {name: value for name, value in own.items() if name not in ("devices", "chips")}
    if not config.sampling.batch_invariant:
        compared = {name: value for name, value in compared.items() if name not in ("platform", "device")}

    def start(index: int) -> Actor:
        actor = cluster.start(
            "dapo_jax.run.sample_workers:sample_worker", setup, resources=resources, packages=_PACKAGES
        )
        found = actor.call("prepare").result()
        check_facts(compared, found, actor.name)
        check_devices(own, found, resources, actor.name)
        return actor

    return RemoteWorkers(
        cluster,
        start,
        count=count,
        sampler=sampler,
        temperature=config.sampling.temperature,
        in_flight=-(-config.rollout.in_flight // learner.meshes.count),
        round_s=config.cluster.round_s,
        replace_s=config.stall_timeout_s,
        watch=watch,
        batch_invariant=config.sampling.batch_invariant,
    )
