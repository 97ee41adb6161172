"""Stands in for the cloud's clients and for what a worker of a slice runs: `python -S stub.py CLIENT WORDS`.

Records every call in FOLDER/calls.jsonl, refuses words that the client would refuse, and answers by the scenario (scenario.py).
A worker is a folder that is its HOME; commands over ssh run in it.
"""

import contextlib
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

sys.path.insert(0, str(Path(__file__).parent))
import flags as clients
from scenario import FOLDER, SCENARIO, at, counted, fail, record


def homes():
    return [FOLDER / "workers" / str(worker) for worker in range(SCENARIO["workers"])]


def main(client, words):
    if client not in ("dapo-jax", "srun", "sbatch", "tar"):
        try:
            command, found, rest = clients.read([client, *words])
        except clients.UnknownWordError as error:
            record(client, words, refused=True)
            return fail(str(error), status=2)
        if "uv" not in command and "curl" not in command:
            record(client, words)
        return globals()["_".join(command).replace("-", "_")](found, rest)
    return globals()[client.replace("-", "_")](words)


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
        return fail("(gcloud.compute.tpus.queued-resources.describe) NOT_FOUND: Resource was not found")
    if not (FOLDER / "preempted").exists():
        counted(f"described-{counted('created', add=0) - 1}")
    if now == "ERROR":
        return fail(
            "(gcloud.compute.tpus.queued-resources.describe) There was a problem refreshing your tokens"
        )
    assert found["format"] == ["value(state.state)"]
    print(now)
    return 0


def gcloud_compute_tpus_queued_resources_create(found, rest):
    if counted("asked") < SCENARIO["refused"]:
        return fail("(gcloud.compute.tpus.queued-resources.create) RESOURCE_EXHAUSTED: Quota limit exceeded")
    if state() != "NONE":
        return fail("(gcloud.compute.tpus.queued-resources.create) ALREADY_EXISTS: Resource already exists")
    counted("created")
    (FOLDER / "created").touch()
    for home in homes():
        home.mkdir(parents=True)
    return 0


def gcloud_compute_tpus_queued_resources_delete(found, rest):
    if state() == "NONE":
        return fail("(gcloud.compute.tpus.queued-resources.delete) NOT_FOUND: Resource was not found")
    if "force" not in found:
        return fail(
            "(gcloud.compute.tpus.queued-resources.delete) the queued resource has nodes; use --force"
        )
    gone()
    (FOLDER / "created").unlink()
    (FOLDER / "preempted").unlink(missing_ok=True)
    return 0


def gone():
    """The VMs and their disks, and whoever follows what runs there."""
    (FOLDER / "followed").unlink(missing_ok=True)
    for home in homes():
        pid = home / "dapo_jax_run" / "pid"
        if pid.exists():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(int(pid.read_text()), signal.SIGKILL)
    shutil.rmtree(FOLDER / "workers", ignore_errors=True)


def chosen(found):
    worker = found.get("worker", ["0"])[0]
    return homes() if worker == "all" else [homes()[int(worker)]]


def gcloud_compute_tpus_tpu_vm_scp(found, rest):
    if state() != "ACTIVE":
        return fail("(gcloud.compute.tpus.tpu-vm.scp) This TPU cannot be currently connected to.")
    *sources, target = rest
    assert target.endswith(":")
    record("copied", [], modes={Path(source).name: Path(source).stat().st_mode & 0o777 for source in sources})
    for home in chosen(found):
        for source in map(Path, sources):
            shutil.copyfile(source, home / source.name)
            os.chmod(home / source.name, source.stat().st_mode & 0o777 & ~0o022)
    return 0


def gcloud_compute_tpus_tpu_vm_ssh(found, rest):
    if state() != "ACTIVE":
        return fail("(gcloud.compute.tpus.tpu-vm.ssh) This TPU cannot be currently connected to.")
    assert sys.stdin.read() == ""  # several ssh would share it
    # As gcloud and ssh do: split at spaces, joined by the far shell.
    line = " ".join(found["command"][0].split(" "))
    if line.endswith(" follow"):
        (FOLDER / "followed").touch()
    running = [started(home, line) for home in chosen(found)]
    if line.endswith(" follow") and counted("dropped") < SCENARIO["drops"]:
        time.sleep(0.3)
        for process in running:
            os.killpg(process.pid, signal.SIGKILL)
        (FOLDER / "released").touch()
        running = [started(home, line) for home in chosen(found)]
    statuses = [process.wait() for process in running]
    if (FOLDER / "preempted").exists():
        gone()
        return fail("(gcloud.compute.tpus.tpu-vm.ssh) [ssh] exited with return code [255].")
    return next((status for status in statuses if status), 0)


def started(home, line):
    """The command on a worker, whose environment has nothing of the laptop's."""
    clean = {"HOME": str(home), "PATH": f"{FOLDER / 'far'}:/usr/bin:/bin", "STUB_FOLDER": str(FOLDER)}
    return subprocess.Popen(["bash", "-c", line], cwd=home, env=clean, start_new_session=True)


def gcloud_storage_buckets_create(found, rest):
    return 0


gcloud_storage_cat = gcloud_storage_rm = kubectl_logs = xpk_workload_delete = gcloud_storage_buckets_create


# What a worker runs


def curl(found, rest):
    assert rest[0].startswith("https://astral.sh/uv/")
    assert rest[0].endswith("/install.sh")
    print(f'mkdir -p "$UV_INSTALL_DIR" && cp "{FOLDER}/parts/uv" "$UV_INSTALL_DIR/uv"')
    return 0


