"""Model folders, GGUF files, tokenizers and chat templates that are wrong, by hand and at random."""

import json
import struct
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from dapo_jax.models.folder import save_model
from dapo_jax.testing import tiny_decoder_config, tiny_params
from tests.malformed.mutations import as_json, changed, damaged
from tests.text.folders import files_of

CONFIG = tiny_decoder_config(
    vocab_size=336, embed_dim=8, layers=1, heads=2, kv_heads=1, head_dim=4, mlp_dim=8, max_positions=64
)


@cache
def model_files():
    """Name -> bytes of a model folder of 24 kB that is as it should be."""
    with TemporaryDirectory() as folder:
        save_model(folder, CONFIG, tiny_params(CONFIG))
        files = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    return files | files_of()


def with_file(name, content):
    """Makes a model folder in which one file is another; None: is not there."""

    def make(folder):
        files = model_files() | {name: content}
        (folder / "model").mkdir()
        for file, its in files.items():
            if its is not None:
                (folder / "model" / file).write_bytes(its)

    return make


def with_config(**changes):
    described = json.loads(model_files()["config.json"])
    # Two notations of one thing: what is to be wrong must be the only one.
    described |= {"rope_parameters": None} if changes.keys() & {"rope_theta", "rope_scaling"} else {}
    described |= changes
    kept = {key: value for key, value in described.items() if value != "absent"}
    return with_file("config.json", as_json(kept))


CONVERT = ("convert", "model", "out")

SWAPS = {
    "vocab_size": (0, -1, 1, 2**40, 2**70, 3.5, "336", True, [], None, "absent"),
    "hidden_size": (0, 7, 2**40, "8", "absent"),
    "num_hidden_layers": (0, -1, 2, 10**9, 1.0, "absent"),
    "num_attention_heads": (0, 3, -2, 10**12, "2", None, [2], "absent"),
    "num_key_value_heads": (0, 3, -1, "1"),
    "head_dim": (0, 3, 5, "4"),
    "intermediate_size": (0, 9, "absent"),
    "rms_norm_eps": (0, -1e-5, float("nan"), float("inf"), "1e-5", "absent"),
    "max_position_embeddings": (0, -1, 2**80, "64"),
    "tie_word_embeddings": (0, "true", []),
    "model_type": (None, "", "gpt2", 3, [], {}),
    "architectures": ([], "LlamaForCausalLM", [3], {"a": 1}, ["GPT2LMHeadModel"]),
    "rope_theta": (0, -1, "10000", [], float("nan"), 10**400),
    "rope_scaling": ([], "linear", 3, {"type": "x"}, {"rope_type": "linear"}, {"rope_type": "llama3", "factor": "x"}, {"rope_type": ["a"], "factor": 2}),
    "rope_parameters": ([1], "x", {"rope_theta": None}, {"rope_theta": "x"}, {"rope_type": {}}, {"full_attention": {"rope_theta": 1}}),
    "layer_types": ("full_attention", [1], 3, {"a": 1}, [None, "x"], [["x"]]),
    "hidden_act": ("gelu", [], {}),
    "quantization_config": ({"bits": 4}, [], 0),
    "auto_map": ({"AutoModel": "evil.py--x"},),
    "eos_token_id": ("x", [None], {}, -1, 2**70, [2**40], 3.5, True),
    "pad_token_id": ("x", -1, 2**70, [], {}),
}  # fmt: skip
"""Values of config.json: each makes another folder."""

CONFIGS = {
    "nothing": b"",
    "null": b"null",
    "a list": b"[]",
    "not UTF-8": b'{"a": "\xff"}',
    "a byte order mark": b"\xef\xbb\xbf{}",
    "brackets without end": b"[" * 200_000,
    "a huge number": b'{"vocab_size": ' + b"9" * 5000 + b"}",
    "half": None,
}  # fmt: skip


