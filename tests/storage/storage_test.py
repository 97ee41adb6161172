"""Folders and buckets are written and read in the same way, and an error names the operation that a bucket refuses."""

import os
import sys
from pathlib import Path

import pytest
import tensorstore

from dapo_jax import storage
from dapo_jax.storage import (
    check_access,
    entries,
    file_bytes,
    files_below,
    files_of,
    in_bucket,
    new_file,
    path_of,
    range_bytes,
    ranges_bytes,
    size_of,
    stored_files,
    write_whole,
)

PIECE = 2**18
"""All pieces of an upload except the last have a multiple of so many bytes."""


@pytest.fixture(params=["local", "bucket"])
def folder(request, tmp_path):
    """An empty folder of each kind."""
    if request.param == "local":
        return path_of(str(tmp_path))
    request.getfixturevalue("bucket")
    return path_of("gs://bucket/some/folder")


def names(folder):
    return [path.name for path in entries(folder)]


def test_a_local_path_is_pathlibs_and_a_path_in_a_bucket_keeps_its_name(bucket):
    assert path_of("~/run") == Path.home() / "run"
    place = path_of("gs://bucket/run/")
    assert str(place / "a.txt") == "gs://bucket/run/a.txt"
    assert (in_bucket(place), in_bucket(Path("gs"))) == (True, False)
    assert path_of(place) == place
    for name in ("s3://bucket/run", "gs://", "gs:///run"):
        with pytest.raises(ValueError, match=name):
            path_of(name)


def test_a_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    storage._objects.cache_clear()
    with pytest.raises(ValueError, match=r"need the package gcsfs: pip install -e '\.\[gcs\]'"):
        path_of("gs://bucket/run")
    storage._objects.cache_clear()


def test_a_file_is_written_and_replaced_whole(folder):
    folder.mkdir(parents=True, exist_ok=True)
    for data in (b"first, the longer one", b"second", b""):
        write_whole(folder / "a", data)
        assert (folder / "a").read_bytes() == data
        assert storage.size_of(folder / "a") == len(data)
    assert names(folder) == ["a"]  # nothing temporary stays


# A client sends 5 MiB at once. At multiples of it the last piece may be missing or empty.
@pytest.mark.parametrize("size", [0, 20 * PIECE, 40 * PIECE + 1])
def test_a_large_file_comes_back_as_it_was_written(folder, size, bucket):
    folder.mkdir(parents=True, exist_ok=True)
    data = os.urandom(size)
    with new_file(folder / "large") as file:
        for start in range(0, size, 300_000):
            file.write(data[start : start + 300_000])
        assert "large" not in names(folder)
    assert (folder / "large").read_bytes() == data
    assert names(folder) == ["large"]
    if in_bucket(folder) and size > 40 * PIECE:
        assert sum("upload_id" in query for _, _, query in bucket.requests) >= 2


@pytest.mark.parametrize("size", [3, 12_000_000])
def test_an_error_while_a_file_is_written_leaves_the_old_one(folder, size, bucket):
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "a", b"before")
    with pytest.raises(KeyboardInterrupt), new_file(folder / "a") as file:  # noqa: PT012 - the error is in the block
        file.write(bytes(size))
        raise KeyboardInterrupt
    assert (folder / "a").read_bytes() == b"before"
    assert not bucket.uploads  # no upload stays open


@pytest.mark.parametrize("target", ["file", "new", "device", "folder"])
def test_a_link_stays_and_the_file_it_leads_to_is_replaced_but_no_device_and_no_folder(target, tmp_path):
    """As root, a rename would put a file in the place of /dev/null. A device receives the bytes instead."""
    there, link = tmp_path / "there", tmp_path / "link"
    (there / "folder").mkdir(parents=True)
    (there / "file").write_bytes(b"before")
    (there / "device").symlink_to(os.devnull)
    link.symlink_to(there / target)
    if target == "folder":
        with pytest.raises(OSError, match="it is not a file"):
            write_whole(link, b"after")
    else:
        write_whole(link, b"after")
    if target in ("file", "new"):
        assert (there / target).read_bytes() == b"after"
    assert names(there) == sorted({"device", "file", "folder"} | {target})
    assert Path(os.devnull).is_char_device()
    assert link.is_symlink()


@pytest.mark.parametrize("named", [True, False])
def test_a_pipe_receives_the_bytes_of_a_file(named, tmp_path):
    """A named pipe, and a pipe that the shell names by its descriptor, as `>(...)` and /dev/stdout do."""
    if named:
        os.mkfifo(path := tmp_path / "pipe")
        reading = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    else:
        reading, writing = os.pipe()
        path = Path(f"/dev/fd/{writing}")
    write_whole(path, b"after")
    assert os.read(reading, 9) == b"after"
    assert names(tmp_path) == ["pipe"] * named


