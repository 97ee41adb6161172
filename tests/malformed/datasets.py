"""Malformed data files, by hand and at random."""

import gzip
import io
import json
import zlib

import pyarrow as pa
from pyarrow import parquet

from tests.malformed.mutations import as_json, changed, damaged

ROW = {"prompt": "1+1", "answer": "2"}
LINE = json.dumps(ROW).encode() + b"\n"
ROWS = [
    {"prompt": "1+1", "answer": "2", "level": 1},
    {"prompt": [{"role": "system", "content": "Add."}, {"role": "user", "content": "2+2"}], "answer": 4},
    {"prompt": "3+3", "answer": "6", "extra": {"tags": ["a", None, 1.5], "x": {"y": {}}}},
]
GOOD = b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)

LINES = {
    "nothing": b"",
    "empty lines": b"\n\n\n",
    "white space": b" \t \r\n",
    "zero bytes": b"\x00" * 100,
    "a byte order mark alone": b"\xef\xbb\xbf",
    "UTF-16": LINE.decode().encode("utf-16"),
    "UTF-32": LINE.decode().encode("utf-32"),
    "Latin-1": '{"prompt": "café", "answer": "1"}'.encode("latin-1"),
    "a list in one piece": json.dumps([ROW, ROW]).encode(),
    "an object over several lines": json.dumps(ROW, indent=1).encode(),
    "two objects on a line": LINE.strip() + LINE,
    "objects with commas between": LINE.strip() + b",\n" + LINE.strip() + b",\n",
    "Python's quotes": b"{'prompt': '1', 'answer': '2'}\n",
    "an open text": b'{"prompt": "1',
    "a text with a line break": b'{"prompt": "1\n2", "answer": "1"}',
    "a control character": b'{"prompt": "1\x01", "answer": "1"}',
    "carriage returns alone": b'{"prompt": "1", "answer": "1"}\r{"prompt": "2", "answer": "1"}',
    "brackets without end": b"[" * 200_000 + b"\n",
    "closed brackets": b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b', "answer": "1"}\n',
    "mappings without end": b'{"a": ' * 100_000 + b"\n",
    "a deep field beside": b'{"prompt": "1", "answer": "1", "x": ' + b"[" * 900 + b"]" * 900 + b"}\n",
    "a number of many digits": b'{"prompt": "1", "answer": ' + b"9" * 5000 + b"}\n",
    "a number of many digits beside": b'{"prompt": "1", "answer": "1", "x": ' + b"9" * 4000 + b"}\n",
    "a huge exponent": b'{"prompt": "1", "answer": 1e999999}\n',
    "NaN as answer": b'{"prompt": "1", "answer": NaN}\n',
    "Infinity as prompt": b'{"prompt": Infinity, "answer": "1"}\n',
    "true as answer": b'{"prompt": "1", "answer": true}\n',
    "half a surrogate pair as answer": b'{"prompt": "1", "answer": "\\ud800"}\n',
    "half a surrogate pair beside": b'{"prompt": "1", "answer": "1", "\\udfff": 1}\n',
    "a key twice": b'{"prompt": "1", "prompt": 2, "answer": "1"}\n',
    "an empty key": b'{"": 1}\n',
    "an object as prompt": b'{"prompt": {"role": "user", "content": "1"}, "answer": "1"}\n',
    "a message of numbers": b'{"prompt": [{"role": 1, "content": 2}], "answer": "1"}\n',
    "a message of parts": b'{"prompt": [{"role": "user", "content": [{"type": "text", "text": "1"}]}], "answer": "1"}\n',
    "a message within a message": b'{"prompt": [[{"role": "user", "content": "1"}]], "answer": "1"}\n',
    "a null message": b'{"prompt": [null], "answer": "1"}\n',
    "a blank question": b'{"prompt": [{"role": "user", "content": " "}], "answer": "1"}\n',
    "nobody asks": b'{"prompt": [{"role": "system", "content": "1"}], "answer": "1"}\n',
    "a grader that is named": b'{"prompt": "", "answer": "1", "grader": "os:system"}\n',
    "a line of many letters": b'{"prompt": "' + b"x" * 20_000_000 + b'", "answer": "1"}\n',
    "a first line that is good": LINE + b"x\n",
    "an HTML page": b"<!DOCTYPE html><html><head><title>404</title></head></html>",
    "a pointer of Git LFS": b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n",
    "a CSV file": b"prompt,answer\n1+1,2\n",
    "a pickle": b"\x80\x04\x95\x1e\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94\x8c\x04true\x94\x85\x94R\x94.",
}  # fmt: skip

