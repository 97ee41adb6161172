"""Damaged checkpoints: the one before is taken and it is said, or the file is named; never is anything wrong restored."""

import builtins
import errno
import json
import os
import re
import shutil
import time

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath

from dapo_jax.checkpoints.checkpointer import Checkpointer
from dapo_jax.checkpoints.last_intact import restore_last
from dapo_jax.checkpoints.manifest import META, CheckpointError, DamagedError, write_manifest

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
    """(what was restored, what was said)."""
    said = []
    with Checkpointer(folder) as checkpointer:
        target = jax.eval_shape(lambda: state_at(0))
        found = restore_last(
            checkpointer,
            lambda step: checkpointer.restore(target, step, rows=1),
            say=said.append,
            aside=aside,
        )
    return found, said


def assert_is(found, step):
    """Bit for bit what was saved at that step."""
    assert found.step == step
    assert found.progress == {"cursor": step}
    np.testing.assert_array_equal(found.carry["tokens"], np.arange(100 * step, dtype=np.int32))
    for one, other in zip(jax.tree.leaves(found.state), jax.tree.leaves(state_at(step)), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[int(at * (len(data) - 1))] ^= 1
    path.write_bytes(data)


def cut(path, to):
    data = path.read_bytes()
    path.write_bytes(data[: int(to * len(data))])


def folder_instead(path):
    path.unlink()
    path.mkdir()


DEEDS = {
    "emptied": lambda path: cut(path, 0),
    "cut in half": lambda path: cut(path, 0.5),
    "its first byte flipped": lambda path: flip(path, 0),
    "a byte in the middle flipped": lambda path: flip(path, 0.5),
    "its last byte flipped": lambda path: flip(path, 1),
    "longer by a byte": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "missing": lambda path: path.unlink(),
    "a folder": folder_instead,
}

MARKS = ("_CHECKPOINT_METADATA", "commit_success.txt")
"""Orbax's own notes, written after the manifest; nothing that is restored is in them."""


@pytest.mark.parametrize("deed", DEEDS)
def test_whatever_becomes_of_whichever_file(deed, kept, tmp_path):
    """A dozen files and more."""
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
        found, said = restored(folder)
        if name.name in MARKS and found.step == LAST:
            assert_is(found, LAST)
            continue
        assert_is(found, BEFORE)
        if name.name not in MARKS:
            assert len(said) == 1, (name, said)
            assert f"checkpoint {folder / str(LAST)}" in said[0] or str(path) in said[0]
            assert f"it is now {folder / str(LAST)}.damaged" in said[0]
            assert (folder / f"{LAST}.damaged").is_dir()


def halves():
    """Folders and sets of files that a deletion cut short leaves behind."""
    yield "without the state", lambda step: shutil.rmtree(step / "state")
    yield "without what was carried", lambda step: shutil.rmtree(step / "carry")
    yield "without the description", lambda step: shutil.rmtree(step / "meta")
    yield "without the manifest", lambda step: (step / "sha256.json").unlink()
    yield "without the arrays' data", lambda step: shutil.rmtree(step / "state" / "d")
    yield (
        "empty",
        lambda step: [shutil.rmtree(path) if path.is_dir() else path.unlink() for path in step.iterdir()],
    )
    yield "with a file that is not its own", lambda step: (step / "state" / "d" / "more").write_bytes(b"more")
    yield "with a manifest of nothing", lambda step: (step / "sha256.json").write_text('{"files": {}}')
    yield "with a manifest that is a list", lambda step: (step / "sha256.json").write_text("[1, 2]")
    yield (
        "with a manifest of numbers",
        lambda step: (step / "sha256.json").write_text('{"files": {"meta/metadata": 1}}'),
    )
    yield "with a manifest of a list", lambda step: (step / "sha256.json").write_text('{"files": [1, 2]}')
    yield "with a manifest without end", lambda step: (step / "sha256.json").write_text("[" * 200_000)
    yield "with a manifest that is no JSON", lambda step: (step / "sha256.json").write_bytes(b"\xff\x00{")
    yield (
        "with the manifest of another",
        lambda step: shutil.copy(step.with_name(str(BEFORE)) / "sha256.json", step),
    )
    yield "with the state of another", exchange_states


def exchange_states(step):
    shutil.rmtree(step / "state")
    shutil.copytree(step.with_name(str(BEFORE)) / "state", step / "state")


@pytest.mark.parametrize(
    ("name", "deed"), list(halves()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_checkpoint_of_which_a_part_is_missing_or_strange(name, deed, folder):
    deed(folder / str(LAST))
    found, said = restored(folder)
    assert_is(found, BEFORE)
    assert len(said) == 1
    assert str(folder / str(LAST)) in said[0]


def test_a_file_that_bears_a_steps_number_is_no_checkpoint(folder):
    (folder / "9").write_text("not a folder")
    found, _ = restored(folder)
    assert_is(found, LAST)


def test_a_number_of_thirty_digits_is_a_damaged_step(folder):
    (folder / ("9" * 30)).mkdir()
    found, said = restored(folder)
    assert_is(found, LAST)
    assert "99999 has no sha256.json" in said[0]


def test_what_is_set_aside_keeps_its_content_and_its_step_can_be_saved_again(folder):
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
    found, said = restored(folder)
    assert_is(found, LAST)
    assert not said


def test_a_reader_of_another_run_passes_over_it_and_leaves_it(folder):
    flip(folder / str(LAST) / "meta" / "metadata", 0.5)
    found, said = restored(folder, aside=False)
    assert_is(found, BEFORE)
    assert said
    assert sorted(path.name for path in folder.iterdir()) == ["4", "7"]


def test_where_none_is_whole_the_files_are_named_and_stay(folder):
    flip(folder / str(LAST) / "meta" / "metadata", 0.5)
    (folder / str(BEFORE) / "sha256.json").unlink()
    with pytest.raises(
        DamagedError, match=r"none of the checkpoints .*/7 is damaged: meta/metadata .*/4 has no sha256"
    ):
        restored(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["4", "7"]


def test_names_that_lead_out_of_a_checkpoint_are_refused(folder, tmp_path):
    """A manifest is of the files that are in the folder; it opens none by name."""
    (tmp_path / "outside").write_text("secret")
    manifest = folder / str(LAST) / "sha256.json"
    files = json.loads(manifest.read_text())["files"]
    manifest.write_text(json.dumps({"files": files | {"../../outside": "0" * 64}}))
    found, said = restored(folder)
    assert_is(found, BEFORE)
    assert "../../outside is missing" in said[0]


def rewrite(step, /, **changes):
    """Changes entries of what the checkpoint says of itself; None takes one out."""
    path = step / META
    meta = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in meta.items() if value is not None}))


def carried(**changes):
    """What is said of the one array that is carried."""
    return {"tokens": {"shape": [700], "dtype": "<i4", "bytes": 2800} | changes}


def of_other_shapes(step):
    with Checkpointer(step.parent / "others") as checkpointer:
        state = jax.tree.map(lambda leaf: jnp.zeros((*leaf.shape, 2)), state_at(0))
        checkpointer.save(LAST, state, {}, {})
    shutil.rmtree(step / "state")
    shutil.move(step.parent / "others" / str(LAST) / "state", step)
    shutil.rmtree(step.parent / "others")


FORGED = {
    "meta is a list": (lambda step: (step / META).write_text("[]"), "holds a list"),
    "meta is empty": (lambda step: (step / META).write_text("{}"), "schema_version is None"),
    "meta without end": (lambda step: (step / META).write_text("[" * 200_000), "too many brackets"),
    "a number of 5000 digits": (
        lambda step: (step / META).write_text('{"schema_version": %s}' % ("9" * 5000)),
        "4300 digits",
    ),
    "meta of 32 MiB of nothing": (lambda step: os.truncate(step / META, 32 << 20), "at most 16,777,216"),
    "a version that is text": (lambda step: rewrite(step, schema_version="1"), "schema_version is '1'"),
    "a version that is no number": (
        lambda step: rewrite(step, schema_version=float("nan")),
        "schema_version is nan",
    ),
    "no progress": (lambda step: rewrite(step, progress=None), "'progress' in meta"),
    "a progress that is a list": (lambda step: rewrite(step, progress=[1]), "'progress' in meta"),
    "no arrays": (lambda step: rewrite(step, state=None), "'state' in meta"),
    "arrays without a shape": (lambda step: rewrite(step, state={"count": "int32"}), "'state' in meta"),
    "nothing said of what is carried": (lambda step: rewrite(step, carry=None), "'carry' in meta"),
    "carried bytes that are missing": (lambda step: rewrite(step, carry={"tokens": {}}), "'carry' in meta"),
    "carried bytes that are no number": (
        lambda step: rewrite(step, carry=carried(bytes=float("nan"))),
        "'carry' in meta",
    ),
    "more carried than there is memory": (
        lambda step: rewrite(step, carry=carried(bytes=4 << 50, shape=[1 << 50])),
        "4,503,599,627,370,496 carried bytes",
    ),
    "more carried than was written": (
        lambda step: rewrite(step, carry=carried(bytes=4000, shape=[1000])),
        r"carry are \(\(2800,\), 'uint8'\)",
    ),
    "carried in a shape that no array has": (
        lambda step: rewrite(step, carry=carried(bytes=0, shape=[0, 10**30])),
        "'carry' in meta",
    ),
    "carried in a shape that has no place in 64 bits beside its dtype": (
        lambda step: rewrite(step, carry=carried(bytes=0, shape=[0, 1 << 61])),
        "'carry' in meta",
    ),
    "carried in 101 dimensions": (
        lambda step: rewrite(step, carry=carried(shape=[700] + [1] * 100)),
        "'carry' in meta",
    ),
    "carried objects": (
        lambda step: rewrite(step, carry=carried(dtype="|O", bytes=5600)),
        "'carry' in meta",
    ),
    "carried records": (
        lambda step: rewrite(step, carry=carried(dtype="(700,)<i4", shape=[])),
        "'carry' in meta",
    ),
    "a score that is text": (lambda step: rewrite(step, score="best"), "its score is 'best'"),
    "a step that is text": (lambda step: rewrite(step, step="7"), "is of step '7'"),
    "the step of another": (lambda step: rewrite(step, step=BEFORE), f"is of step {BEFORE}"),
    "arrays of other shapes": (of_other_shapes, r"state/count are \(\(2,\)"),
    "without its arrays": (lambda step: shutil.rmtree(step / "state"), "cannot be read"),
}
"""What is done to a checkpoint before its manifest is made anew, and what is said of it."""


@pytest.mark.parametrize("name", FORGED)
def test_a_checkpoint_that_says_strange_things_under_a_manifest_of_its_own_is_damaged(name, folder):
    deed, said_of_it = FORGED[name]
    deed(folder / str(LAST))
    write_manifest(epath.Path(folder / str(LAST)))
    found, said = restored(folder)
    assert_is(found, BEFORE)
    assert len(said) == 1
    assert re.search(said_of_it, said[0]), said


def test_a_shape_of_a_hundred_thousand_numbers_is_not_multiplied_out(folder):
    """The product of so many would take ten seconds and more."""
    rewrite(folder / str(LAST), carry=carried(shape=[10**9 + 7] * 100_000))
    write_manifest(epath.Path(folder / str(LAST)))
    began = time.process_time()
    found, said = restored(folder)
    assert time.process_time() - began < 5
    assert_is(found, BEFORE)
    assert "'carry' in meta" in said[0]


def left_as_it_was(folder, message):
    """The resume ends by a message, and nothing is renamed: the checkpoint may be whole."""
    with pytest.raises(CheckpointError, match=message) as caught:
        restored(folder)
    assert not isinstance(caught.value, DamagedError)
    assert f"checkpoint {folder / str(LAST)} cannot be read: " in str(caught.value)
    assert sorted(path.name for path in folder.iterdir()) == ["4", "7"]


SHORTAGES = {
    "memory of the host": (MemoryError(), "MemoryError. It may be whole, .*: free memory"),
    "memory of the device": (
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 12345 bytes."),
        "allocating 12345 bytes.* It may be whole, .*: free memory",
    ),
    "the right to read": (
        ValueError('PERMISSION_DENIED: Error reading local file "a/0"'),
        "a/0.* It may be whole, .*: let this user read it",
    ),
    "descriptors": (OSError(errno.EMFILE, "Too many open files"), "Too many open files.*: try again"),
}


@pytest.mark.parametrize("name", SHORTAGES)
def test_what_is_short_while_a_checkpoint_is_read_is_no_damage(name, folder, monkeypatch):
    error, message = SHORTAGES[name]

    def fail(*_, **__):
        raise error

    monkeypatch.setattr(ocp.CheckpointManager, "restore", fail)
    left_as_it_was(folder, message)


@pytest.mark.parametrize("name", ["sha256.json", META, "state/", "_CHECKPOINT_METADATA"])
@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_a_file_that_may_not_or_cannot_be_read_is_no_damage(name, number, folder, monkeypatch):
    """The system's answer is made up: whoever runs the tests may be allowed everything."""
    real = builtins.open

    def refuse(path, *how, **more):
        if str(path).startswith(f"{folder / str(LAST)}/{name}"):
            raise OSError(number, os.strerror(number), str(path))
        return real(path, *how, **more)

    monkeypatch.setattr(builtins, "open", refuse)
    remedy = "let this user read it" if number == errno.EACCES else "try again, and if the disk stays so"
    left_as_it_was(folder, f"{os.strerror(number)}.* It may be whole, .*: {remedy}")


def test_a_folder_that_may_not_be_listed_is_no_damage(folder, monkeypatch):
    real = os.scandir

    def refuse(path="."):
        if str(path) == f"{folder / str(LAST)}/state":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", refuse)
    left_as_it_was(folder, "Permission denied.*: let this user read it")


def test_checkpoints_that_may_not_be_listed_are_not_taken_for_none(folder, monkeypatch):
    real = os.listdir

    def refuse(path="."):
        if str(path) == str(folder):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(
        CheckpointError, match=rf"{folder} cannot be listed \(Permission denied\): it must be"
    ):
        restored(folder)


def test_a_damaged_step_that_cannot_be_renamed_is_named(folder, monkeypatch):
    """Its name is too long already, or the disk is only read."""
    (folder / ("9" * 255)).mkdir()
    with pytest.raises(CheckpointError, match=r"/9{255} is damaged, and cannot be renamed .*name too long"):
        restored(folder)
    (folder / ("9" * 255)).rmdir()
    flip(folder / str(LAST) / META, 0.5)

    def refuse(*_):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(CheckpointError, match=r"/7 is damaged, .* \(Read-only file system\): move it away"):
        restored(folder)
    found, _ = restored(folder, aside=False)
    assert_is(found, BEFORE)


def test_the_folder_is_listed_no_more_often_for_many_damaged_steps(folder, monkeypatch):
    """Each of them lists them all otherwise, and a few hundred take minutes."""
    for step in range(1000, 1030):
        (folder / str(step)).mkdir()
    real, listed = os.listdir, []

    def counted(path="."):
        listed.append(str(path))
        return real(path)

    monkeypatch.setattr(os, "listdir", counted)
    found, said = restored(folder)
    assert_is(found, LAST)
    assert len(said) == 30
    assert listed.count(str(folder)) < 10


def instead(path, make):
    path.unlink()
    make(path)


def manifest_of(step, **changes):
    manifest = step / "sha256.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | changes))


def a_file_of_the_state(step):
    return max((step / "state").rglob("ocdbt.process_0/d/*"), key=lambda path: path.stat().st_size)


def grown(step):
    os.truncate(a_file_of_the_state(step), 200 << 30)


def grown_and_said(step):
    grown(step)
    sizes = json.loads((step / "sha256.json").read_text())["sizes"]
    name = a_file_of_the_state(step).relative_to(step).as_posix()
    manifest_of(step, sizes=sizes | {name: 200 << 30})


UNREADABLE = {
    "a file has grown to 200 GiB": (grown, "has 214,748,364,800 bytes, written with"),
    "a file has grown to 200 GiB and the manifest says so": (
        grown_and_said,
        "arrays of this run take at most",
    ),
    "a manifest of 10 GiB of nothing": (
        lambda step: os.truncate(step / "sha256.json", 10 << 30),
        "sha256.json has 10,737,418,240 bytes",
    ),
    "a pipe for the manifest": (lambda step: instead(step / "sha256.json", os.mkfifo), "is no file"),
    "a pipe for a file": (lambda step: instead(a_file_of_the_state(step), os.mkfifo), "is no file"),
    "a pipe beside the files": (lambda step: os.mkfifo(step / "state" / "more"), "is no file"),
    "a link to a device": (
        lambda step: instead(step / META, lambda path: path.symlink_to("/dev/zero")),
        "is no file",
    ),
    "a link to nothing": (
        lambda step: instead(step / META, lambda path: path.symlink_to("nowhere")),
        "No such file",
    ),
    "a link to itself": (
        lambda step: instead(step / META, lambda path: path.symlink_to(path)),
        "symbolic links",
    ),
    "digests that are numbers": (
        lambda step: manifest_of(
            step, files=dict.fromkeys(json.loads((step / "sha256.json").read_text())["files"], 1)
        ),
        "must name a sha256",
    ),
    "sizes that are text": (lambda step: manifest_of(step, sizes={META: "all"}), "must be bytes"),
    "sizes of files that are not there": (
        lambda step: manifest_of(step, sizes={"more": 1}),
        "more has 0 bytes",
    ),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_has_no_end_or_is_no_file_is_not_read(name, folder):
    """A second is enough for each; reading would take hours, all memory, or wait for ever."""
    deed, said_of_it = UNREADABLE[name]
    deed(folder / str(LAST))
    found, said = restored(folder)
    assert_is(found, BEFORE)
    assert len(said) == 1
    assert re.search(said_of_it, said[0]), said


@pytest.mark.parametrize(
    ("deed", "message"),
    [
        (lambda note: instead(note, os.mkfifo), "it is no file"),
        (lambda note: os.truncate(note, 10 << 30), "more than 16,777,216 bytes"),
    ],
    ids=["a pipe", "10 GiB of nothing"],
)
def test_a_note_that_orbax_would_read_without_end_is_refused_at_once(deed, message, folder):
    """It reads those of all steps as soon as it looks which there are."""
    deed(folder / str(LAST) / "_CHECKPOINT_METADATA")
    with pytest.raises(
        DamagedError, match=rf"checkpoint {folder}/{LAST} is damaged, move it away: .*{message}"
    ):
        restored(folder)


def test_a_step_that_was_given_another_number_is_set_aside(folder):
    (folder / str(LAST)).rename(folder / "9")
    found, said = restored(folder)
    assert_is(found, BEFORE)
    assert f"{folder}/9 is of step 7, and its folder was renamed; it is now {folder}/9.damaged" in said[0]


@pytest.mark.parametrize("name", ["007", "+7", "7 ", "7\n", "1\u0667", "\u00b2", "7_0", "0x7"])
def test_a_folder_that_is_almost_a_steps_number_is_none(name, folder):
    (folder / str(LAST)).rename(folder / name)
    found, said = restored(folder)
    assert_is(found, BEFORE)
    assert not said


def test_a_checkpoint_without_sizes_and_step_is_read_as_before(folder):
    """As earlier versions of this library wrote it."""
    rewrite(folder / str(LAST), step=None)
    write_manifest(epath.Path(folder / str(LAST)))
    manifest = folder / str(LAST) / "sha256.json"
    manifest.write_text(json.dumps({"files": json.loads(manifest.read_text())["files"]}))
    found, said = restored(folder)
    assert_is(found, LAST)
    assert not said


def test_a_strange_score_is_of_no_checkpoint(folder):
    """`best` asks all checkpoints, those that nobody restores too."""
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(9, state_at(9), {}, {}, score=0.5)
    rewrite(folder / str(LAST), score="best")
    (folder / str(BEFORE) / META).write_text("[]")
    with Checkpointer(folder) as checkpointer:
        assert checkpointer.best() == (9, 0.5)
