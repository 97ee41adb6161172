"""Files that are wrong in every way that we thought of, and in many that nobody did: at most a few lines and a status.

Each goes through the command that a user would run. An input that happens to be fine is taken; all others end with status 1 or 2,
within the time limit, in a process that is still there, and with nothing written but where the command was told to write.
"""

import os

import numpy as np
import pytest

pytest.importorskip("gguf")

from tests.malformed import configs, datasets, gguf_inputs, models, tokenizers
from tests.malformed.mutations import as_json

CONFIG = ("config", "c.yaml")
SPARED = ("kept", "out")
"""Folders that commands are told to write to."""


def put(name, content):
    """Makes a file."""

    def make(folder):
        (folder / name).write_bytes(content() if callable(content) else content)

    return make


def by_hand():
    """Kind, name, what makes the files, and the command."""
    for name, content in configs.FILES.items():
        yield "configuration", name, put("c.yaml", content), CONFIG
    for name, override in configs.OVERRIDES.items():
        yield "override", name, put("c.yaml", configs.GOOD), (*CONFIG, override)
    for kind, files in datasets.KINDS.items():
        for name, content in files.items():
            yield kind, name, put(f"data.{kind}", content), datasets.prepare(kind)
    for name, make in models.config_cases():
        yield "config.json", name, make, models.CONVERT
    for name, content in models.SAFETENSORS.items():
        yield "safetensors", name, models.with_file("model.safetensors", content), models.CONVERT
    for name, content in models.INDEXES.items():
        yield "index", name, models.index(content), models.CONVERT
    for name, content in tokenizers.TOKENIZERS.items():
        yield "tokenizer", name, tokenizers.with_tokenizer("tokenizer.json", content), tokenizers.SHOW
    for name, (file, content) in tokenizers.SIDE_FILES.items():
        made = content if isinstance(content, bytes) else as_json(content)
        yield "beside a tokenizer", name, tokenizers.with_tokenizer(file, made), tokenizers.SHOW
    for name, content in tokenizers.TEMPLATES.items():
        yield "chat template", name, tokenizers.template(content), tokenizers.CHAT
    for name, content in gguf_inputs.FILES.items():
        yield "GGUF", name, put("model.gguf", content), gguf_inputs.CONVERT


BY_HAND = list(by_hand())
assert len(BY_HAND) >= 500


@pytest.mark.parametrize(
    ("make", "command"),
    [pytest.param(*how, id=f"{kind}: {name}") for kind, name, *how in BY_HAND],
)
def test_what_is_wrong_is_said_in_a_few_lines(make, command, survives):
    survives(make, *command, may_write=SPARED)


STRANGE = {
    "a folder": lambda path: path.mkdir(),
    "a pipe": os.mkfifo,
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to nowhere": lambda path: path.symlink_to("nowhere"),
    "a device without end": lambda path: path.symlink_to("/dev/zero"),
    "an empty device": lambda path: path.symlink_to("/dev/null"),
}
PLACES = {
    "a configuration": ("c.yaml", put("c.yaml", b""), CONFIG),
    "a configuration to train": ("c.yaml", put("c.yaml", b""), ("train", "c.yaml")),
    "rows": ("data.jsonl", put("data.jsonl", b""), datasets.prepare("jsonl")),
    "zipped rows": ("data.jsonl.gz", put("data.jsonl.gz", b""), datasets.prepare("jsonl.gz")),
    "a table": ("data.parquet", put("data.parquet", b""), datasets.prepare("parquet")),
    "config.json": ("model/config.json", models.with_file("x", b""), models.CONVERT),
    "weights": ("model/model.safetensors", models.with_file("x", b""), models.CONVERT),
    "an index": ("model/model.safetensors.index.json", models.index(b"{}"), models.CONVERT),
    "a tokenizer": ("model/tokenizer.json", tokenizers.with_tokenizer("x", b""), tokenizers.SHOW),
    "its options": ("model/tokenizer_config.json", tokenizers.with_tokenizer("x", b""), tokenizers.SHOW),
    "a chat template": ("model/chat_template.jinja", tokenizers.with_tokenizer("x", b""), tokenizers.CHAT),
    "a GGUF file": ("model.gguf", put("model.gguf", b""), gguf_inputs.CONVERT),
}  # fmt: skip


@pytest.mark.parametrize("strange", STRANGE)
@pytest.mark.parametrize("place", PLACES)
def test_what_is_no_file_is_said_too(place, strange, survives):
    name, others, command = PLACES[place]

    def make(folder):
        others(folder)
        (folder / name).unlink(missing_ok=True)
        STRANGE[strange](folder / name)

    survives(make, *command, may_write=SPARED)


def _configuration(rng):
    return put("c.yaml", configs.fuzzed(rng)), CONFIG


def _rows(rng):
    kind, content = datasets.fuzzed(rng)
    return put(f"data.{kind}", content), datasets.prepare(kind)


def _folder(rng):
    return models.fuzzed_folder(rng), models.CONVERT


def _gguf(rng):
    return put("model.gguf", gguf_inputs.fuzzed(rng)), gguf_inputs.CONVERT


FUZZED = {
    "configurations": _configuration,
    "rows": _rows,
    "model folders": _folder,
    "tokenizers and templates": tokenizers.fuzzed,
    "GGUF files": _gguf,
}


@pytest.mark.parametrize(
    ("seed", "count"), [(0, 24), pytest.param(1, 1000, marks=pytest.mark.slow, id="many")]
)
@pytest.mark.parametrize("kind", FUZZED)
def test_damage_at_random_is_said_in_a_few_lines(kind, seed, count, survives, tmp_path):
    rng = np.random.default_rng(seed)
    for _ in range(count):
        survives.anew()
        make, command = FUZZED[kind](rng)
        survives(make, *command, may_write=SPARED)
