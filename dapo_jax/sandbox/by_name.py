"""Loads a sandbox by its name, and tests it before any program runs."""

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from dapo_jax.sandbox.container import ContainerServer, in_container
from dapo_jax.sandbox.protocol import Limits, Program, SandboxError
from dapo_jax.sandbox.remote import RemoteServer
from dapo_jax.sandbox.server import ENVIRONMENT
from dapo_jax.sandbox.servers import Server, ServerSandbox

_SERVER = ("-c", Path(__file__).with_name("server.py").read_text(encoding="utf-8"))
"""Arguments of an interpreter that serves."""
_NOBODY = 65534
"""The user of programs. If root started bubblewrap, programs could write settings of the whole machine under /proc/sys."""
_NAMESPACES = (
    "This system does not let users create namespaces: on Ubuntu 24.04, add an AppArmor profile for bwrap; in a container, allow user namespaces, "
    "or set sandbox.backend to remote:URL. sandbox.backend=unsafe is for programs that you trust"
)
_IMAGE = "Pull an image with Python 3.10 or later, name it in sandbox.backend={}:IMAGE, and let this user start containers with limits of memory and processes"
_REMEDIES = {
    **dict.fromkeys(("auto", "bubblewrap"), _NAMESPACES),
    **{engine: _IMAGE.format(engine) for engine in ("podman", "docker")},
    "remote": "Start the service, and check the address in sandbox.backend",
    "unsafe": "Run `dapo-jax doctor`",
}
"""Maps each back-end to the remedy if it fails."""
_ALONE = "--unshare-all --die-with-parent --new-session --as-pid-1 --cap-add ALL --ro-bind /usr /usr"
_READ_ONLY = "--proc /proc --dir /tmp --dir /dev/shm --remount-ro / --chdir /"
_PROBES = """
import os, socket
host, port, *probes = input().split()
def reads(path):
    with open(path, "rb") as file:
        return f"read {path}" if file.read(1) else ""
def writes(path):
    with open(path, "w"):
        return f"wrote {path}"
def environment():
    return f"saw the environment {os.environ}" if set(os.environ) - {"PATH", "LANG", "LC_CTYPE", "PYTHONHASHSEED"} else ""
def processes():
    others = {name for name in os.listdir("/proc") if name.isdigit()} - {"1", str(os.getpid())}
    return f"saw the processes {others}" if others else ""
def network():
    socket.create_connection(("127.0.0.1", int(port)), timeout=1)
    return "used the network"
def memory():
    return f"allocated {len(bytearray(2 << 30))} bytes"
def forks():
    return f"started process {os.fork()}"
for probe in probes:
    try:
        print(eval(probe), end="")
    except (OSError, MemoryError):
        pass
"""
"""A program that prints what it should not be able to do."""
_REMOTE_PROBES = "reads(host) network() memory()"
_LOCAL_PROBES = f"{_REMOTE_PROBES} writes('/usr/x') writes('/x') environment() processes() forks()"


