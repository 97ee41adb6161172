"""Damaged checkpoints: a resume takes the one before, with a message that names the file; wrong values are never restored."""

import builtins
import errno
import io
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from dapo_jax.checkpoints.checkpointer import Checkpointer
from dapo_jax.checkpoints.manifest import META, CheckpointError, DamagedError

LAST, BEFORE = 7, 4


def state_at(step):
    """With a leaf that is read in several pieces, and small ones."""
    keys = jax.random.split(jax.random.key(step), 2)
    return {
        "params": {"w": jax.random.normal(keys[0], (32, 64)), "b": jax.random.normal(keys[1], (5,))},
        "count": jnp.full((), step, jnp.int32),
    }


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    with Checkpointer(folder) as checkpointer:
        for step in (BEFORE, LAST):
            carry = {"tokens": np.arange(100 * step, dtype=np.int32)}
            checkpointer.save(step, state_at(step), {"cursor": step}, carry)
    return folder


@pytest.fixture
def folder(kept, tmp_path):
    return shutil.copytree(kept, tmp_path / "checkpoints")


def restored(folder, *, aside=True):
    """Returns (the result of `restore_last`, its messages)."""
    messages = []
    with Checkpointer(folder) as checkpointer:
        target = jax.eval_shape(lambda: state_at(0))
        found = checkpointer.restore_last(
            lambda step: checkpointer.restore(target, step, rows=1), say=messages.append, aside=aside
        )
    return found, messages


