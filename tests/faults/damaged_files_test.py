"""Damaged, half-written and missing files: a command ends with status 1 or 2 and a short message, and writes nothing elsewhere.

An input that happens to be intact is accepted.
"""

import gzip
import io
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pytest
import yaml
from pyarrow import parquet

pytest.importorskip("gguf")

from dapo_jax.cli import main
from dapo_jax.config import load_config, to_yaml
from dapo_jax.dapo.rollouts import Group, Prompt, Response, Rollout, Verdict
from dapo_jax.dapo.tokens import Tokens
from dapo_jax.models.folder import save_model
from dapo_jax.testing import tiny_decoder_config, tiny_params
from dapo_jax.trackers.rollout_log import write_rollouts
from tests.models.gguf_files import TOKENS, write_gguf
from tests.several import ROOT
from tests.text.folders import files_of

MOST_LINES, MOST_CHARACTERS = 6, 2000
QUICKSTART = (ROOT / "configs" / "quickstart.yaml").read_bytes()
CONFIG = ("config", "c.yaml")
CONVERT = ("convert", "model", "out")
CONVERT_GGUF = ("convert", "model.gguf", "out")
SHOW = ("data", "show", "jsonl", "--from", "data.jsonl", "--data-dir", "kept", "--model", "model")
SAMPLE = ("sample", "run", "--prompt", "1", "--max-response-tokens", "2")
SCORE = ("score", "run/rollouts", "--grader", "exact", "--workers", "0")
MAY_WRITE = ("here/kept", "here/out", "here/run")
LOG = "rollouts/step_000001.jsonl"