def load_sandbox(backend: str = "auto", *, slots: int = 0, python: str = "") -> ServerSandbox:
    """Returns a sandbox that has passed its test.

    Args:
        backend: `auto` or `bubblewrap`; `podman:IMAGE` or `docker:IMAGE`, where this machine has an image with Python; `remote:URL`, the address of a service
            that speaks SandboxFusion's format; or `unsafe`, which limits time and memory but does not isolate programs.
        slots: number of programs at once. 0 means the number of cores.
        python: interpreter of the programs. Empty means the system's `python3`, or else this interpreter. In a container, it is the image's `python3`.

    Raises ValueError if the back-end does not exist, cannot be used on this machine, or does not isolate programs. The message contains the remedy.
    """
    kind, _, where = backend.partition(":")
    if kind not in _REMEDIES or bool(where) != (kind in ("podman", "docker", "remote")):
        known = "auto, bubblewrap, podman:IMAGE, docker:IMAGE, remote:URL and unsafe"
        raise ValueError(f"no sandbox is named {backend!r}; there are {known}")
    start: Callable[[], Server]
    if kind == "remote":
        if python:
            raise ValueError(
                f"sandbox.python={python}: the service of remote:URL chooses the interpreter; leave it out"
            )
        start = partial(RemoteServer, where)
    elif not sys.platform.startswith("linux"):
        raise ValueError(f"sandbox {backend}: programs of the model run on Linux only; use such a machine")
    elif where:
        command = [python or "python3", *_SERVER, "container"]
        start = partial(ContainerServer, in_container(_program(kind, backend), where, command))
    else:
        bwrap = "" if kind == "unsafe" else _program("bwrap", backend)
        python = python or shutil.which("python3", path="/usr/bin:/bin") or sys.executable
        user = {"user": _NOBODY, "group": _NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
        prefixes = _prefixes(python, user)
        isolated, kind = (_isolated(bwrap, prefixes), "bubblewrap") if bwrap else ([], kind)
        start = partial(Server, [*isolated, python, *_SERVER, kind], env=ENVIRONMENT, cwd="/", **user)
    sandbox = ServerSandbox(start, slots=slots or os.cpu_count() or 1, remedy=_REMEDIES[kind])
    with ThreadPoolExecutor(1) as thread:  # this thread may have an event loop already
        thread.submit(asyncio.run, _tested(sandbox, kind)).result()
    return sandbox


def _program(name: str, backend: str) -> str:
    if found := shutil.which(name):
        return found
    raise ValueError(
        f"sandbox.backend={backend} found no sandbox for programs of the model: {name} is not installed. Install it (bwrap: apt-get install bubblewrap), or set "
        "sandbox.backend to podman:IMAGE, docker:IMAGE or remote:URL. sandbox.backend=unsafe is for programs that you trust"
    )


def _prefixes(python: str, as_nobody: dict) -> Sequence[str]:
    """Returns the folders of an interpreter. Raises ValueError if it does not run, for example because the user of programs may not read it."""
    code = "import sys; print(sys.prefix, sys.base_prefix, sep='\\n')"
    try:
        found = subprocess.run(
            [python, "-I", "-c", code], capture_output=True, text=True, check=True, cwd="/", **as_nobody
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise ValueError(
            f"sandbox.python={python} does not run as the user of programs ({error}); name an interpreter that every user can read, such as /usr/bin/python3"
        ) from error
    return [folder for folder in dict.fromkeys(found.stdout.split("\n")) if folder]


def _isolated(bwrap: str, prefixes: Sequence[str]) -> list[str]:
    """Returns the start of a bubblewrap command: a machine with /usr, an interpreter, four devices, and nothing that can be written to."""
    command = [bwrap, *_ALONE.split()]
    for name in ("/bin", "/sbin", "/lib", "/lib64"):
        if os.path.islink(name):
            command += ["--symlink", os.readlink(name), name]
        elif os.path.isdir(name):
            command += ["--ro-bind", name, name]
    for folder in prefixes:
        command += [] if folder.startswith("/usr") else ["--ro-bind", folder, folder]
    for device in ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"):
        command += ["--dev-bind", device, device]
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        command += ["--symlink", f"/proc/self/fd/{number}", f"/dev/{name}"]
    return [*command, *_READ_ONLY.split()]


async def _tested(sandbox: ServerSandbox, kind: str) -> None:
    """Runs right and wrong programs, and programs that try to break out. Raises ValueError if the sandbox fails or leaks."""
    try:
        await sandbox.check()
        if kind != "unsafe":
            with tempfile.NamedTemporaryFile() as file, socket.create_server(("127.0.0.1", 0)) as server:
                file.write(b"secret")
                file.flush()
                os.chmod(file.name, 0o644)
                probes = _REMOTE_PROBES if kind == "remote" else _LOCAL_PROBES
                stdin = f"{file.name} {server.getsockname()[1]} {probes}".encode()
                leak = await sandbox.run(Program(source=_PROBES, stdin=stdin))
            if leak.ended != "exit" or leak.stdout or leak.stderr:
                raise ValueError(
                    f"the sandbox leaks: a program {leak.stdout.decode()}{leak.stderr.decode()}. Nothing is run"
                )
        busy = await sandbox.run(Program(source="while True: pass", limits=Limits(cpu_s=0.05, idle_s=1.0)))
        if busy.ended not in ("cpu", "wall"):
            raise ValueError(f"the sandbox does not end a program that runs for ever: {busy}. Nothing is run")
    except SandboxError as error:
        raise ValueError(str(error)) from error
    finally:
        sandbox.close()
