"""Malformed configurations, by hand and at random."""

from pathlib import Path

import yaml

from tests.malformed.mutations import as_json, changed, damaged

GOOD = (Path(__file__).parents[2] / "configs" / "quickstart.yaml").read_bytes()
LAUGHS = "a0: &a0 [x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
)
"""Eleven lists, each of nine of the one before: written out, 9**11 = 31 billion entries."""
MERGED = "a0: &a0 {x: 1}\n" + "".join(
    f"a{n}: &a{n} {{{', '.join(f'k{i}: *a{n - 1}' for i in range(9))}}}\n" for n in range(1, 12)
)

FILES = {
    "empty": b"",
    "white space": b" \n\t\n",
    "only a comment": b"# nothing\n",
    "zero bytes": b"\x00" * 64,
    "a list": b"- run_dir: x\n",
    "a number": b"12\n",
    "a text": b"run_dir\n",
    "null": b"null\n",
    "two documents": b"run_dir: x\n---\nrun_dir: y\n",
    "a document end": b"run_dir: x\n...\nrun_dir: y\n",
    "not UTF-8": b"run_dir: caf\xe9\n",
    "UTF-16": "run_dir: x\n".encode("utf-16"),
    "UTF-32": "run_dir: x\n".encode("utf-32"),
    "half a UTF-8 byte order mark": b"\xef\xbbrun_dir: x\n",
    "a tab as indentation": b"model:\n\tsource: x\n",
    "an open quote": b"run_dir: 'x\n",
    "an open bracket": b"run_dir: [x\n",
    "an unknown anchor": b"run_dir: *x\n",
    "an anchor of itself": b"run_dir: &a [*a]\n",
    "a mapping that holds itself": b"data: &a {chat_template_kwargs: {a: *a}}\n",
    "a python object": b"run_dir: !!python/object/apply:os.system ['touch written']\n",
    "a python module": b"run_dir: !!python/module:os\n",
    "a python name": b"run_dir: !!python/name:os.system\n",
    "a python tuple": b"run_dir: !!python/tuple [1, 2]\n",
    "a tag of its own": b"run_dir: !mine x\n",
    "binary": b"run_dir: !!binary aGVsbG8=\n",
    "a set": b"run_dir: !!set {a, b}\n",
    "a date": b"run_dir: 2001-12-14\n",
    "an impossible date": b"run_dir: 2001-99-99\n",
    "a key twice": b"run_dir: x\nrun_dir: y\n",
    "a key twice inside": b"run_dir: x\nmodel: {source: a, source: b}\n",
    "a list as key": b"? [1, 2]\n: x\n",
    "a mapping as key": b"? {a: 1}\n: x\n",
    "a number as key": b"1: x\n",
    "a null key": b"~: x\n",
    "an empty key": b"'': x\n",
    "a merge of nothing": b"<<: 3\nrun_dir: x\n",
    "a merge of itself": b"a: &a\n  <<: *a\n",
    "a billion laughs": LAUGHS.encode(),
    "a billion laughs of mappings": MERGED.encode(),
    "brackets without end": b"run_dir: " + b"[" * 100_000,
    "closed brackets": b"run_dir: " + b"[" * 5000 + b"]" * 5000,
    "braces without end": b"{a: " * 20_000,
    "sections without end": b"".join(b" " * n + b"a:\n" for n in range(1200)),
    "dashes without end": b"- " * 50_000,
    "a huge integer": b"run_dir: x\nsteps: " + b"9" * 5000 + b"\n",
    "a huge hexadecimal": b"run_dir: x\nsteps: 0x" + b"f" * 100_000 + b"\n",
    "a huge sexagesimal": b"run_dir: x\nsteps: " + b"1:" * 5000 + b"1\n",
    "a huge exponent": b"run_dir: x\nsteps: 1e999999999\n",
    "a number over 64 bits": b"run_dir: x\nsteps: 36893488147419103232\n",
    "infinity": b"run_dir: x\noptimizer: {learning_rate: .inf}\n",
    "not a number": b"run_dir: x\noptimizer: {learning_rate: .nan}\n",
    "an interpolation": b"run_dir: ${steps}\n",
    "an interpolation of itself": b"run_dir: ${run_dir}\n",
    "an interpolation of the environment": b"run_dir: ${oc.env:HOME}\n",
    "an open interpolation": b"run_dir: ${\n",
    "nested interpolations": b"run_dir: " + b"${" * 500 + b"}" * 500 + b"\n",
    "an interpolated key": b"${steps}: x\n",
    "a placeholder": b"run_dir: ???\n",
    "a text for a section": b"run_dir: x\nmodel: x\n",
    "a list for a section": b"run_dir: x\nmodel: [x]\n",
    "null for a section": b"run_dir: x\nmodel:\n",
    "a section for a text": b"run_dir: {a: b}\n",
    "true for a number": b"run_dir: x\nsteps: true\n",
    "text for a number": b"run_dir: x\nsteps: '3'\n",
    "a fraction for a number": b"run_dir: x\nsteps: 3.5\n",
    "a negative size": b"run_dir: x\nbatch: {group_size: -1}\n",
    "a zero size": b"run_dir: x\nbatch: {group_size: 0}\n",
    "an unknown key of many letters": b"x" * 10_000 + b": 1\n",
    "a very long line": b"run_dir: " + b"x" * 1_000_000 + b"\n",
    "a control character": b"run_dir: a\x07b\n",
    "a zero byte inside": b"run_dir: a\x00b\n",
    "a zero byte that is escaped": b'run_dir: "a\\0b"\n',
    "half a surrogate pair": b'run_dir: "\\ud800"\n',
    "an unknown directive": b"%YAML 9.9\n---\nrun_dir: x\n",
    "a bucket without a name": b"run_dir: gs://\n",
    "another kind of storage": b"run_dir: s3://bucket/x\n",
    "an empty folder name": b"run_dir: ''\n",
    "entries that are no mappings": b"run_dir: x\neval: {datasets: [1]}\n",
    "an entry without a source": b"run_dir: x\neval: {datasets: [{path: x}]}\n",
    "an evaluation named by a path": b"run_dir: x\neval: {datasets: [{source: jsonl, path: x, name: ../../x}]}\n",
    "an evaluation named by an absolute path": b"run_dir: x\neval: {datasets: [{source: jsonl, path: x, name: /x}]}\n",
    "an evaluation named by a hidden file": b"run_dir: x\neval: {datasets: [{source: jsonl, path: x, name: ..}]}\n",
    "an ELF file": b"\x7fELF\x02\x01\x01" + bytes(range(256)),
    "a gzip file": b"\x1f\x8b\x08\x00" + bytes(range(256)),
}  # fmt: skip

