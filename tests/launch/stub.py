"""A stand-in for the cloud's clients and for the programs of a worker: `python -S stub.py CLIENT WORDS`.

It records every call in FOLDER/calls.jsonl, refuses arguments that the client would refuse, and answers by FOLDER/scenario.json.
A worker is a folder that is its HOME; commands over ssh run in it.
"""

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path

FOLDER = Path(os.environ["STUB_FOLDER"])
SCENARIO = {
    "states": [["ACTIVE"]],  # for each creation of the TPU, the answers of `describe`; the last is repeated
    "runs": [0],  # exit status of each start of the program on a worker, or "preempted"; the last is repeated
    "workers": 1,  # of the slice, or tasks of the step
    "job": "RUNNING",  # state of the job in squeue
    "held": False,  # the program runs until FOLDER/released exists
} | json.loads((FOLDER / "scenario.json").read_text())
SSH = "!zone= project= worker= quiet"
FLAGS = {
    "gcloud compute tpus queued-resources create": "!zone= !node-id= !accelerator-type= !runtime-version= project= "
    "network= internal-ips reserved spot quiet",
    "gcloud compute tpus queued-resources describe": "!zone= project= format=",
    "gcloud compute tpus queued-resources delete": "!zone= project= !force quiet",
    "gcloud compute tpus tpu-vm ssh": f"{SSH} !command= ssh-flag=",
    "gcloud compute tpus tpu-vm scp": SSH,
    "xpk workload create": "!command= !tpu-type= !workload= !cluster= zone= project= num-slices= max-restarts= "
    "restart-on-exit-codes= env-file= base-docker-image= docker-image= script-dir=",
    "xpk workload delete": "!workload= !cluster= !force zone= project=",
    "kubectl logs": "container= follow selector= tail=",
    "scontrol requeue": "",
    "scancel": "signal=",
    "squeue": "jobs= format= noheader",
    "curl": "LsSf",
    "uv venv": "python= quiet",
    "uv pip install": "python= constraint= reinstall-package= quiet",
    "srun": "ntasks-per-node= cpu-bind= kill-on-bad-exit= wait=",
}
"""Flags that the scripts use: `=` has a value, `!` is required. All are in the help of Google Cloud SDK 528, XPK 1.16, kubectl 1.32 and
the manual pages of Slurm."""


def record(client, words, **more):
    with (FOLDER / "calls.jsonl").open("a") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        log.write(json.dumps({"client": client, "words": words, **more}) + "\n")


def counted(name, add=1):
    """Number of earlier calls with this name."""
    with (FOLDER / f"count-{name}").open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        before = int(file.read() or 0)
        file.truncate(0)
        file.write(str(before + add))
    return before


def at(answers, number):
    return answers[min(number, len(answers) - 1)]


def fail(message, status=1):
    print(f"ERROR: {message}", file=sys.stderr)
    sys.exit(status)


def split(words, command):
    """({flag: values}, other words); ValueError for a flag that the command does not have."""
    known = [name.lstrip("!") for name in FLAGS[command].split()]
    flags, rest = {}, []
    left = list(words)
    while left:
        word = left.pop(0)
        name, equals, value = word.lstrip("-").partition("=")
        if not word.startswith("-"):
            rest.append(word)
        elif name in known and not equals:
            flags.setdefault(name, []).append("")
        elif f"{name}=" in known and (equals or left):
            flags.setdefault(name, []).append(value if equals else left.pop(0))
        else:
            raise ValueError(f"unrecognized arguments: {word}")
    missing = [name for name in FLAGS[command].split() if name[0] == "!" and name.strip("!=") not in flags]
    if missing:
        raise ValueError(f"argument {missing[0]} must be specified")
    return flags, rest


def homes():
    return [FOLDER / "workers" / str(worker) for worker in range(SCENARIO["workers"])]


def main(client, words):
    if client in ("dapo-jax", "srun", "tar"):
        return globals()[client.replace("-", "_")](words)
    try:
        command = next(known for known in FLAGS if [client, *words][: len(known.split())] == known.split())
        found, rest = split([client, *words][len(command.split()) :], command)
    except (StopIteration, ValueError) as error:
        fail(f"{error or 'Invalid choice'}", status=2)
    if client not in ("uv", "curl"):
        record(client, words)
    answer = globals().get(re.sub("[ -]", "_", command), lambda found, rest: 0)
    return answer(found, rest)


# gcloud


def state():
    if not (FOLDER / "created").exists():
        return "NONE"
    if (FOLDER / "preempted").exists():
        return "SUSPENDED"
    generation = counted("created", add=0) - 1
    return at(at(SCENARIO["states"], generation), counted(f"described-{generation}", add=0))


def gcloud_compute_tpus_queued_resources_describe(found, rest):
    now = state()
    if now == "NONE":
        fail("NOT_FOUND: Resource was not found")
    if not (FOLDER / "preempted").exists():
        counted(f"described-{counted('created', add=0) - 1}")
    if now == "ERROR":
        fail("There was a problem refreshing your tokens")
    assert found["format"] == ["value(state.state)"]
    print(now)