ANY = {
    "nothing": lambda good: b"",
    "half": lambda good: good[: len(good) // 2],
    "without its beginning": lambda good: good[9:],
    "a block of zeros": lambda good: good[: len(good) // 3] + bytes(64) + good[len(good) // 3 + 64 :],
    "a pointer of Git LFS": lambda good: (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12\n"
    ),
    "an HTML page": lambda good: b"<!DOCTYPE html><html></html>",
}
"""Damage that any file may suffer: an interrupted copy or download, a crash of the machine, a wrong file."""


MODEL = tiny_decoder_config(
    vocab_size=336, embed_dim=8, layers=1, heads=2, kv_heads=1, head_dim=4, mlp_dim=8, max_positions=64
)
ROWS = b"".join(b'{"prompt": "%d+1", "answer": "%d"}\n' % (number, number + 1) for number in range(4))


@cache
def model_files():
    """Returns name -> bytes of an intact model folder of 24 kB."""
    with TemporaryDirectory() as folder:
        save_model(folder, MODEL, tiny_params(MODEL))
        files = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    return files | files_of()


@cache
def gguf_bytes():
    """Returns the bytes of an intact GGUF file."""
    config = tiny_decoder_config(
        vocab_size=len(TOKENS), embed_dim=8, layers=1, heads=2, kv_heads=1, head_dim=4, mlp_dim=8
    )
    with TemporaryDirectory() as folder:
        return write_gguf(Path(folder) / "model.gguf", config, tiny_params(config)).read_bytes()


def with_file(name, content):
    """Returns a function that makes the folder `model` and data for it, with another content of one file; None leaves it out."""

    def make(folder):
        (folder / "model").mkdir()
        (folder / "data.jsonl").write_bytes(ROWS)
        for file, its in (model_files() | {name: content}).items():
            if its is not None:
                (folder / "model" / file).write_bytes(its)

    return make


def table_bytes():
    written = io.BytesIO()
    parquet.write_table(pa.table({"prompt": ["1+1", "2+2"], "answer": ["2", "4"]}), written)
    return written.getvalue()


def put(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def prepare(kind):
    return "data", "prepare", "jsonl", "--from", f"data.{kind}", "--data-dir", "kept"


def lay_out(folder):
    """Makes a model, data, and a run with its configuration and rollouts."""
    with_file("x", b"")(folder)
    settings = {
        "run_dir": "run",
        "steps": 1,
        "model": {"source": "model"},
        "data": {"source": "jsonl", "path": "data.jsonl", "max_prompt_tokens": 40},
        "sampling": {"slots": 8, "max_response_tokens": 4},
        "reward": {"overlong": {"buffer_tokens": 2}},
        "eval": {"datasets": [{"source": "jsonl", "path": "data.jsonl"}]},
    }
    (folder / "c.yaml").write_text(yaml.safe_dump(settings))
    (folder / "run" / "checkpoints").mkdir(parents=True)
    (folder / "run" / "config.yaml").write_text(to_yaml(load_config(folder / "c.yaml")))
    one = np.array([1], np.int32)
    response = Response(record=Tokens(one), finish_reason="stop")
    rollout = Rollout(response=response, text="2", verdict=Verdict(correct=True), reward=1.0)
    row = {"prompt": "1+1", "answer": "2"}
    prompt = Prompt(ordinal=0, tokens=one, text="1+1", answer="2", row=row)
    write_rollouts(folder / "run" / "rollouts", 1, [Group(prompt=prompt, rollouts=(rollout, rollout))])


def of_a_run(name, change):
    """Makes a run in which a file's bytes are changed."""

    def make(folder):
        lay_out(folder)
        path = folder / "run" / name
        path.write_bytes(change(path.read_bytes()))

    return make


GOOD = {
    "c.yaml": (lambda content: put("c.yaml", content), QUICKSTART, CONFIG),
    "rows": (lambda content: put("data.jsonl", content), ROWS, prepare("jsonl")),
    "zipped rows": (
        lambda content: put("data.jsonl.gz", content), gzip.compress(ROWS, mtime=0), prepare("jsonl.gz"),
    ),
    "a table": (
        lambda content: put("data.parquet", content), table_bytes(), prepare("parquet"),
    ),
    **{
        name: (lambda content, name=name: with_file(name, content), model_files()[name], CONVERT)
        for name in ("config.json", "model.safetensors")
    },
    **{
        name: (lambda content, name=name: with_file(name, content), model_files()[name], SHOW)
        for name in ("tokenizer.json", "tokenizer_config.json")
    },
    "GGUF": (lambda content: put("model.gguf", content), gguf_bytes(), CONVERT_GGUF),
    "a run's config.yaml": (lambda content: of_a_run("config.yaml", lambda _: content), None, SAMPLE),
    "a run's rollouts": (lambda content: of_a_run(LOG, lambda _: content), None, SCORE),
}  # fmt: skip
"""Kind -> a function of its bytes that makes the files, intact bytes (None: the bytes that `lay_out` writes), and the command that reads it."""


def good_bytes(kind, folder):
    if (good := GOOD[kind][1]) is not None:
        return good
    lay_out(folder)
    return (folder / "run" / {"a run's config.yaml": "config.yaml"}.get(kind, LOG)).read_bytes()


MISSING = {
    "no config.json": (with_file("config.json", None), CONVERT),
    "no weights": (with_file("model.safetensors", None), CONVERT),
    "no tokenizer": (with_file("tokenizer.json", None), SHOW),
    "a run whose model is gone": (of_a_run("config.yaml", lambda old: old.replace(b"source: model", b"source: gone")), SAMPLE),
    "a run without checkpoints": (lay_out, SAMPLE),
}  # fmt: skip


def listing(folder):
    """Returns size and time of change of every file in a folder."""
    files = (path for path in folder.rglob("*") if not path.is_dir() or path.is_symlink())
    return {str(path.relative_to(folder)): (path.lstat().st_size, path.lstat().st_mtime_ns) for path in files}


@pytest.fixture
def survives(tmp_path, monkeypatch, capfd):
    """Makes files, runs a command on them in a folder, and checks its end."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    count = iter(range(10**6))

    def run(make, *argv):
        folder = tmp_path / str(next(count)) / "here"
        folder.mkdir(parents=True)
        (folder.parent / "mine.txt").write_text("not to be touched")
        make(folder)
        monkeypatch.chdir(folder)
        before = listing(folder.parent)
        capfd.readouterr()
        try:
            status = main(list(argv))
        except SystemExit as end:
            status = end.code
        said = capfd.readouterr().err.strip()
        assert status in (0, 1, 2), said
        if status:
            assert said
            assert "Traceback" not in said
            assert len(said.splitlines()) <= MOST_LINES, said
            assert len(said) <= MOST_CHARACTERS, said
        changed = {path for path, _ in before.items() ^ listing(folder.parent).items()}
        assert not [path for path in changed if not path.startswith(MAY_WRITE)]
        return status

    return run


@pytest.mark.parametrize("kind", GOOD)
@pytest.mark.parametrize("damage", ANY)
def test_a_damaged_file_is_reported(kind, damage, survives, tmp_path):
    make, _, command = GOOD[kind]
    status = survives(make(ANY[damage](good_bytes(kind, tmp_path))), *command)
    if damage in ("nothing", "an HTML page"):
        assert status


@pytest.mark.parametrize("name", MISSING)
def test_a_missing_file_is_reported(name, survives):
    make, command = MISSING[name]
    assert survives(make, *command)


def damaged(content, rng):
    """Flips a bit, cuts the end, zeroes or removes a block: one to three times."""
    for _ in range(int(rng.integers(1, 4))):
        start = int(rng.integers(max(1, len(content))))
        stop = min(len(content), start + int(rng.integers(1, 64)))
        flipped = bytes([content[start] ^ (1 << int(rng.integers(8)))]) if content else b""
        content = (
            content[:start] + flipped + content[start + 1 :],
            content[:start],
            content[:start] + bytes(stop - start) + content[stop:],
            content[:start] + content[stop:],
        )[rng.integers(4)]
    return content


@pytest.mark.parametrize(("seed", "count"), [(0, 8), pytest.param(1, 300, marks=pytest.mark.slow, id="many")])
@pytest.mark.parametrize("kind", GOOD)
def test_damage_at_random_is_reported(kind, seed, count, survives, tmp_path):
    rng = np.random.default_rng(seed)
    make, _, command = GOOD[kind]
    good = good_bytes(kind, tmp_path)
    for _ in range(count):
        # Of a large file its beginning, where its description is.
        survives(make(damaged(good[:4000], rng) + good[4000:]), *command)
