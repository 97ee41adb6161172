"""Checks the configured resources: mesh, model, memory, disk space, run folder and metrics services."""

from dataclasses import replace
from pathlib import Path

import jax

from dapo_jax.checkpoints.checkpointer import Checkpointer
from dapo_jax.cluster.engine import check_address
from dapo_jax.config import ConfigError, ParallelConfig
from dapo_jax.config.keys import prefixed
from dapo_jax.doctor.check import Found
from dapo_jax.doctor.machine import host_bytes
from dapo_jax.doctor.subject import Subject
from dapo_jax.models.folder import NOT_LOADED
from dapo_jax.parallel.mesh import Absent
from dapo_jax.plan.memory import MARGIN, together
from dapo_jax.plan.remedies import ways_to_shrink
from dapo_jax.plan.split import own_rounds
from dapo_jax.plan.topologies import present_bytes
from dapo_jax.plan.workload import Assumptions
from dapo_jax.run.disk_space import bytes_to_write, gib, room_for
from dapo_jax.run.meshes import meshes_of
from dapo_jax.run.run_dir import check_run_dir, checked_folder
from dapo_jax.run.sampler_setup import rollout_spec
from dapo_jax.run.sources import with_adapters
from dapo_jax.storage import in_bucket
from dapo_jax.storage.locks import LockedError, check_free
from dapo_jax.trackers import check_trackers, tracker_classes

CROWDED = 0.8
"""Fraction of memory above which the memory check warns, because it does not count activations."""


def mesh(subject: Subject) -> Found:
    """Checks that the configured trainer and sampler meshes fit the devices."""
    parallel = subject.config.parallel
    meshes = meshes_of(parallel, rows_per_microbatch=subject.config.batch.rows_per_microbatch)
    trainer, sampler = (
        " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1) or "1 device"
        for mesh in (meshes.train, meshes.sampler)
    )
    return Found(f"trains on {trainer}, samples on {sampler}")


def model(subject: Subject) -> Found:
    """Checks that the model exists, without loading its weights."""
    decoder, tokenizer, folder, size, skipped = subject.described
    weights = "random weights" if folder is None else f"{gib(size)} of weights"
    config, vocabulary = subject.config, tokenizer.vocab_size
    note = decoder.for_length(config.sequence_tokens).length_note
    notes = filter(None, (f"{skipped} {NOT_LOADED}" if skipped else "", note))
    size_note = f"{config.model.source}: {decoder.size_note}, {weights}, {vocabulary:,} tokens"
    return Found("; ".join((size_note, *notes)))


def memory(subject: Subject) -> Found:
    """Checks that all arrays that must be in memory at the same time, except activations, fit in a device's memory."""
    planned = subject.planned
    resident, pages, updates = planned.resident, planned.pages, planned.work.updates
    cache = resident.decode_state
    if pages.runs_out and not subject.config.sampling.cache_tokens:
        # The KV cache is sized to fit the memory, so only its minimum is counted: one full sequence per pool.
        least = replace(pages, pool_pages=pages.holder_pages())
        cache -= (pages.bytes(planned.token_bytes) - least.bytes(planned.token_bytes)) // pages.pools
    # The gradient is as large as the parameters, because both are float32.
    resident = replace(resident, decode_state=cache, gradient=resident.state - resident.moments)
    phases = (together(program, resident, updates=updates)[1] for program in ("generate", "update_apply"))
    largest = max(phases, key=lambda arrays: sum(arrays.values()))
    needed, available = sum(largest.values()), present_bytes()
    if available is None:
        needed *= jax.local_device_count()
        limit, whose = host_bytes()[1], "available in the host's memory"
    else:
        limit, whose = int(available * (1 - MARGIN)), "on a device"
    listed = " + ".join(f"{name} {gib(size)}" for name, size in largest.items() if size)
    message = f"needs at least {gib(needed)} of {gib(limit)} {whose}: {listed}"
    if needed <= CROWDED * limit:
        return Found(message)
    part, size = max(largest.items(), key=lambda array: array[1])
    ways = [way.change for way in ways_to_shrink(planned, part, size, needed - limit)]
    if available is None:  # the host's memory is the device's, and more devices share it
        ways = [way for way in ways if "optimizer.offload" not in way and "twice as many" not in way]
    if part == "decode state":
        ways.append("a lower sampling.max_response_tokens")
    smaller = "a smaller model" + " or lora.rank" * (part == "train state" and not subject.config.lora.rank)
    changes = f"shrink the largest part, the {part}: {' or '.join(ways) or smaller}"
    if needed <= limit:
        return Found(message, "warning", f"activations need additional memory: {changes}")
    return Found(message, "failed", f"{changes}; `dapo-jax plan` finds changes that fit by compiling the run")