def uv_venv(found, rest):
    Path(rest[0], "bin").mkdir(parents=True)
    shutil.copy(FOLDER / "parts" / "python", Path(rest[0], "bin", "python"))
    return 0


def uv_pip_install(found, rest):
    package, _, extras = rest[0].rstrip("]").partition("[")
    assert Path(found["constraint"][0]).is_file()
    assert Path(package, "pyproject.toml").is_file()
    assert Path(package, "dapo_jax", "cli", "__init__.py").is_file()
    assert not list(Path(package).rglob("__pycache__"))
    record("uv", [], extras=extras)
    shutil.copy(FOLDER / "parts" / "dapo-jax", Path(found["python"][0]).parent / "dapo-jax")
    return 0


def dapo_jax(words):
    """`config` is the real one, here and there. `train` on a worker is what `runs` says."""
    if words[:1] == ["config"]:
        return config(words)
    if words[:1] == ["plan"]:
        record("dapo-jax", words)
        return 0 if re.fullmatch(r"[\w.]+ --topology v\w+:[\dx]+", " ".join(words[1:])) else 2
    where = "laptop" if "STUB_PYTHON" in os.environ else "worker"
    names = (
        *("DAPO_JAX_DISTRIBUTED", "HF_TOKEN", "WANDB_API_KEY", "JAX_LOCAL_DEVICE_IDS", "SLURM_PROCID"),
        *("LIBTPU_INIT_ARGS", "XLA_FLAGS", "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"),
    )
    seen = {name: os.environ[name] for name in names if name in os.environ}
    here = sorted(str(path) for path in Path().rglob("*") if path.is_file()) if where == "worker" else []
    number = counted(f"started-{os.environ.get('SLURM_PROCID', '') or Path.cwd().parent.parent.name}")
    record("dapo-jax", words, environment=seen, files=here, where=where)
    outcome = at(SCENARIO["runs"], number)
    print(f"step 1 of start {number}", flush=True)
    if SCENARIO["held"] or SCENARIO["drops"]:
        wait_for("released")
    if outcome == "preempted":
        wait_for("followed")  # or a slow `start` would hear of it first
        (FOLDER / "preempted").touch()
        return 137
    return outcome


def wait_for(name):
    until = time.monotonic() + 100
    while not (FOLDER / name).exists():
        assert time.monotonic() < until
        time.sleep(0.05)


def config(words):
    """The real answer; asked once for the same question, since the tests' laptops have the same files."""
    kept = Path(os.environ["STUB_ANSWERS"], str(zlib.crc32(json.dumps(words).encode())))
    if not kept.exists():
        command = [os.environ["STUB_PYTHON"], "-m", "dapo_jax.cli", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        new = kept.with_suffix(f".{os.getpid()}")
        new.write_text(json.dumps([done.returncode, done.stdout, done.stderr]))
        new.rename(kept)
    status, output, errors = json.loads(kept.read_text())
    print(output, end="")
    print(errors, end="", file=sys.stderr)
    return status


# XPK, Slurm, tar


def xpk_workload_create(found, rest):
    text = Path(found["env-file"][0]).read_text()
    # A bare name takes its value from the environment; one that is not set is an error.
    unset = [line for line in text.splitlines() if "=" not in line and line not in os.environ]
    assert not unset
    assert ("docker-image" in found) != ("base-docker-image" in found)
    record("env-file", text.splitlines())
    return 0


def squeue(found, rest):
    print(SCENARIO["job"])
    return 0


def scontrol_requeue(found, rest):
    return 0


def scancel(found, rest):
    """The steps end when they are told to."""
    assert found["signal"] == ["TERM"]
    (FOLDER / "released").touch()
    return 0


def parted(words, values, bare=()):
    """Flags of the client, and the program with its own words."""
    end = next(number for number, word in enumerate(words) if not word.startswith("-"))
    return clients.split(words[:end], values, set(bare))[0], words[end:]


def srun(words):
    record("srun", words)
    _, program = parted(words, clients.SRUN)
    common = {
        "SLURM_NTASKS": str(SCENARIO["workers"]),
        "SLURM_STEP_NODELIST": "node[1-2]",
        "SLURM_LOCALID": "0",
    }
    tasks = [
        subprocess.Popen(program, env=os.environ | common | {"SLURM_PROCID": str(number)})
        for number in range(SCENARIO["workers"])
    ]
    return max(128 - status if status < 0 else status for status in (task.wait() for task in tasks))


def sbatch(words):
    """Runs the script as slurmd would: a copy of it, in the folder it was submitted from."""
    record("sbatch", words)
    _, (script, *arguments) = parted(words, clients.SBATCH, clients.SBATCH_BARE)
    lines = [line.split()[1:] for line in Path(script).read_text().splitlines() if line.startswith("#SBATCH")]
    clients.split([word for line in lines for word in line], clients.SBATCH, clients.SBATCH_BARE)
    copy = FOLDER / "slurm_script"
    shutil.copy(script, copy)
    copy.chmod(0o700)
    job = {"SLURM_JOB_ID": "71", "SLURM_GPUS_ON_NODE": "4"}
    return subprocess.run([copy, *arguments], env=os.environ | job, check=False).returncode


def tar(words):
    record("tar", words)
    return subprocess.run(["/bin/tar", *words], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