_ZIPPED = gzip.compress(LINE * 999)
ZIPPED = {
    "nothing": b"",
    "no zip": LINE,
    "cut in the header": _ZIPPED[:5],
    "cut in the middle": _ZIPPED[: len(_ZIPPED) // 2],
    "a wrong checksum": _ZIPPED[:-8] + b"\x00" * 4 + _ZIPPED[-4:],
    "a wrong length": _ZIPPED[:-4] + b"\x00" * 4,
    "a wrong method": b"\x1f\x8b\x07" + _ZIPPED[3:],
    "flipped bits": _ZIPPED[:20] + bytes([_ZIPPED[20] ^ 255]) + _ZIPPED[21:],
    "something behind": _ZIPPED + b"x" * 100,
    "zlib's own format": zlib.compress(LINE),
    "zipped twice": gzip.compress(gzip.compress(LINE)),
    "a name that never ends": b"\x1f\x8b\x08\x08" + b"\x00" * 5 + b"x" * 5000,
    "a bomb of one line": gzip.compress(b'{"prompt": "' + b"x" * (100 << 20), compresslevel=1),
    "a bomb of zero bytes": gzip.compress(b"\x00" * (100 << 20), compresslevel=1),
}  # fmt: skip


def table(columns, **how):
    written = io.BytesIO()
    parquet.write_table(pa.table(columns), written, **how)
    return written.getvalue()


_TABLE = table({"prompt": ["1+1", "2+2"], "answer": ["2", "4"], "level": [1, 2]})
_PLAIN = table(
    {"prompt": ["1+1", "2+2"], "answer": ["2", "4"], "level": [1, 2]},
    compression="none", use_dictionary=False, write_statistics=False,
)  # fmt: skip
TABLES = {
    "nothing": b"",
    "the magic alone": b"PAR1",
    "the magic twice": b"PAR1PAR1",
    "no footer": _TABLE[:-8],
    "no end": _TABLE[:-4],
    "no beginning": _TABLE[4:],
    "half": _TABLE[: len(_TABLE) // 2],
    "a footer of zero bytes": b"PAR1" + b"\x00" * 4 + b"PAR1",
    "a footer that is longer than the file": b"PAR1" + b"\x00" * 20 + b"\xff\xff\xff\x7f" + b"PAR1",
    "a negative footer": b"PAR1" + b"\x00" * 20 + b"\xff\xff\xff\xff" + b"PAR1",
    "a footer of nonsense": b"PAR1" + bytes(range(256)) + b"\x00\x01\x00\x00" + b"PAR1",
    "an encrypted footer": _TABLE[:-4] + b"PARE",
    "pages of zero bytes": _TABLE[:4] + b"\x00" * 60 + _TABLE[64:],
    "pages of nonsense": _PLAIN[:30] + b"\xff" * 40 + _PLAIN[70:],
    "no rows": table({"prompt": pa.array([], pa.string()), "answer": pa.array([], pa.string())}),
    "no columns": table({}),
    "other columns": table({"question": ["1+1"], "answer": ["2"]}),
    "null as prompt": table({"prompt": pa.array([None], pa.string()), "answer": ["2"]}),
    "columns of nulls": table({"prompt": pa.nulls(2), "answer": pa.nulls(2)}),
    "a number as prompt": table({"prompt": [1.5], "answer": ["2"]}),
    "a fraction as answer": table({"prompt": ["1"], "answer": [2.5]}),
    "bytes as prompt": table({"prompt": [b"1+1"], "answer": ["2"]}),
    "text that is not UTF-8": table({"prompt": pa.Array.from_buffers(pa.string(), 1, pa.array([b"\xff\xfe"]).buffers()), "answer": ["2"]}),
    "messages without a role": table({"prompt": [[{"content": "1"}]], "answer": ["2"]}),
    "an empty list of messages": table({"prompt": pa.array([[]], pa.list_(pa.string())), "answer": ["2"]}),
    "a date far away": table({"prompt": ["1"], "answer": ["2"], "when": pa.array([2**62], pa.timestamp("us"))}),
    "a decimal": table({"prompt": ["1"], "answer": pa.array([1], pa.decimal128(5))}),
    "a map": table({"prompt": ["1"], "answer": ["1"], "m": pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int32()))}),
    "a duration": table({"prompt": ["1"], "answer": ["1"], "d": pa.array([2**62], pa.duration("us"))}),
}  # fmt: skip
del _ZIPPED

KINDS = {"jsonl": LINES, "jsonl.gz": ZIPPED, "parquet": TABLES}


def prepare(kind):
    return "data", "prepare", "jsonl", "--from", f"data.{kind}", "--data-dir", "kept"


def fuzzed(rng):
    """Kind and bytes of a file that is damaged."""
    kind = ("jsonl", "jsonl.gz", "parquet", "parquet")[rng.integers(4)]
    if kind == "parquet":
        return kind, damaged((_TABLE, _PLAIN)[rng.integers(2)], rng)
    if kind == "jsonl.gz":
        return kind, damaged(gzip.compress(GOOD, mtime=0), rng)
    if rng.integers(2):
        return kind, damaged(GOOD, rng)
    return kind, b"\n".join(as_json(changed(row, rng)) for row in ROWS)