OVERRIDES = {
    "no key": "=3",
    "no value": "steps=",
    "no equals": "steps3=",
    "an unknown key": "stepz=3",
    "a dot at the end": "model.=3",
    "a dot at the beginning": ".steps=3",
    "many dots": "." * 1000 + "=3",
    "an index": "steps[0]=3",
    "a section": "model={source: x}",
    "brackets": "sampling.stop=" + "[" * 10_000,
    "laughs": "sampling.stop=[&a [x], *a]",
    "a python object": "sampling.stop=[!!python/object/apply:os.system ['touch written']]",
    "an interpolation": "sampling.stop_token_ids=[${seed}]",
    "an environment variable": "sampling.stop=['${oc.env:HOME}']",
    "a huge number": "steps=" + "9" * 5000,
    "not a number": "optimizer.learning_rate=nan",
    "a list": "steps=[3]",
    "a mapping": "steps={a: 3}",
    "half a surrogate pair": "sampling.stop=['\ud800']",
    "a control character": "sampling.stop=['\x07']",
    "a colon": "steps=a: b: c",
    "an open quote": "sampling.stop=['",
    "a path in a mapping's name": "data.chat_template_kwargs.../../x=1",
    "a deep name": "data.chat_template_kwargs" + ".a" * 3000 + "=1",
}  # fmt: skip


def fuzzed(rng):
    """The bytes of a configuration in which something is changed: as text, or as what it says."""
    if rng.integers(2):
        return damaged(GOOD, rng)
    return as_json(changed(yaml.safe_load(GOOD), rng))