def test_folders_are_listed_and_a_missing_one_is_empty(folder):
    """The md5 of "2" and of "": `echo -n 2 | openssl md5 -binary | base64`."""
    assert (entries(folder), files_below(folder)) == ([], [])
    for name, data in {"b/two": b"2", "b/c/three": b"", "a": b""}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_whole(folder / name, data)
    assert names(folder) == ["a", "b"]
    assert [path.relative_to(folder).as_posix() for path in files_below(folder)] == [
        "a",
        "b/c/three",
        "b/two",
    ]
    two, empty = ("yB5yjZ1ML2NvBn+JzBSGLA==", "1B2M2Y8AsgTpgAmY7PhCfg==") if in_bucket(folder) else ("", "")
    assert stored_files(folder) == {"a": (0, empty), "b/c/three": (0, empty), "b/two": (1, two)}


def test_only_the_ranges_of_a_file_are_fetched_and_long_ones_in_pieces(folder, bucket, monkeypatch):
    folder.mkdir(parents=True, exist_ok=True)
    data = os.urandom(998) + b"\n\r"  # a line end, which a multipart request must not swallow
    write_whole(folder / "a", data)
    del bucket.handed_out[:]
    assert ranges_bytes(folder / "a", [(0, 8), (990, 1000), (3, 4)]) == [data[:8], data[990:], data[3:4]]
    assert range_bytes(folder / "a", 100, 300) == data[100:300]
    assert range_bytes(folder / "a", 7, 7) == b""
    monkeypatch.setattr(storage, "_PIECE_BYTES", 400)
    assert range_bytes(folder / "a", 10, 1000) == data[10:]
    if in_bucket(folder):
        assert sorted(size for _, size in bucket.handed_out) == [1, 8, 10, 190, 200, 400, 400]


def test_a_range_beyond_the_end_of_a_file_and_a_missing_file_are_errors(folder):
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "a", b"three")
    assert files_of(folder, ("a", "b")) == {"a": b"three"}
    with pytest.raises(OSError, match="it ends at byte 5, needs 9"):
        range_bytes(folder / "a", 2, 9)
    for read in (lambda path: range_bytes(path, 0, 1), file_bytes, size_of):
        with pytest.raises(FileNotFoundError, match=r"No such file or directory: .*none"):
            read(folder / "none")


def test_an_object_that_may_not_be_read_is_reported_with_the_missing_role(bucket):
    path = path_of("gs://bucket/a")
    write_whole(path, b"1")
    bucket.granted = {"storage.buckets.get", "storage.objects.list"}
    for read in (file_bytes, lambda path: range_bytes(path, 0, 1)):
        with pytest.raises(
            OSError, match=r"storage\.objects\.get access; .* needs roles/storage\.objectViewer"
        ):
            read(path)
    with pytest.raises(OSError, match="Forbidden"):
        files_of(path.parent, ("a",))
    with pytest.raises(OSError, match=r"cannot write gs://bucket/a: .*storage\.objects\.create"):
        write_whole(path, b"x")


def test_objects_of_another_client_are_seen_at_once(bucket):
    """tensorstore writes a checkpoint's arrays; a cached listing would not have them."""
    folder = path_of("gs://bucket/run")
    write_whole(folder / "a", b"x")
    assert (names(folder), [path.name for path in folder.iterdir()]) == (["a"], ["a"])
    arrays = tensorstore.KvStore.open({"driver": "gcs", "bucket": "bucket", "path": "run/"}).result()
    arrays.write("b", b"y").result()
    assert (names(folder), [path.name for path in folder.iterdir()]) == (["a", "b"], ["a", "b"])
    assert (folder / "b").read_bytes() == b"y"


@pytest.mark.parametrize(
    ("permission", "deed"),
    [
        ("buckets.get", "getting the metadata of bucket 'bucket'"),
        ("objects.list", "listing gs://bucket/run"),
        ("objects.create", "writing to gs://bucket/run"),
        ("objects.delete", "deleting from gs://bucket/run"),
    ],
)
def test_a_missing_permission_is_named_with_its_role(bucket, permission, deed):
    bucket.granted = bucket.granted - {f"storage.{permission}"}
    with pytest.raises(
        ValueError, match=rf"^{deed} failed: .*storage\.{permission} .*roles/storage\.objectUser"
    ):
        check_access(path_of("gs://bucket/run"), write=True)


def test_reading_needs_fewer_permissions_and_a_missing_bucket_is_named(bucket):
    """All operations are tried, and nothing is left."""
    folder = path_of("gs://bucket/run")
    check_access(folder, write=True)
    assert bucket.files("gs://bucket") == {}
    check_access(Path("/nowhere"), write=True)  # a local folder is made when something is written there
    bucket.granted = {"storage.buckets.get", "storage.objects.list", "storage.objects.get"}
    check_access(folder, write=False)
    bucket.granted = {"storage.buckets.get"}
    with pytest.raises(ValueError, match=r"listing .*roles/storage\.objectViewer"):
        check_access(folder, write=False)
    with pytest.raises(ValueError, match="getting the metadata of bucket 'no-such-bucket' failed: 404"):
        check_access(path_of("gs://no-such-bucket/run"), write=True)
