"""Loads a sandbox by its name, and tests it before any program runs."""

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dapo_jax.sandbox.protocol import Limits, Program, SandboxError
from dapo_jax.sandbox.servers import ServerSandbox

_SERVER = Path(__file__).with_name("server.py")
_NOBODY = 65534
"""The user of programs. If root started bubblewrap, programs could write settings of the whole machine under /proc/sys."""
_NAMESPACES = (
    "This system does not let users create namespaces: on Ubuntu 24.04, add an AppArmor profile for bwrap; in a container, allow user namespaces, "
    "or use another machine. sandbox.backend=unsafe is for programs that you trust"
)
_ALONE = """--unshare-user --unshare-pid --unshare-ipc --unshare-uts --unshare-net --unshare-cgroup-try
    --die-with-parent --new-session --as-pid-1 --cap-add ALL --ro-bind /usr /usr"""
_READ_ONLY = "--proc /proc --dir /tmp --dir /dev/shm --remount-ro / --chdir /"
_PROBES = """
import os, socket
host, port = input().split()
def reads(path):
    with open(path, "rb") as file:
        return f"read {path}" if file.read(1) else ""
def writes(path):
    with open(path, "w"):
        return f"wrote {path}"
def environment():
    return f"saw the environment {os.environ}" if set(os.environ) - {"PATH", "PWD", "LANG", "LC_CTYPE", "PYTHONHASHSEED"} else ""
def processes():
    return "saw other processes" if [name for name in os.listdir("/proc") if name.isdigit()] != ["1"] else ""
def network():
    socket.create_connection(("127.0.0.1", int(port)), timeout=1)
    return "used the network"
def memory():
    return f"allocated {len(bytearray(2 << 30))} bytes"
def forks():
    return f"started process {os.fork()}"
for probe in (lambda: reads(host), lambda: writes("/usr/x"), lambda: writes("/x"), environment, processes, network, memory, forks):
    try:
        print(probe(), end="")
    except (OSError, MemoryError):
        pass
"""
"""A program that prints what it should not be able to do."""


def load_sandbox(backend: str = "auto", *, slots: int = 0, python: str = "") -> ServerSandbox:
    """Returns a sandbox that has passed its test.

    Args:
        backend: `auto` or `bubblewrap`, or `unsafe`, which limits time and memory but does not isolate programs.
        slots: number of programs at once. 0 means the number of cores.
        python: interpreter of the programs. Empty means the system's `python3`, or else this interpreter.

    Raises ValueError if the back-end does not exist, cannot be used on this machine, or does not isolate programs. The message contains the remedy.
    """
    if backend not in ("auto", "bubblewrap", "unsafe"):
        raise ValueError(f"no sandbox is named {backend!r}; there are auto, bubblewrap and unsafe")
    if not sys.platform.startswith("linux"):
        raise ValueError(f"sandbox {backend}: programs of the model run on Linux only; use such a machine")
    bwrap = shutil.which("bwrap") or ""
    if not bwrap and backend != "unsafe":
        raise ValueError(
            f"sandbox.backend={backend} found no sandbox for programs of the model: bwrap is not installed. Install bubblewrap "
            "(apt-get install bubblewrap). sandbox.backend=unsafe is for programs that you trust"
        )
    python = python or shutil.which("python3", path="/usr/bin:/bin") or sys.executable
    as_nobody = {"user": _NOBODY, "group": _NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
    prefixes = _prefixes(python, as_nobody)
    command = [python, "-s", "-B", "-c", _SERVER.read_text(encoding="utf-8")]
    sandbox = ServerSandbox(
        command if backend == "unsafe" else [*_isolated(bwrap, prefixes), *command, "isolate"],
        slots=slots or os.cpu_count() or 1,
        remedy="Run `dapo-jax doctor`" if backend == "unsafe" else _NAMESPACES,
        env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"},
        cwd="/",
        **as_nobody,
    )
    with ThreadPoolExecutor(1) as thread:  # this thread may have an event loop already
        thread.submit(asyncio.run, _tested(sandbox, isolates=backend != "unsafe")).result()
    return sandbox


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


async def _tested(sandbox: ServerSandbox, *, isolates: bool) -> None:
    """Runs right and wrong programs, and programs that try to break out. Raises ValueError if the sandbox fails or leaks."""
    try:
        await sandbox.check()
        if isolates:
            with tempfile.NamedTemporaryFile() as file, socket.create_server(("127.0.0.1", 0)) as server:
                file.write(b"secret")
                file.flush()
                os.chmod(file.name, 0o644)
                stdin = f"{file.name} {server.getsockname()[1]}".encode()
                leak = await sandbox.run(Program(source=_PROBES, stdin=stdin))
            if leak.ended != "exit" or leak.stdout or leak.stderr:
                raise ValueError(
                    f"the sandbox leaks: a program {leak.stdout.decode()}{leak.stderr.decode()}. Nothing is run"
                )
        busy = await sandbox.run(Program(source="while True: pass", limits=Limits(cpu_s=0.05)))
        if busy.ended != "cpu":
            raise ValueError(f"the sandbox does not end a program that runs for ever: {busy}. Nothing is run")
    except SandboxError as error:
        raise ValueError(str(error)) from error
    finally:
        sandbox.close()