def gcloud_compute_tpus_queued_resources_create(found, rest):
    if state() != "NONE":
        fail("ALREADY_EXISTS: Resource already exists")
    counted("created")
    (FOLDER / "created").touch()
    for home in homes():
        home.mkdir(parents=True)


def gcloud_compute_tpus_queued_resources_delete(found, rest):
    if state() == "NONE":
        fail("NOT_FOUND: Resource was not found")
    gone()
    (FOLDER / "created").unlink()
    (FOLDER / "preempted").unlink(missing_ok=True)


def gone():
    (FOLDER / "followed").unlink(missing_ok=True)
    for home in homes():
        pid = home / "dapo_jax_run" / "pid"
        if pid.exists():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(int(pid.read_text()), signal.SIGKILL)
    shutil.rmtree(FOLDER / "workers", ignore_errors=True)


def gcloud_compute_tpus_tpu_vm_scp(found, rest):
    if state() != "ACTIVE":
        fail("This TPU cannot be currently connected to.")
    *sources, target = rest
    assert target.endswith(":")
    record("copied", [], modes={Path(source).name: Path(source).stat().st_mode & 0o777 for source in sources})
    for home in homes():
        for source in map(Path, sources):
            shutil.copyfile(source, home / source.name)
            os.chmod(home / source.name, source.stat().st_mode & 0o777 & ~0o022)


def gcloud_compute_tpus_tpu_vm_ssh(found, rest):
    if state() != "ACTIVE":
        fail("This TPU cannot be currently connected to.")
    assert sys.stdin.read() == ""  # several ssh would share it
    [line] = found["command"]
    if line.endswith(" follow"):
        (FOLDER / "followed").touch()
    assert found["worker"] == ["all"]
    # Each worker's environment is without the laptop's variables.
    path = f"{FOLDER / 'far'}:/usr/bin:/bin"
    started = [
        subprocess.Popen(
            ["bash", "-c", line],
            cwd=home,
            env={"HOME": str(home), "PATH": path, "STUB_FOLDER": str(FOLDER)},
            start_new_session=True,
        )
        for home in homes()
    ]
    statuses = [process.wait() for process in started]
    if (FOLDER / "preempted").exists():
        gone()
        fail("[ssh] exited with return code [255].")
    return next((status for status in statuses if status), 0)


# Programs of a worker


def curl(found, rest):
    assert rest[0].startswith("https://astral.sh/uv/")
    assert rest[0].endswith("/install.sh")
    print(f'mkdir -p "$UV_INSTALL_DIR" && cp "{FOLDER}/parts/uv" "$UV_INSTALL_DIR/uv"')


def uv_venv(found, rest):
    Path(rest[0], "bin").mkdir(parents=True)
    shutil.copy(FOLDER / "parts" / "python", Path(rest[0], "bin", "python"))


def uv_pip_install(found, rest):
    package, _, extras = rest[0].rstrip("]").partition("[")
    assert Path(found["constraint"][0]).is_file()
    assert Path(package, "pyproject.toml").is_file()
    assert Path(package, "dapo_jax", "cli", "__init__.py").is_file()
    record("uv", [], extras=extras)
    shutil.copy(FOLDER / "parts" / "dapo-jax", Path(found["python"][0]).parent / "dapo-jax")


def dapo_jax(words):
    """`config` is the real command; `train` ends as in the scenario."""
    if words[:1] == ["config"]:
        return config(words)
    names = r"DAPO_JAX_\w+|HF_TOKEN|WANDB_API_KEY|JAX_\w+|SLURM_PROCID|LIBTPU_\w+|XLA_\w+"
    seen = {name: value for name, value in os.environ.items() if re.fullmatch(names, name)}
    files = sorted(str(path) for path in Path().rglob("*") if path.is_file())
    number = counted(f"started-{os.environ.get('SLURM_PROCID', '') or Path.cwd().parent.parent.name}")
    record("dapo-jax", words, environment=seen, files=files)
    outcome = at(SCENARIO["runs"], number)
    print(f"step 1 of start {number}", flush=True)
    if SCENARIO["held"]:
        wait_for("released")
    if outcome == "preempted":
        wait_for("followed")  # so that `follow` and not `start` sees the preemption
        (FOLDER / "preempted").touch()
        return 137
    return outcome


def wait_for(name):
    until = time.monotonic() + 100
    while not (FOLDER / name).exists():
        assert time.monotonic() < until
        time.sleep(0.05)


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


# XPK, Slurm, tar


def xpk_workload_create(found, rest):
    lines = Path(found["env-file"][0]).read_text().splitlines()
    assert all("=" in line or line in os.environ for line in lines)  # XPK looks a bare name up
    record("env-file", lines)


def squeue(found, rest):
    print(SCENARIO["job"])


def scancel(found, rest):
    (FOLDER / "released").touch()


def srun(words):
    record("srun", words)
    end = next(number for number, word in enumerate(words) if not word.startswith("-"))
    split(words[:end], "srun")
    numbers = map(str, range(SCENARIO["workers"]))
    tasks = [subprocess.Popen(words[end:], env=os.environ | {"SLURM_PROCID": number}) for number in numbers]
    return max(128 - status if status < 0 else status for status in (task.wait() for task in tasks))


def tar(words):
    record("tar", words)
    return subprocess.run(["/bin/tar", *words], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
