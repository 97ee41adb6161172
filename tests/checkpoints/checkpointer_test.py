"""Checkpoints are restored bit for bit, on any mesh, or the error names the reason."""

import asyncio
import errno
import logging
import signal
import threading

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from dapo_jax.checkpoints import checkpointer as module
from dapo_jax.checkpoints import manifest
from dapo_jax.checkpoints.checkpointer import Checkpointer
from dapo_jax.checkpoints.manifest import CheckpointError

PROGRESS = {"step": 3, "next_ordinal": 96, "seed": 7, "tracker": {"wandb": None}, "ratio": 0.1}
ROWS, COLUMNS = 16, 8


class Model(nnx.Module):
    """Two parameters and a list: every kind of path a real model has."""

    def __init__(self, rows: int = ROWS) -> None:
        self.embed = nnx.Param(jnp.zeros((rows, COLUMNS), jnp.float32))
        self.layers = nnx.List([nnx.Param(jnp.zeros((COLUMNS,), jnp.float32)) for _ in range(2)])


def random_bits(leaf, seed):
    """Any bit pattern, subnormals and NaNs included, for a test that must notice one flipped bit."""
    if leaf.dtype == jnp.int32:
        return jnp.asarray(seed + 41, jnp.int32)
    raw = np.random.default_rng(seed).integers(0, 2**32, leaf.shape, dtype=np.uint32)
    return jnp.asarray(raw.view(np.float32))


def train_state(*, filled=True, rows=ROWS):
    params = nnx.state(Model(rows))
    tree = {"params": params, "opt_state": optax.adamw(1e-3).init(params)}
    if not filled:
        return tree
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, [random_bits(leaf, seed) for seed, leaf in enumerate(leaves)])


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def on_mesh(tree, spec):
    """Matrices by `spec`, all else on every device."""
    axes = (AxisType.Auto, AxisType.Auto)
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("fsdp", "tensor"), axis_types=axes)
    return jax.tree.map(
        lambda leaf: jax.device_put(leaf, NamedSharding(mesh, spec if leaf.ndim == 2 else PartitionSpec())),
        tree,
    )


def saved(folder, state, step=3, carry=None):
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(step, state, PROGRESS | {"step": step}, carry or {})


def test_state_progress_and_step_come_back_as_saved(tmp_path):
    state = train_state()
    saved(tmp_path, state)
    with Checkpointer(tmp_path) as checkpointer:
        restored = checkpointer.restore(train_state(filled=False))
    assert restored.step == 3
    assert restored.progress == PROGRESS
    assert restored.carry == {}
    assert jax.tree.structure(restored.state) == jax.tree.structure(state)
    assert isinstance(restored.state["params"], nnx.State)
    assert bits(restored.state) == bits(state)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, PartitionSpec("fsdp", "tensor")),
        (PartitionSpec("fsdp", "tensor"), PartitionSpec("tensor", None)),
        (PartitionSpec(None, "fsdp"), None),
    ],
)
def test_restores_onto_another_sharding_than_was_saved(tmp_path, before, after):
    state = train_state()
    saved(tmp_path, state if before is None else on_mesh(state, before))
    target = train_state(filled=False)
    target = target if after is None else on_mesh(target, after)
    with Checkpointer(tmp_path) as checkpointer:
        restored = checkpointer.restore(target).state
    assert bits(restored) == bits(state)
    for leaf, wanted in zip(jax.tree.leaves(restored), jax.tree.leaves(target), strict=True):
        assert leaf.sharding == wanted.sharding


@pytest.mark.parametrize("spec", [None, PartitionSpec("fsdp", "tensor")])
def test_state_may_be_donated_as_soon_as_save_returns(tmp_path, spec):
    """Large arrays, so that the background write is still at work when the update overwrites them."""
    state = {f"w{i}": random_bits(jnp.zeros((512, 1024), jnp.float32), i) for i in range(8)}
    state = state if spec is None else on_mesh(state, spec)
    jax.block_until_ready(state)
    expected = [leaf.copy() for leaf in map(np.asarray, jax.device_get(jax.tree.leaves(state)))]
    target = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state
    )
    update = jax.jit(lambda tree: jax.tree.map(lambda w: jnp.sin(w) - 7.0, tree), donate_argnums=0)
    warm_up = jax.tree.map(jnp.copy, state)
    jax.block_until_ready(update(warm_up))
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state, {}, {})
        for _ in range(3):
            state = update(state)
        jax.block_until_ready(state)
        restored = jax.tree.leaves(checkpointer.restore(target).state)
    assert [np.asarray(leaf).tobytes() for leaf in restored] == [leaf.tobytes() for leaf in expected]


