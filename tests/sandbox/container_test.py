"""Servers in containers. The engine here is a double, which records its arguments and isolates the server with bubblewrap.

With an engine and an image with Python, all tests of the sandbox run in real containers: SANDBOX_BACKEND=podman:IMAGE pytest tests/sandbox
"""

import asyncio
import json
import shutil
import sys
from pathlib import Path

import pytest

from dapo_jax.sandbox import Program, load_sandbox
from tests.sandbox.running import run

ENGINE = f"""#!{sys.executable}
import json, os, sys
arguments = sys.argv[1:]
with open({{record!r}}, "w") as file:
    json.dump(arguments, file)
place = arguments.index("IMAGE")
host, inside = arguments[arguments.index("--volume") + 1].split(":")
nobody = ["--unshare-all", "--uid", "65534", "--gid", "65534"]
folders = ["--ro-bind", "/usr", "/usr", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--tmpfs", "/dev/shm", "--tmpfs", "/dev/mqueue"]
links = [part for name in ("bin", "lib", "lib64") for part in ("--symlink", f"usr/{{{{name}}}}", f"/{{{{name}}}}")]
private = ["--as-pid-1", "--die-with-parent", "--ro-bind", host, inside, "--remount-ro", "/", "--remount-ro", "/dev"]
os.environ["PATH"] = "/usr/local/bin:/usr/bin:/bin"
{{leak}}
os.execvp({{bwrap!r}}, ["bwrap", *nobody, *folders, *links, *private, *arguments[place + 1 :]])
"""


@pytest.fixture
def podman(tmp_path, monkeypatch):
    """Installs the double. Returns the file with its arguments. An argument is a line of its program."""
    run("pass")  # skips without bubblewrap
    bwrap = shutil.which("bwrap")

    def install(leak=""):
        program, record = tmp_path / "podman", tmp_path / "arguments.json"
        program.write_text(ENGINE.format(record=str(record), bwrap=bwrap, leak=leak))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        return record

    return install


def outcomes(*sources):
    """The outcomes of programs, one after another in one container, and the number of containers that ended."""
    sandbox = load_sandbox("podman:IMAGE", slots=1)

    async def work():
        try:
            return [await sandbox.run(Program(source=source)) for source in sources], sandbox.restarts
        finally:
            [server] = sandbox._free
            assert not Path(server._folder.name).exists()
            sandbox.close()
            assert server.process.returncode == 0, (
                "the engine ends by itself, after it has removed the container"
            )

    return asyncio.run(work())


def test_a_container_has_no_network_no_rights_and_limits(podman):
    record = podman()
    [outcome], _ = outcomes("import os; print(os.getcwd(), *sorted(os.environ))")
    assert outcome.stdout == f"{Path('/') / 'tmp'} LANG PATH PYTHONHASHSEED\n".encode()
    arguments = json.loads(record.read_text())
    options = " ".join(arguments[: arguments.index("IMAGE")])
    assert arguments[arguments.index("IMAGE") + 1 :][0] == "python3"
    for option in (
        "--rm --init=false --pull never --network none --read-only --cap-drop ALL --security-opt no-new-privileges",
        "--user 65534:65534 --pids-limit 18 --memory 4g --memory-swap 4g",
        "--tmpfs /tmp:size=32m,mode=1777 --tmpfs /dev/shm:size=32m,mode=1777 --read-only-tmpfs=false",
    ):
        assert option in options


def test_a_program_leaves_no_file_and_cannot_harm_the_server(podman):
    """Files in both folders are removed. Process 1 is the server: its memory, limits and signals are out of reach."""
    podman()
    leave = "import os; os.makedirs('a/b'); open('c', 'w'); open('/dev/shm/d', 'w'); open('/dev/mqueue/f', 'w'); os.symlink('/', 'e')"
    look = "import os; print(os.listdir('.'), os.listdir('/dev/shm'), os.listdir('/dev/mqueue'))"
    attack = """
import os, resource, signal, socket
host = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
try:
    host.connect("/socket")
except ConnectionRefusedError:
    print("refused")
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP):
    os.kill(1, number)
for tried in (lambda: open("/proc/1/mem", "rb"), lambda: os.readlink("/proc/1/root"), lambda: resource.prlimit(1, resource.RLIMIT_AS, (0, 0))):
    try:
        print(tried())
    except PermissionError:
        print("refused")
os.fork()
"""
    found, restarts = outcomes(leave, look, attack, look)
    assert [outcome.stdout for outcome in (found[0], found[1], found[3])] == [
        b"",
        b"[] [] []\n",
        b"[] [] []\n",
    ]
    assert found[2].stdout == b"refused\n" * 4
    assert found[2].stderr.splitlines()[-1].startswith(b"BlockingIOError")
    assert restarts == 0


def test_files_that_cannot_be_removed_end_the_container(podman):
    podman()
    found, restarts = outcomes(
        "import os; os.makedirs('a/b'); os.chmod('a', 0)", "import os; print(os.listdir('.'))"
    )
    assert [outcome.ended for outcome in found] == ["exit", "exit"]
    assert (found[1].stdout, restarts) == (b"[]\n", 1)


def test_a_container_that_leaks_or_does_not_start_is_refused(podman, monkeypatch):
    podman(leak='private += ["--share-net"]')
    with pytest.raises(ValueError, match="the sandbox leaks: a program used the network"):
        load_sandbox("podman:IMAGE")
    podman(leak='sys.exit("Error: IMAGE: image not known")')
    with pytest.raises(
        ValueError, match=r"failed: Error: IMAGE: image not known\. Pull an image with Python"
    ):
        load_sandbox("podman:IMAGE")
    with pytest.raises(ValueError, match=r"docker is not installed\. Install it"):
        load_sandbox("docker:IMAGE")
    monkeypatch.setattr("dapo_jax.sandbox.container._START_S", 0.2)
    podman(leak="import time; time.sleep(0.5); sys.exit()")
    with pytest.raises(ValueError, match="failed: the server ended"):
        load_sandbox("podman:IMAGE")


def test_the_server_of_a_container_removes_files_only_there(podman):
    """Outside of a container, it is not process 1."""
    podman(leak="os.execv(sys.executable, [sys.executable, *arguments[place + 2 :]])")
    with pytest.raises(ValueError, match="needs a container of its own, where it is process 1"):
        load_sandbox("podman:IMAGE")
