"""Checkpoints in a bucket: the same bits, whole or not there, although nothing can be renamed."""

import contextlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax.checkpoints import manifest
from dapo_jax.checkpoints.checkpointer import Checkpointer
from dapo_jax.checkpoints.manifest import DamagedError, check_digests, sealed_files
from dapo_jax.storage import path_of

FOLDER = "gs://bucket/run/checkpoints"


def state(seed):
    raw = np.random.default_rng(seed).integers(0, 2**32, (40, 8), dtype=np.uint32)
    return {"params": {"w": jnp.asarray(raw.view(np.float32))}, "count": jnp.asarray(seed, jnp.int32)}


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def save(steps, **how):
    with Checkpointer(FOLDER, **how) as checkpointer:
        for step in steps:
            checkpointer.save(step, state(step), {"cursor": 8 * step}, {"ordinals": np.arange(step)})


def steps_in(bucket):
    return sorted({int(name.split("/")[5]) for name in bucket.files(FOLDER)})


def latest():
    with Checkpointer(FOLDER) as checkpointer:
        return checkpointer.latest_step()


def test_a_saved_state_comes_back_and_the_oldest_is_removed(bucket):
    save([1, 2, 3], keep=2)
    assert steps_in(bucket) == [2, 3]
    with Checkpointer(FOLDER) as checkpointer:
        for step in (None, 2):
            found = checkpointer.restore(state(0), step)
            assert bits(found.state) == bits(state(step or 3))
            assert found.progress == {"cursor": 8 * (step or 3)}
            np.testing.assert_array_equal(found.carry["ordinals"], np.arange(step or 3))


@pytest.mark.parametrize("lost", [("/commit_success.txt",), ("/commit_success.txt", "/sha256.json")])
def test_a_step_that_was_being_written_is_passed_over_and_removed(bucket, lost):
    """The marker is written last; in a bucket the step has its final name from the first byte on."""

    def lose():
        for name in list(bucket.buckets["bucket"]):
            if name.startswith("run/checkpoints/2/") and name.endswith(lost):
                del bucket.buckets["bucket"][name]

    save([1, 2])
    lose()
    assert latest() == 1
    save([2])
    assert latest() == 2
    lose()
    save([3])
    assert steps_in(bucket) == [1, 3]


def test_a_flipped_bit_is_found(bucket):
    save([1])
    names = bucket.buckets["bucket"]
    arrays = [name for name in names if name.startswith("run/checkpoints/1/state/ocdbt.process_0/d/")]
    largest = max(arrays, key=lambda name: len(names[name][0]))
    data, generation = names[largest]
    names[largest] = (data[:-1] + bytes([data[-1] ^ 1]), generation)
    with Checkpointer(FOLDER) as checkpointer, pytest.raises(DamagedError, match=r"state/.* has sha256"):
        checkpointer.restore(state(0))


def read_by_a_check(bucket):
    """The objects of step 1 whose content is asked for while it is compared with its manifest."""
    before, folder = len(bucket.requests), path_of(f"{FOLDER}/1")
    check_digests(folder, sealed_files(folder))
    asked = [(path, query) for method, path, query in bucket.requests[before:] if method == "GET"]
    return {
        path.partition("/run/checkpoints/1/")[2] for path, query in asked if query.get("alt") == "media"
    }  # fmt: skip


def test_what_the_bucket_has_the_same_md5_of_is_not_read_to_be_hashed(bucket):
    save([1])
    assert read_by_a_check(bucket) == {"sha256.json"}
    names, path = bucket.buckets["bucket"], "run/checkpoints/1/sha256.json"
    content = json.loads(names[path][0])
    data = [name for name in content["files"] if "/d/" in name]
    # Files written on a disk have no md5 in the manifest.
    content["files"][data[0]]["md5"] = ""
    names[path] = (json.dumps(content).encode(), next(bucket.generations))
    assert read_by_a_check(bucket) == {"sha256.json", data[0]}


def test_an_object_that_is_replaced_while_it_is_hashed_is_found(bucket, monkeypatch):
    """Its md5 in the manifest is of before, so it is read."""
    name, digests = "run/checkpoints/1/meta/metadata", manifest._digests

    def replaced(folder, sizes):
        found = digests(folder, sizes)
        data, _ = bucket.buckets["bucket"][name]
        bucket.buckets["bucket"][name] = (data[::-1], next(bucket.generations))
        return found

    with monkeypatch.context() as patch:
        patch.setattr(manifest, "_digests", replaced)
        save([1])
    with pytest.raises(DamagedError, match="meta/metadata has sha256"):
        read_by_a_check(bucket)


def test_a_run_continues_in_the_bucket_that_it_was_copied_to(bucket, tmp_path):
    """From a disk into a bucket; orbax keeps the marker there too, or the copy would pass for unfinished."""
    with Checkpointer(tmp_path / "checkpoints") as checkpointer:
        checkpointer.save(1, state(1), {}, {})
    for path in tmp_path.rglob("*"):
        if path.is_file():
            bucket.buckets["bucket"][f"run/{path.relative_to(tmp_path)}"] = (path.read_bytes(), 1)
    save([2])
    assert steps_in(bucket) == [1, 2]
    with Checkpointer(FOLDER) as checkpointer:
        assert bits(checkpointer.restore(state(0), 1).state) == bits(state(1))


def test_a_save_that_is_refused_names_step_and_folder(bucket):
    bucket.granted = bucket.granted - {"storage.objects.create"}
    checkpointer = Checkpointer(FOLDER)
    checkpointer.save(1, state(1), {}, {})
    with pytest.raises(RuntimeError, match=rf"step 1 in {FOLDER} failed: .*\n?.*objects\.create"):
        checkpointer.wait()
    with contextlib.suppress(OSError):  # orbax raises it once more
        checkpointer.close()
