"""Damaged checkpoints: the one before is taken and it is said, or the file is named; never is anything wrong restored."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax.checkpoint_files import DamagedError
from dapo_jax.checkpoints import Checkpointer
from dapo_jax.run.last_checkpoint import restore_last

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
        found = restore_last(checkpointer, target, rows=1, say=said.append, aside=aside)
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
