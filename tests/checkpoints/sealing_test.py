"""Each process hashes the files that it has written; a step counts only once its manifest has all digests."""

import hashlib
import json
import signal
import time

import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from dapo_jax.checkpoints.checkpointer import Checkpointer
from dapo_jax.checkpoints.manifest import (
    CheckpointError,
    SealedFile,
    check_digests,
    sealed_files,
    write_manifest,
)
from tests import several

SAVE = """
import json
import os
import signal
import sys
from pathlib import Path

folder, victim, place = sys.argv[1], int(sys.argv[2]), sys.argv[3]
opened = []

def on_open(event, arguments):
    # Python's own reads and writes; tensorstore's are not among them.
    if event == "open" and str(arguments[0]).startswith(folder):
        if jax.process_index() == victim and place in str(arguments[0]):
            written = [*map(str, Path(folder).glob("2.*/state*/ocdbt.process_1/d/*"))]
            os.write(1, f"written {json.dumps(written)}\\n".encode())  # one write: several threads come here
            os.kill(os.getpid(), signal.SIGKILL)
        opened.append(str(arguments[0]).removeprefix(folder + "/"))

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from dapo_jax.checkpoints.checkpointer import Checkpointer
from dapo_jax.parallel import processes

processes.start()
spread = NamedSharding(Mesh(np.array(jax.devices()), ("all",)), PartitionSpec("all"))
w = np.random.default_rng(0).integers(0, 2**32, (64, 256), dtype=np.uint32)
state = {"w": jax.make_array_from_callback(w.shape, spread, lambda cut: w[cut])}
sys.addaudithook(on_open)
with Checkpointer(folder) as checkpointer:
    for step in (1, 2):
        checkpointer.save(step, state, {"cursor": step}, {"tokens": np.arange(step)})
    checkpointer.wait()
    print("opened", json.dumps(opened), flush=True)
    found = checkpointer.restore(state)
    for shard in found.state["w"].addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), w[shard.index])
processes.leave()
"""
TARGET = {"w": jnp.zeros((64, 256), jnp.uint32)}
UNFINISHED = ".orbax-checkpoint-tmp"
UNSEALED = {"sha256.json", "_CHECKPOINT_METADATA", "commit_success.txt"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of checkpoints that two processes have written, and for each the files that it opened meanwhile."""
    folder = tmp_path_factory.mktemp("checkpoints")
    outputs = several.run(SAVE, folder, -1, "", processes=2, devices=2)
    lines = [line for output in outputs for line in output.splitlines() if line.startswith("opened ")]
    opened = [json.loads(line.removeprefix("opened ")) for line in lines]
    return folder, [{name.replace(UNFINISHED, "") for name in names} for names in opened]


def files_in(step):
    """Content of every file by its path, without those that no manifest lists."""
    return {
        path.relative_to(step).as_posix(): path.read_bytes()
        for path in step.rglob("*")
        if path.is_file() and path.name not in UNSEALED
    }


def test_each_process_reads_its_own_files_and_the_first_no_others_but_small_ones(saved):
    folder, opened = saved
    names = {
        f"{step}/{name}": len(data) for step in (1, 2) for name, data in files_in(folder / str(step)).items()
    }
    written = [{name for name in names if f"/ocdbt.process_{index}/" in name} for index in (0, 1)]
    for index in (0, 1):
        assert any(name.startswith("2/state/") and "/d/" in name for name in written[index])
        assert {name for name in opened[index] if "/ocdbt.process_" in name} == written[index]
    data = sum(names[name] for name in written[0] | written[1])
    assert data > 2 * 64 * 256 * 4, "random numbers are not compressed"
    rest = names.keys() - written[0] - written[1]
    assert rest <= opened[0]
    assert sum(map(names.get, rest)) < data / 10


def test_the_manifest_has_hashlibs_digest_and_the_size_of_every_file(saved):
    for step in (1, 2):
        files = files_in(saved[0] / str(step))
        manifest = json.loads((saved[0] / str(step) / "sha256.json").read_text())
        assert manifest["files"] == {
            name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest(), "md5": ""}
            for name, data in files.items()
        }


def test_one_process_restores_a_checkpoint_of_two(saved):
    with Checkpointer(saved[0]) as checkpointer:
        found = checkpointer.restore(TARGET)
    w = np.random.default_rng(0).integers(0, 2**32, (64, 256), dtype=np.uint32)
    np.testing.assert_array_equal(np.asarray(found.state["w"]), w)


@pytest.mark.parametrize(
    ("victim", "place"),
    [
        (1, f"/2{UNFINISHED}/state{UNFINISHED}/ocdbt.process_1/"),
        # Slow: start two processes each. That a step counts by its name alone is tested without processes.
        pytest.param(0, f"/2{UNFINISHED}/sha256.json", marks=pytest.mark.slow),
        pytest.param(0, f"/2{UNFINISHED}/commit_success.txt", marks=pytest.mark.slow),
    ],
    ids=["before the second process has hashed its files", "before the manifest", "before the final name"],
)
def test_a_kill_between_writing_and_the_final_name_leaves_no_checkpoint(victim, place, tmp_path):
    started = several.start(SAVE, tmp_path, victim, place, processes=2, devices=2)
    try:
        output, _ = started[victim].communicate(timeout=120)
        assert started[victim].returncode == -signal.SIGKILL, output
        time.sleep(2)  # enough for the other, if it did not wait
    finally:
        for each in started:
            each.kill()
            each.communicate()
    # The other process may have removed the unfinished files, if it noticed the death.
    written, *_ = (line for line in output.splitlines() if line.startswith("written "))  # one per thread
    assert json.loads(written.removeprefix("written ")), "all was written"
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.steps() == [1]
        assert checkpointer.restore(TARGET).progress == {"cursor": 1}
        checkpointer.save(2, TARGET, {}, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]


def test_known_files_are_hashed_once_and_must_be_as_they_were_written(tmp_path):
    """A known file differs if each process has a disk of its own."""
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"four")
    folder = epath.Path(tmp_path)
    for known, found in (
        ({"a": SealedFile(3, "0" * 64)}, "4 bytes"),
        ({"c": SealedFile(4, "0" * 64)}, "no such file"),
    ):
        with pytest.raises(CheckpointError, match=f"written with .* bytes, .* finds {found}"):
            write_manifest(folder, known)
        assert not (tmp_path / "sha256.json").exists()
    write_manifest(folder, {"a": SealedFile(4, "0" * 64)})
    files = sealed_files(folder)
    assert files == {"a": SealedFile(4, "0" * 64), "b": SealedFile(4, hashlib.sha256(b"four").hexdigest())}
    check_digests(folder, files, share=(1, 2))  # of two processes the second reads b
    with pytest.raises(CheckpointError, match="a has sha256"):
        check_digests(folder, files, share=(0, 2))