def config_cases():
    whole = model_files()["config.json"]
    for name, content in CONFIGS.items():
        yield name, with_file("config.json", whole[: len(whole) // 2] if content is None else content)
    yield "no file", with_file("config.json", None)
    for key, values in SWAPS.items():
        for value in values:
            yield f"{key}={value!r:.20}", with_config(**{key: value})


def tensors(header, data=b"", length=None):
    """A safetensors file of any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(shape=(2,), offsets=(0, 8), dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


EIGHT = b"\x00" * 8
SAFETENSORS = {
    "nothing": b"",
    "seven bytes": b"\x00" * 7,
    "a length of zero": tensors(b"", length=0),
    "a length beyond the file": tensors({"a": entry()}, EIGHT, length=10**6),
    "a length of 2**64 - 1": tensors(b"{}", length=2**64 - 1),
    "a length of 2**63": tensors(b"{}", length=2**63),
    "a length of 100 MB and a byte": tensors(b"{}", length=100_000_001),
    "no JSON": tensors(b"xxxxxxxx"),
    "a list": tensors(b"[]      "),
    "null": tensors(b"null    "),
    "brackets without end": tensors(b"[" * 100_000),
    "a deep entry": tensors(b'{"a":' * 50_000),
    "not UTF-8": tensors(b'{"\xff": 1}'),
    "no tensors": tensors({}),
    "only metadata": tensors({"__metadata__": {"format": "pt"}}),
    "metadata of numbers": tensors({"__metadata__": {"format": 3}}),
    "an entry that is a number": tensors({"a": 3}),
    "an entry without a type": tensors({"a": {"shape": [2], "data_offsets": [0, 8]}}, EIGHT),
    "an unknown type": tensors({"a": entry(dtype="F33")}, EIGHT),
    "a type that is not covered": tensors({"a": entry(dtype="I32")}, EIGHT),
    "a complex type": tensors({"a": entry((1,), dtype="C64")}, EIGHT),
    "an 8-bit float": tensors({"a": entry((8,), dtype="F8_E4M3")}, EIGHT),
    "a 4-bit float": tensors({"a": entry((16,), dtype="F4")}, EIGHT),
    "a negative shape": tensors({"a": entry((-2,))}, EIGHT),
    "a shape of texts": tensors({"a": entry(("2",))}, EIGHT),
    "a shape that is too large": tensors({"a": entry((3,))}, EIGHT),
    "a shape whose product overflows": tensors({"a": entry((2**32, 2**32, 4))}, EIGHT),
    "a shape of many axes": tensors({"a": entry((1,) * 10_000 + (2,))}, EIGHT),
    "an axis of 2**63": tensors({"a": entry((2**63, 0), (0, 0))}),
    "offsets beyond the file": tensors({"a": entry(offsets=(0, 80), shape=(20,))}, EIGHT),
    "offsets of 2**64": tensors({"a": entry(offsets=(0, 2**64))}, EIGHT),
    "offsets the wrong way": tensors({"a": entry(offsets=(8, 0))}, EIGHT),
    "a single offset": tensors({"a": entry(offsets=(0,))}, EIGHT),
    "offsets that overlap": tensors({"a": entry(), "b": entry()}, EIGHT),
    "a gap": tensors({"a": entry(), "b": entry(offsets=(16, 24))}, EIGHT * 3),
    "data behind": tensors({"a": entry()}, EIGHT * 2),
    "a name twice": tensors(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', EIGHT),
    "a name that is a path": tensors({"../../x": entry()}, EIGHT),
    "an empty name": tensors({"": entry()}, EIGHT),
    "a name of many letters": tensors({"x" * 100_000: entry()}, EIGHT),
    "many tensors": tensors({f"t{i}": entry((0,), (0, 0)) for i in range(20_000)}),
    "a scalar": tensors({"a": entry((), (0, 4))}, EIGHT[:4]),
    "a pickle": b"\x80\x04\x95\x1e\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94\x8c\x04true\x94\x85\x94R\x94.",
    "a zip, as torch writes it": b"PK\x03\x04" + b"\x00" * 60,
    "a pointer of Git LFS": b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n",
    "an HTML page": b"<!DOCTYPE html><html></html>",
}  # fmt: skip


def index(weight_map):
    """A folder whose tensors an index names, beside none of its own."""

    def make(folder):
        with_file("model.safetensors", None)(folder)
        (folder / "model" / "a.safetensors").write_bytes(model_files()["model.safetensors"])
        (folder / "outside.safetensors").write_bytes(model_files()["model.safetensors"])
        content = weight_map if isinstance(weight_map, bytes) else json.dumps(weight_map).encode()
        (folder / "model" / "model.safetensors.index.json").write_bytes(content)

    return make


INDEXES = {
    "nothing": b"",
    "a list": [],
    "no map": {},
    "an empty map": {"weight_map": {}},
    "a list as map": {"weight_map": ["a.safetensors"]},
    "a number as file": {"weight_map": {"x": 3}},
    "null as file": {"weight_map": {"x": None}},
    "no name": {"weight_map": {"x": ""}},
    "a dot": {"weight_map": {"x": "."}},
    "two dots": {"weight_map": {"x": ".."}},
    "a path out of the folder": {"weight_map": {"x": "../outside.safetensors"}},
    "a path out and in again": {"weight_map": {"x": "../model/a.safetensors"}},
    "an absolute path": {"weight_map": {"x": "/etc/passwd"}},
    "a device": {"weight_map": {"x": "/dev/zero"}},
    "a zero byte": {"weight_map": {"x": "a\x00b"}},
    "a name of many letters": {"weight_map": {"x": "a" * 5000}},
    "half a surrogate pair": {"weight_map": {"x": "\ud800"}},
    "a missing file": {"weight_map": {"x": "b.safetensors"}},
    "a tensor that the file lacks": {"weight_map": {"x": "a.safetensors"}},
    "another kind of file": {"weight_map": {"x": "config.json"}},
    "brackets without end": b"[" * 100_000,
    "a huge number": b'{"weight_map": {"x": ' + b"9" * 5000 + b"}}",
}  # fmt: skip


def fuzzed_folder(rng):
    """Makes a folder whose config.json or weights are damaged."""
    files = model_files()
    if rng.integers(3) == 0:
        return with_file("config.json", as_json(changed(json.loads(files["config.json"]), rng)))
    whole = files["model.safetensors"]
    length = struct.unpack("<Q", whole[:8])[0]
    if rng.integers(2):
        header = as_json(changed(json.loads(whole[8 : 8 + length]), rng))
        return with_file("model.safetensors", tensors(header, whole[8 + length :]))
    return with_file("model.safetensors", damaged(whole[: 8 + length], rng) + whole[8 + length :])