def test_carry_keeps_dtype_shape_and_bits(tmp_path):
    carry = {
        "prompt": np.arange(5, dtype=np.int64) - 2**60,
        "rewards": np.array([[np.nan, -0.0], [np.inf, 5e-324]], np.float64),
        "logprobs": np.arange(6, dtype=np.float32).reshape(2, 3).T,  # not contiguous
        "half": np.array([1.5], ml_dtypes.bfloat16),
        "mask": np.array([True, False, True]),
        "scalar": np.array(3, np.uint16),
        "nothing": np.zeros((0, 4), np.float32),
        "text": np.array(["34", "minus one"]),
    }
    saved(tmp_path, train_state(), carry=carry)
    with Checkpointer(tmp_path) as checkpointer:
        restored = checkpointer.restore(train_state(filled=False)).carry
    assert list(restored) == list(carry)
    for name, array in carry.items():
        assert restored[name].dtype == array.dtype
        assert restored[name].shape == array.shape
        assert restored[name].tobytes() == array.tobytes()
        assert restored[name].flags.writeable


def test_carry_may_change_shape_between_steps_and_be_overwritten_after_save(tmp_path):
    state, buffer = train_state(), np.arange(4)
    with Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2, 3):
            carry = {"tokens": buffer[:step]} if step < 3 else {}
            checkpointer.save(step, state, {}, carry)
            buffer += 10
        found = [checkpointer.restore(state, step).carry for step in (1, 2, 3)]
    np.testing.assert_array_equal(found[0]["tokens"], [0])
    np.testing.assert_array_equal(found[1]["tokens"], [10, 11])
    assert found[2] == {}


def test_keeps_the_last_few_and_saves_each_step_once(tmp_path):
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        for step in (1, 2, 3, 4):
            checkpointer.save(step, {"w": jnp.full(2, float(step))}, {}, {})
        assert checkpointer.latest_step() == 4
        for step in (4, 3, 1):
            with pytest.raises(ValueError, match=f"step {step} .*{tmp_path}, .* step 4"):
                checkpointer.save(step, {"w": jnp.zeros(2)}, {}, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "4"]
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        restored = checkpointer.restore({"w": jnp.zeros(2, jnp.bfloat16)}, step=3).state["w"]
        assert (restored[0], restored.dtype) == (3.0, jnp.bfloat16)  # the target's dtype
        with pytest.raises(FileNotFoundError, match=r"of step 1 .*\[3, 4\]"):
            checkpointer.restore({"w": jnp.zeros(2)}, step=1)


def test_an_empty_folder_has_no_checkpoint_and_is_not_created(tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    with Checkpointer(folder) as checkpointer:
        assert checkpointer.latest_step() is None
        with pytest.raises(FileNotFoundError, match=f"no checkpoint in {folder}"):
            checkpointer.restore({"w": jnp.zeros(2)})
    assert not folder.exists()


def test_a_target_of_another_shape_is_named_before_anything_is_read(tmp_path):
    saved(tmp_path, train_state())
    target = train_state(filled=False, rows=24)
    with (
        Checkpointer(tmp_path) as checkpointer,
        pytest.raises(ValueError, match=r"opt_state.0.mu.embed of shape \(16, 8\).*\(24, 8\)"),
    ):
        checkpointer.restore(target)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(target))


@pytest.mark.parametrize(
    ("names", "message"),
    [("ab", "does not contain b, which the target has"), ("", "contains a, which the target does not have")],
)
def test_a_target_of_other_parameters_is_refused(tmp_path, names, message):
    saved(tmp_path, {"a": jnp.zeros(2), "c": jnp.zeros(2)})
    target = {name: jnp.zeros(2) for name in (*names, "c")}
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(ValueError, match=message):
        checkpointer.restore(target)


def test_a_part_of_a_checkpoint_is_restored_without_the_rest(tmp_path):
    """The other arrays may have any shape, but an array of the target must be there."""
    state = train_state()
    saved(tmp_path, state)
    with Checkpointer(tmp_path) as checkpointer:
        found = checkpointer.restore({"params": train_state(filled=False)["params"]}, part=True)
        with pytest.raises(ValueError, match="does not contain more, which the target has"):
            checkpointer.restore({"more": jnp.zeros(2)}, part=True)
    assert bits(found.state) == bits(state["params"])


def test_another_format_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SCHEMA_VERSION", 2)
    saved(tmp_path, {"w": jnp.zeros(2)})
    monkeypatch.setattr(module, "SCHEMA_VERSION", 1)
    with (
        Checkpointer(tmp_path) as checkpointer,
        pytest.raises(CheckpointError, match=r"schema_version 2, .* 1"),
    ):
        checkpointer.restore({"w": jnp.zeros(2)})


