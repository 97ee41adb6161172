"""GGUF files that are wrong, by hand and at random. The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md."""

import struct
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from dapo_jax.testing import tiny_decoder_config, tiny_params
from tests.malformed.mutations import damaged
from tests.models.gguf_files import TOKENS, write_gguf

CONFIG = tiny_decoder_config(
    vocab_size=len(TOKENS), embed_dim=8, layers=1, heads=2, kv_heads=1, head_dim=4, mlp_dim=8
)
CONVERT = ("convert", "model.gguf", "out")


@cache
def whole(**how):
    """The bytes of a small file that is as it should be, but for `how`."""
    with TemporaryDirectory() as folder:
        return write_gguf(Path(folder) / "model.gguf", CONFIG, tiny_params(CONFIG), **how).read_bytes()


def _extra(**changes):
    return lambda: _written(extra={key.replace("__", "."): value for key, value in changes.items()})


def _written(**how):
    with TemporaryDirectory() as folder:
        return write_gguf(Path(folder) / "model.gguf", CONFIG, tiny_params(CONFIG), **how).read_bytes()


def head(tensors=0, entries=0, version=3, magic=b"GGUF"):
    return magic + struct.pack("<IQQ", version, tensors, entries)


def text(value):
    value = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(value)) + value


def value(key, kind, content):
    return text(key) + struct.pack("<I", kind) + content


def array(kind, count, content=b""):
    return struct.pack("<IQ", kind, count) + content


ARCHITECTURE = value("general.architecture", 8, text("llama"))


def tensor(name="token_embd.weight", dims=(8, 4), kind=0, offset=0):
    return (
        text(name)
        + struct.pack("<I", len(dims))
        + struct.pack(f"<{len(dims)}Q", *dims)
        + struct.pack("<IQ", kind, offset)
    )