def cluster(subject: Subject) -> Found:
    """Checks without a connection whether the run can use its cluster: ray, the token, and the devices and rounds of its sample workers."""
    config, platform = subject.config, jax.default_backend()
    address, samplers, resources = config.cluster.address, config.cluster.samplers, config.cluster.resources
    if not address:
        return Found("no cluster")
    with prefixed(""):
        check_address(address)
    if not samplers:
        return Found("ray is installed")
    kind = next((name for name in ("TPU", "GPU") if name in resources), "CPU")
    devices = [Absent(at, 0, kind.lower(), kind) for at in range(resources.get(kind, 1))]
    parallel = ParallelConfig(sampler_tensor=subject.planned.sizes.sampler["tensor"])
    with prefixed(f"a sample worker with cluster.resources={dict(resources)}"):
        mesh = meshes_of(parallel, devices=devices if kind != "CPU" else devices[:1]).sampler
        rollout_spec(config, samplers=samplers).engine.check(subject.planned.decoder, mesh)
    further, rounds = config.rollout.weight_rounds, own_rounds(config, Assumptions(), 0)
    message = (
        f"{samplers} sample workers on {mesh.size} x {kind} each; rollout.weight_rounds={further}, and a step needs about {rounds:.1f} rounds, "
        "if all responses have the maximum length and half of the groups are informative"
    )
    here, refused, remedy = platform.upper(), kind.lower() != platform and config.sampling.batch_invariant, ""
    if refused or (kind == "CPU" and here != "CPU"):
        equal = ", and with sampling.batch_invariant=true, these must be of the same kind" * refused
        remedy = f"set cluster.resources to the devices of a sample worker, for example {{TPU: 4}}: this process has a {here}{equal}"
    elif further > rounds:
        remedy = f"set rollout.weight_rounds to {int(rounds)} or less: a step waits for all of them"
    return Found(message, ("failed" if refused else "warning") if remedy else "ok", remedy)


def disk(subject: Subject) -> Found:
    """Checks that the disks have room for the files that a run writes."""
    try:
        parameters = with_adapters(subject.described[0], subject.config.lora).trained_parameters
    except ConfigError:  # the `model` check reports this error
        parameters = 0
    return Found(*room_for(bytes_to_write(subject.config, parameters)))


def run_dir(subject: Subject) -> Found:
    """Checks that the run's folder is writable and not in use, and that it is empty or belongs to this run."""
    config = subject.config
    folder = checked_folder(config.run_dir, key="run_dir", write=True)
    if not in_bucket(folder):
        try:
            check_free(Path(folder))
        except LockedError as error:
            remedy = "wait until that run has ended, or set another run_dir"
            return Found(f"{config.run_dir}: {error}", "failed", remedy)
    if not (folder / "config.yaml").exists():
        check_run_dir(folder, config, resume=False)
        return Found(f"{config.run_dir} is available")
    try:
        check_run_dir(folder, config, resume=True)
    except ConfigError as error:
        return Found(str(error), "failed", "choose another run_dir, or undo the change")
    with Checkpointer(folder / "checkpoints") as checkpointer:
        step = checkpointer.latest_step()
    message = f"{config.run_dir} contains this run"
    if step is not None and step >= config.steps:
        remedy = "raise steps and start with --resume, or choose another run_dir"
        return Found(f"{message}, complete at step {step}", "warning", remedy)
    state = "without a checkpoint" if step is None else f"with a checkpoint at step {step}"
    return Found(f"{message} {state}", "warning", "start it with --resume, or choose another run_dir")


def metrics(subject: Subject) -> Found:
    """Checks that metrics can be sent to the configured services."""
    config = subject.config
    check_trackers(config.log, config.run_dir)
    classes = tracker_classes(config.log).items()
    also = [getattr(tracker, "described", lambda name=name: name)() for name, tracker in classes]
    return Found(", ".join(["metrics.jsonl", *also]))