def assert_is(found, step):
    """Compares with the values saved at that step, bit for bit."""
    assert found.step == step
    assert found.progress == {"cursor": step}
    np.testing.assert_array_equal(found.carry["tokens"], np.arange(100 * step, dtype=np.int32))
    for one, other in zip(jax.tree.leaves(found.state), jax.tree.leaves(state_at(step)), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[int(at * (len(data) - 1))] ^= 1
    path.write_bytes(data)


def folder_instead(path):
    path.unlink()
    path.mkdir()


DEEDS = {
    "emptied": lambda path: path.write_bytes(b""),
    "a byte in the middle flipped": lambda path: flip(path, 0.5),
    "missing": lambda path: path.unlink(),
    "a folder": folder_instead,
}

MARKS = ("_CHECKPOINT_METADATA", "commit_success.txt")
"""Orbax's own files, written after the manifest; nothing is restored from them."""


@pytest.mark.parametrize("deed", DEEDS)
def test_damage_to_any_file_is_found(deed, kept, tmp_path):
    names = sorted(
        path.relative_to(kept / str(LAST)) for path in (kept / str(LAST)).rglob("*") if path.is_file()
    )
    assert len(names) > 12
    for number, name in enumerate(names):
        folder = shutil.copytree(kept, tmp_path / str(number))
        path = folder / str(LAST) / name
        before = path.read_bytes()
        DEEDS[deed](path)
        if path.is_file() and path.read_bytes() == before:
            continue  # it was empty
        found, messages = restored(folder)
        if name.name in MARKS and found.step == LAST:
            assert_is(found, LAST)
            continue
        assert_is(found, BEFORE)
        if name.name not in MARKS:
            assert len(messages) == 1, (name, messages)
            assert f"checkpoint {folder / str(LAST)}" in messages[0] or str(path) in messages[0]
            assert f"it is now {folder / str(LAST)}.damaged" in messages[0]
            assert (folder / f"{LAST}.damaged").is_dir()


PARTS = {
    "without the state": lambda step: shutil.rmtree(step / "state"),
    "empty": lambda step: (shutil.rmtree(step), step.mkdir()),
    "with a manifest that is cut short": lambda step: (step / "sha256.json").write_text('{"files": {"meta'),
    "with the manifest of another": lambda step: shutil.copy(
        step.with_name(str(BEFORE)) / "sha256.json", step
    ),
    "with the state of another": lambda step: (
        shutil.rmtree(step / "state"),
        shutil.copytree(step.with_name(str(BEFORE)) / "state", step / "state"),
    ),
}
"""What an interrupted deletion, a crash of the machine or a wrong copy leaves."""


@pytest.mark.parametrize("name", PARTS)
def test_a_checkpoint_with_a_missing_or_wrong_part_is_passed_over(name, folder):
    PARTS[name](folder / str(LAST))
    found, messages = restored(folder)
    assert_is(found, BEFORE)
    assert len(messages) == 1
    assert str(folder / str(LAST)) in messages[0]


def test_only_a_folder_with_the_name_of_its_step_is_a_checkpoint(folder):
    (folder / "8").write_text("not a folder")
    (folder / str(LAST)).rename(folder / "9")
    shutil.copytree(folder / "9", folder / "007")
    found, messages = restored(folder)
    assert_is(found, BEFORE)
    assert len(messages) == 1
    assert f"{folder}/9 contains step 7" in messages[0]
    assert f"{folder}/9.damaged" in messages[0]


def test_a_step_that_was_set_aside_keeps_its_content_and_can_be_saved_again(folder):
    for _ in range(2):
        flip(folder / str(LAST) / "sha256.json", 0)
        before = sorted(path.name for path in (folder / str(LAST)).rglob("*"))
        restored(folder)
        with Checkpointer(folder) as checkpointer:
            checkpointer.save(
                LAST, state_at(LAST), {"cursor": LAST}, {"tokens": np.arange(100 * LAST, dtype=np.int32)}
            )
    assert sorted(path.name for path in folder.iterdir()) == ["4", "7", "7.damaged", "7.damaged2"]
    assert sorted(path.name for path in (folder / "7.damaged2").rglob("*")) == before
    found, messages = restored(folder)
    assert_is(found, LAST)
    assert not messages


def test_without_an_intact_checkpoint_the_files_are_named_and_stay(folder):
    flip(folder / str(LAST) / META, 0.5)
    (folder / str(BEFORE) / "sha256.json").unlink()
    with pytest.raises(DamagedError, match=r"/7 is damaged: meta/metadata .*/4 has no sha256"):
        restored(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["4", "7"]


def test_a_damaged_checkpoint_is_not_the_best(folder):
    """`best` reads all checkpoints, also those that no run restores."""
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(8, state_at(8), {}, {}, score=0.9)
        checkpointer.save(9, state_at(9), {}, {}, score=0.5)
    flip(folder / "8" / META, 0.5)
    with Checkpointer(folder) as checkpointer:
        assert checkpointer.best() == (9, 0.5)


def stays(folder, message):
    """The resume ends with a message, and nothing is renamed: the checkpoint may be whole."""
    with pytest.raises(CheckpointError, match=message) as caught:
        restored(folder)
    assert not isinstance(caught.value, DamagedError)
    assert f"checkpoint {folder / str(LAST)} cannot be read: " in str(caught.value)
    assert sorted(path.name for path in folder.iterdir()) == ["4", "7"]


SHORTAGES = {
    "memory of the host": (MemoryError(), "MemoryError.*free memory"),
    "memory of the device": (
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 12345 bytes."),
        "12345 bytes.*free memory",
    ),
    "descriptors": (OSError(errno.EMFILE, "Too many open files"), "Too many open files.*try again"),
}


@pytest.mark.parametrize("name", SHORTAGES)
def test_a_shortage_while_a_checkpoint_is_read_is_no_damage(name, folder, monkeypatch):
    error, message = SHORTAGES[name]

    def fail(*_, **__):
        raise error

    monkeypatch.setattr(ocp.CheckpointManager, "restore", fail)
    stays(folder, message)


def refused(monkeypatch, number, place, module, call):
    """Fakes the system's answer at a path, since root may read everything."""
    real = getattr(module, call)

    def refuse(path=".", *how, **more):
        if str(path).startswith(str(place)):
            raise OSError(number, os.strerror(number), str(path))
        return real(path, *how, **more)

    monkeypatch.setattr(module, call, refuse)


@pytest.mark.parametrize(
    ("name", "number"), [("sha256.json", errno.EACCES), (META, errno.EIO), ("state/", errno.EIO)]
)
def test_a_file_that_may_not_or_cannot_be_read_is_no_damage(name, number, folder, monkeypatch):
    for module in (builtins, io):
        refused(monkeypatch, number, f"{folder / str(LAST)}/{name}", module, "open")
    remedy = "give this user read permission" if number == errno.EACCES else "try again"
    stays(folder, f"{os.strerror(number)}.*{remedy}")


def test_folders_that_may_not_be_listed_are_no_damage(folder, monkeypatch):
    refused(monkeypatch, errno.EACCES, folder / str(LAST) / "state", os, "scandir")
    stays(folder, "Permission denied.*give this user read permission")
    refused(monkeypatch, errno.EACCES, folder, os, "listdir")
    with pytest.raises(CheckpointError, match=rf"{folder} cannot be listed \(Permission denied\)"):
        restored(folder)


def test_a_damaged_step_that_cannot_be_renamed_is_named(folder, monkeypatch):
    flip(folder / str(LAST) / META, 0.5)

    def refuse(*_):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(CheckpointError, match=r"/7 is damaged, .* \(Read-only file system\)"):
        restored(folder)
    found, _ = restored(folder, aside=False)
    assert_is(found, BEFORE)