FILES = {
    "nothing": lambda: b"",
    "the magic alone": lambda: b"GGUF",
    "another magic": lambda: head(magic=b"GGML"),
    "the other byte order": lambda: b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "version 0": lambda: head(version=0),
    "version 1": lambda: head(version=1),
    "version 99": lambda: head(version=99),
    "no head": lambda: whole()[24:],
    "no entries": lambda: head(),
    "2**63 tensors": lambda: head(tensors=2**63),
    "2**40 tensors": lambda: head(tensors=2**40) + b"\x00" * 4096,
    "2**63 entries": lambda: head(entries=2**63),
    "2**40 entries": lambda: head(entries=2**40) + b"\x00" * 4096,
    "a key of 2**63 letters": lambda: head(entries=1) + struct.pack("<Q", 2**63) + b"x" * 64,
    "a key of 2**64 - 1 letters": lambda: head(entries=1) + struct.pack("<Q", 2**64 - 1) + b"x" * 64,
    "a key beyond the file": lambda: head(entries=1) + struct.pack("<Q", 1000) + b"x",
    "an empty key": lambda: head(entries=1) + value("", 4, b"\x01\x00\x00\x00"),
    "a key that is not UTF-8": lambda: head(entries=1) + value(b"\xff\xfe", 4, b"\x01\x00\x00\x00"),
    "a key twice": lambda: head(entries=2) + ARCHITECTURE * 2,
    "an unknown type": lambda: head(entries=1) + value("a", 99, b"\x00" * 8),
    "a text of 2**62 letters": lambda: head(entries=1) + value("a", 8, struct.pack("<Q", 2**62)),
    "a text that is not UTF-8": lambda: head(entries=1) + value("general.architecture", 8, text(b"\xff\xfe")),
    "a list of 2**40 numbers": lambda: head(entries=1) + value("a", 9, array(4, 2**40, b"\x00" * 64)),
    "a list of 2**63 texts": lambda: head(entries=1) + value("a", 9, array(8, 2**63, b"\x00" * 64)),
    "a list of 10**8 numbers of a byte": lambda: head(entries=1) + value("a", 9, array(0, 10**8, b"\x00" * 64)),
    "lists of lists": lambda: head(entries=1) + value("a", 9, array(9, 1) * 3000 + array(4, 0)),
    "a list of an unknown type": lambda: head(entries=1) + value("a", 9, array(77, 3, b"\x00" * 64)),
    "a truth value of 7": lambda: head(entries=1) + value("a", 7, b"\x07"),
    "an alignment of 0": lambda: head(entries=1) + value("general.alignment", 4, struct.pack("<I", 0)),
    "an alignment of 3": lambda: head(entries=1) + value("general.alignment", 4, struct.pack("<I", 3)),
    "an alignment of 2**31": lambda: head(entries=1) + value("general.alignment", 4, struct.pack("<I", 2**31)),
    "an alignment that is a text": lambda: head(entries=1) + value("general.alignment", 8, text("32")),
    "an architecture that is a number": lambda: head(entries=1) + value("general.architecture", 4, struct.pack("<I", 3)),
    "an architecture that is a list": lambda: head(entries=1) + value("general.architecture", 9, array(4, 0)),
    "another architecture": lambda: head(entries=1) + value("general.architecture", 8, text("gpt2")),
    "an architecture alone": lambda: head(entries=1) + ARCHITECTURE,
    "a tensor of 2**32 axes": lambda: head(1, 1) + ARCHITECTURE + text("a") + struct.pack("<I", 2**32 - 1),
    "a tensor of 200 axes": lambda: head(1, 1) + ARCHITECTURE + tensor(dims=(1,) * 200) + b"\x00" * 4096,
    "a tensor without axes": lambda: head(1, 1) + ARCHITECTURE + tensor(dims=()) + b"\x00" * 4096,
    "a tensor of no rows": lambda: head(1, 1) + ARCHITECTURE + tensor(dims=(0, 0)) + b"\x00" * 4096,
    "a tensor of 2**62 rows": lambda: head(1, 1) + ARCHITECTURE + tensor(dims=(8, 2**62)) + b"\x00" * 4096,
    "a tensor whose size overflows": lambda: head(1, 1) + ARCHITECTURE + tensor(dims=(2**32, 2**32)) + b"\x00" * 4096,
    "a tensor of an unknown type": lambda: head(1, 1) + ARCHITECTURE + tensor(kind=500) + b"\x00" * 4096,
    "a tensor of integers": lambda: head(1, 1) + ARCHITECTURE + tensor(kind=26) + b"\x00" * 4096,
    "a tensor of broken blocks": lambda: head(1, 1) + ARCHITECTURE + tensor(dims=(5, 3), kind=2) + b"\x00" * 4096,
    "a tensor beyond the file": lambda: head(1, 1) + ARCHITECTURE + tensor(offset=2**40) + b"\x00" * 4096,
    "a tensor at 2**64 - 1": lambda: head(1, 1) + ARCHITECTURE + tensor(offset=2**64 - 1) + b"\x00" * 4096,
    "a tensor twice": lambda: head(2, 1) + ARCHITECTURE + tensor() * 2 + b"\x00" * 4096,
    "a tensor whose name is a path": lambda: head(1, 1) + ARCHITECTURE + tensor("../../x") + b"\x00" * 4096,
    "half": lambda: whole()[: len(whole()) // 2],
    "no last tensor": lambda: whole()[:-200],
    "no heads": _extra(llama__attention__head_count=0),
    "heads as a list": _extra(llama__attention__head_count=[2]),
    "heads as text": _extra(llama__attention__head_count="2"),
    "heads as a fraction": _extra(llama__attention__head_count=2.5),
    "heads as truth": _extra(llama__attention__head_count=True),
    "too many heads": _extra(llama__attention__head_count=4_000_000_000),
    "too few heads for keys": _extra(llama__attention__head_count_kv=3),
    "heads that do not divide the rows": _extra(llama__attention__head_count=3, llama__attention__head_count_kv=3),
    "no layers": _extra(llama__block_count=0),
    "four billion layers": _extra(llama__block_count=4_000_000_000),
    "a context of nothing": _extra(llama__context_length=0),
    "a width of nothing": _extra(llama__embedding_length=0),
    "a width of another": _extra(llama__embedding_length=16),
    "rows of nothing": _extra(llama__feed_forward_length=0),
    "a base of 0": _extra(llama__rope__freq_base=0.0),
    "a base of NaN": _extra(llama__rope__freq_base=float("nan")),
    "a base of infinity": _extra(llama__rope__freq_base=float("inf")),
    "a norm of NaN": _extra(llama__attention__layer_norm_rms_epsilon=float("nan")),
    "a norm below 0": _extra(llama__attention__layer_norm_rms_epsilon=-1.0),
    "scaling that is a number": _extra(llama__rope__scaling__type=3),
    "scaling without a factor": _extra(llama__rope__scaling__type="linear"),
    "scaling by NaN": _extra(llama__rope__scaling__type="linear", llama__rope__scaling__factor=float("nan")),
    "scaling by text": _extra(llama__rope__scaling__type="yarn", llama__rope__scaling__factor="x"),
    "scaling by nothing": _extra(llama__rope__scaling__type="yarn", llama__rope__scaling__factor=0.0, llama__rope__scaling__original_context_length=0),
    "experts": _extra(llama__expert_count=8),
    "an end token beyond": _extra(tokenizer__ggml__eos_token_id=4_000_000_000),
    "an end token that is a text": _extra(tokenizer__ggml__eos_token_id="2"),
    "an end token that is a list": _extra(tokenizer__ggml__eos_token_id=[2]),
    "a turn's end beyond": _extra(tokenizer__ggml__eot_token_id=4_000_000_000),
    "another tokenizer": _extra(tokenizer__ggml__model="llama"),
    "a tokenizer that is a list": _extra(tokenizer__ggml__model=["gpt2"]),
    "another way to cut": lambda: _written(pre="x"),
    "a way to cut that is a list": lambda: _written(pre=["x"]),
    "a chat template that is a number": _extra(tokenizer__chat_template=3),
    "a chat template of lists": _extra(tokenizer__chat_template=["a"]),
    "too few types": lambda: _written(types=(1, 1)),
    "types of text": lambda: _written(types=("x",) * len(TOKENS)),
}  # fmt: skip


def fuzzed(rng):
    """A file that is damaged before its tensors, where all is said."""
    content = whole()
    said = content.index(b"blk.0.ffn_down.weight") + 64
    kind = rng.integers(3)
    if kind == 0:
        return damaged(content[:said], rng) + content[said:]
    place = int(rng.integers(24)) if kind == 1 else int(rng.integers(said - 8))
    size = (1, 2, 4, 8)[rng.integers(4)]
    number = int((0, 1, 2**31, 2**63, 2**64 - 1, 8, 9, 77)[rng.integers(8)]) % (1 << 8 * size)
    return content[:place] + number.to_bytes(size, "little") + content[place + size :]
