"""A stand-in for the clients of a cloud and for the programs of a worker: `python -S stub.py CLIENT WORDS`.

It records every call in FOLDER/calls.jsonl and replies by FOLDER/scenario.json. The scenario has a list of replies for each verb, and
the last is repeated: an exit status, a text to print, or an error.
"""

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import time
import zlib
from pathlib import Path

FOLDER = Path(os.environ["STUB_FOLDER"])
REPLIES = {"describe": ["NOT_FOUND", "ACTIVE"], "squeue": ["RUNNING"]}
SCENARIO = REPLIES | json.loads((FOLDER / "scenario.json").read_text())
VERBS = {"gcloud": 3, "xpk": 1, "kubectl": 0, "scontrol": 0}
"""The word of a client's command that is its verb. The other clients have a single verb."""


def main(client, words):
    if client == "uv":
        return uv(words)
    if client == "dapo-jax" and words[0] == "config":
        return config(words)
    verb = verb_of(client, words)
    more = {}
    if verb in ("srun", "dapo-jax"):
        names = r"DAPO_JAX_\w+|HF_TOKEN|WANDB_API_KEY|JAX_\w+|LIBTPU_\w+"
        more["environment"] = {name: os.environ[name] for name in os.environ if re.fullmatch(names, name)}
        more["files"] = sorted(str(path) for path in Path().rglob("*") if path.is_file())
    record(client, words, verb=verb, **more)
    if verb == "scp":
        for source in map(Path, (word for word in words[4:] if word.startswith("/"))):
            shutil.copy(source, FOLDER / "copied" / source.name)
    if verb == "scancel":
        (FOLDER / "released").touch()
    if verb in ("srun", "dapo-jax") and SCENARIO.get("held"):
        until = time.monotonic() + 100
        while not (FOLDER / "released").exists() and time.monotonic() < until:
            time.sleep(0.05)
    return reply(verb)


def verb_of(client, words):
    if "ssh" in words:  # --command=bash tpu_worker.sh VERB
        return next(word.split()[2] for word in words if word.startswith("--command="))
    return words[VERBS[client]] if client in VERBS else client


def record(client, words, **more):
    with (FOLDER / "calls.jsonl").open("a") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        log.write(json.dumps({"client": client, "words": words, **more}) + "\n")


def reply(verb):
    replies, before = SCENARIO.get(verb, [0]), FOLDER / "counts" / verb
    number = int(before.read_text()) if before.exists() else 0
    before.write_text(str(number + 1))
    answer = replies[min(number, len(replies) - 1)]
    if isinstance(answer, int):
        return answer
    failed = answer in ("NOT_FOUND", "ERROR")
    print(answer, file=sys.stderr if failed else sys.stdout)
    return int(failed)


def uv(words):
    if words[0] == "venv":
        Path(words[-1], "bin").mkdir(parents=True)
        shutil.copy(FOLDER / "parts" / "uv", Path(words[-1], "bin", "python"))
        return 0
    package, _, extras = words[-1].rstrip("]").partition("[")
    assert Path(words[words.index("--constraint") + 1]).is_file()
    assert Path(package, "dapo_jax", "cli", "__init__.py").is_file()
    record("uv", [extras])
    shutil.copy(FOLDER / "near" / "dapo-jax", Path(words[words.index("--python") + 1]).parent)
    return 0


def config(words):
    """The answer of the real command, which runs once for each question: the tests' laptops have the same files."""
    kept = Path(os.environ["STUB_ANSWERS"], str(zlib.crc32(json.dumps(words).encode())))
    if not kept.exists():
        command = [os.environ["STUB_PYTHON"], "-m", "dapo_jax.cli", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        kept.write_text(json.dumps([done.returncode, done.stdout, done.stderr]))
    status, output, errors = json.loads(kept.read_text())
    print(output, end="")
    print(errors, end="", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