def test_a_failed_write_surfaces_with_the_folder_and_leaves_the_last_checkpoint(tmp_path, monkeypatch):
    slow, found = threading.Event(), ""

    def full(folder, known):
        slow.wait(60)
        raise OSError(errno.ENOSPC, "No space left on device")

    with Checkpointer(tmp_path, keep=1) as checkpointer:
        checkpointer.save(1, {"w": jnp.ones(2)}, {}, {})
        checkpointer.wait()
        with monkeypatch.context() as patch:
            patch.setattr(manifest, "write_manifest", full)
            checkpointer.save(2, {"w": jnp.zeros(2)}, {}, {})
            assert checkpointer.failure() == ""
            slow.set()
            while not found:
                found = checkpointer.failure()
            assert f"step 2 in {tmp_path} failed: the disk is full" in found
            assert checkpointer.failure() == ""
            checkpointer.save(2, {"w": jnp.zeros(2)}, {}, {})
            with pytest.raises(CheckpointError, match=f"step 2 in {tmp_path} failed: .*No space left"):
                checkpointer.wait()
        assert [path.name for path in tmp_path.iterdir()] == ["1"], "no half folder"
        assert checkpointer.restore({"w": jnp.zeros(2)}).state["w"][0] == 1.0
        checkpointer.save(2, {"w": jnp.full(2, 2.0)}, {}, {})  # there is room again
        assert checkpointer.latest_step() == 2


def test_a_killed_save_is_never_seen_and_is_cleared_by_the_next_one(tmp_path):
    saved(tmp_path, {"w": jnp.ones(2)}, step=1)
    half = tmp_path / "2.orbax-checkpoint-tmp"
    half.mkdir()
    (half / "sha256.json").write_text("{")
    with Checkpointer(tmp_path) as reader:
        assert reader.latest_step() == 1
        assert half.exists(), "a live run may be writing it"
        reader.save(3, {"w": jnp.ones(2)}, {}, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "3"]


@pytest.mark.parametrize("value", [float("nan"), (1, 2), {1: "a"}, object()])
def test_progress_that_json_would_change_is_refused(tmp_path, value):
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(ValueError, match=r"progress=.*'seed'"):
        checkpointer.save(1, {"w": jnp.ones(2)}, {"seed": value}, {})
    assert not list(tmp_path.iterdir())


def test_progress_is_stored_as_of_the_call_of_save(tmp_path, monkeypatch):
    """The write is in the background, and the caller may change its lists meanwhile."""
    begun, write = threading.Event(), manifest.write_manifest

    def late(folder, known):
        begun.wait(60)
        write(folder, known)

    monkeypatch.setattr(manifest, "write_manifest", late)
    progress = {"share": {"of": [1.0]}, "cursor": 9}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"w": jnp.ones(2)}, progress, {})
        progress["share"]["of"][0] = 666.0
        begun.set()
        found = checkpointer.restore({"w": jnp.zeros(2)}).progress
    assert found == {"share": {"of": [1.0]}, "cursor": 9}


@pytest.mark.parametrize(
    ("state", "carry", "message"),
    [
        ({"a": {"w": 3.0}}, {}, r"a\.w is a float"),
        ({"a": {"w": jnp.zeros((0, 2))}}, {}, r"a\.w .*\(0, 2\)"),
        ({"a": {"w": jax.random.key(0)}}, {}, r"a\.w of dtype key"),
        ({"a": {"b": jnp.ones(2)}, "a.b": jnp.ones(2)}, {}, r"a\.b"),
        ({"w": jnp.ones(2)}, {"rows": np.array([None])}, r"carry\['rows'\].*object"),
    ],
)
def test_a_value_that_cannot_be_stored_is_named(tmp_path, state, carry, message):
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(ValueError, match=message):
        checkpointer.save(1, state, {}, carry)


def test_works_inside_a_running_event_loop(tmp_path):
    """As in a notebook cell."""

    async def cell():
        saved(tmp_path, {"w": jnp.ones(2)})
        with Checkpointer(tmp_path) as checkpointer:
            return checkpointer.restore({"w": jnp.zeros(2)}).step

    assert asyncio.run(cell()) == 3


def test_prints_nothing_and_leaves_signals_and_threads_alone(tmp_path, caplog, capfd):
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    before = set(threading.enumerate())
    with caplog.at_level(logging.WARNING):
        half = tmp_path / "3.orbax-checkpoint-tmp"
        half.mkdir()
        saved(tmp_path, train_state(), carry={"tokens": np.arange(3)})
        with Checkpointer(tmp_path) as checkpointer:
            checkpointer.restore(train_state(filled=False))
    assert caplog.records == []
    assert capfd.readouterr().err == ""
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    # Threads of an event loop that orbax has closed need a moment to end.
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=5.0)
        assert not thread.is_alive(), thread
