"""A stand-in for the clients of a cloud and for the programs of a worker: `python -S stub.py CLIENT WORDS`.

It records every call in FOLDER/calls.jsonl, refuses options that the client would refuse, and replies by FOLDER/scenario.json. The
scenario has a list of replies for each verb, and the last is repeated: an exit status, a text to print, or an error.
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
OPTIONS = {
    "gcloud compute tpus queued-resources create": "zone= node-id= accelerator-type= runtime-version= project= network= reserved spot quiet",
    "gcloud compute tpus queued-resources describe": "zone= project= format=",
    "gcloud compute tpus queued-resources delete": "zone= project= force quiet",
    "gcloud compute tpus tpu-vm ssh": "zone= project= worker= quiet command= ssh-flag=",
    "gcloud compute tpus tpu-vm scp": "zone= project= worker= quiet",
    "xpk workload create": "command= tpu-type= workload= cluster= zone= project= num-slices= max-restarts= restart-on-exit-codes= env-file= "
    "base-docker-image= docker-image= script-dir=",
    "xpk workload delete": "workload= cluster= force zone= project=",
    "kubectl logs": "container= follow selector= tail=",
    "scontrol requeue": "",
    "scancel": "signal=",
    "squeue": "jobs= format= noheader",
    "srun": "ntasks-per-node= cpu-bind= kill-on-bad-exit= wait= het-group=",
    "ray start": "head node-ip-address= port= num-cpus= num-gpus= include-dashboard= disable-usage-stats address= resources= block",
    "ray status": "address=",
    "ray stop": "force",
}
"""Options that the scripts use; `=` has a value. All are in the help of Google Cloud SDK 528, XPK 1.16, kubectl 1.32 and Ray 2.60, and in the manual
pages of Slurm."""


def main(client, words):
    if client == "uv":
        return uv(words)
    if client == "dapo-jax" and words[0] == "config":
        return config(words)
    verb = client if client == "dapo-jax" else checked(client, words)
    more = {}
    if verb in ("srun", "dapo-jax", "start"):
        names = r"RAY_\w+|DAPO_JAX_\w+|HF_TOKEN|WANDB_API_KEY|JAX_\w+|LIBTPU_\w+"
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


def checked(client, words):
    """The verb of a command; ends the process if the client does not have one of its options."""
    called = [client, *words]
    command = next((known for known in OPTIONS if called[: len(known.split())] == known.split()), None)
    if command is None:
        sys.exit(f"Invalid choice: {called}")
    for word in called[len(command.split()) :]:
        if client == "srun" and not word.startswith("-"):
            break  # the program with its own options
        name, equals, _ = word.removeprefix("--").partition("=")
        if word.startswith("-") and name + equals not in OPTIONS[command].split():
            sys.exit(f"unrecognized arguments: {word}")
    if command.endswith(" ssh"):  # --command=bash tpu_worker.sh VERB
        return next(word.split()[2] for word in words if word.startswith("--command="))
    return command.split()[-1]


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
    for name in ("dapo-jax", "ray"):
        shutil.copy(FOLDER / "near" / name, Path(words[words.index("--python") + 1]).parent)
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
