"""The sandbox: how programs end, what they can reach, and what is left of them."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from dapo_jax.sandbox import Limits, Outcome, Program, SandboxError, by_name, load_sandbox
from dapo_jax.sandbox.server import packed, unpacked
from dapo_jax.sandbox.servers import Server, ServerError
from tests.sandbox.running import IN_CONTAINER, called, run, with_sandbox

only_bubblewrap = pytest.mark.skipif(IN_CONTAINER, reason="a program in a container is not process 1")

BUSY = Program(source="while True: pass", limits=Limits(cpu_s=5.0))
RIGHT = Program(source="print(int(input()) * 2)", stdin=b"21")


@pytest.mark.parametrize(
    ("source", "ended", "status", "limits"),
    [
        ("print(1)", "exit", 0, {}),
        ("import sys; sys.exit(3)", "exit", 3, {}),
        ("exit('no')", "exit", 1, {}),
        ("1 / 0", "exit", 1, {}),
        # Process 1 of a namespace ignores SIGABRT, and abort() then halts.
        ("import os; os.abort()", "signal", signal.SIGABRT if IN_CONTAINER else signal.SIGSEGV, {}),
        ("a b", "syntax", 117, {}),
        ("(" * 100_000, "syntax", 117, {}),
        ("while True: pass", "cpu", signal.SIGKILL, {"cpu_s": 0.1}),
        ("while True: pass", "total", signal.SIGKILL, {"total_s": 0.1}),
        ("import time; time.sleep(30)", "idle", signal.SIGKILL, {"idle_s": 0.1}),
        ("import time; time.sleep(0.2)", "exit", 0, {"idle_s": 5.0}),
        ("bytearray(2 << 30)", "memory", 118, {}),
        ("print('x' * 1000)", "exit", 0, {"output": 1001}),
        ("print('x' * 1001)", "output", 0, {"output": 1001}),
    ],
)
def test_a_program_ends(source, ended, status, limits):
    outcome = run(source, **limits)
    assert (outcome.ended, outcome.status) == (ended, status)
    assert len(outcome.stdout) <= 1001


@only_bubblewrap
def test_a_program_sees_its_input_and_nothing_else():
    seen = run(
        "import os, sys; print(open(0).read(), dict(os.environ), os.getcwd(), os.getpid(), sys.argv)",
        b"\xc3\xa4",
    )
    folder = "/" + "tmp"
    expected = (
        "ä {'PATH': '/usr/bin:/bin', 'LANG': 'C.UTF-8', 'PYTHONHASHSEED': '0'} " + f"{folder} 1 ['program']\n"
    )
    assert seen.stdout.decode() == expected


def test_a_program_has_no_rights_and_no_other_open_files():
    """0 to 2 are the standard streams, 3 is for messages, and 4 lists the folder."""
    source = """
import os, resource
names = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp")
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print({int(status[name], 16) for name in names[:5]}, *(int(status[name]) for name in names[5:]))
print(sorted(map(int, os.listdir("/proc/self/fd"))), os.getuid(), os.getgid(), os.getgroups())
print(*resource.getrlimit(resource.RLIMIT_CORE))
"""
    ids = f"{os.geteuid()} {os.getegid()} {[65534] * len(os.getgroups())}"
    if os.geteuid() == 0:  # programs run as another user, without the groups of root
        ids = f"65534 65534 {[65534] if IN_CONTAINER else []}"
    assert run(source).stdout.decode() == f"{{0}} 1 2\n[0, 1, 2, 3, 4] {ids}\n0 0\n"


@only_bubblewrap
def test_mounts_have_no_device_and_no_program_with_rights_of_its_owner():
    source = """
mounts = [line.split()[4:6] for line in open("/proc/self/mountinfo")]
print(*sorted(place for place, options in mounts if not {"nosuid", "nodev"} <= set(options.split(","))))
"""
    assert run(source).stdout == b"/dev/null /dev/random /dev/urandom /dev/zero\n"


def test_threads_and_functions_of_atexit_end_before_the_program():
    source = """
import atexit, threading, time
atexit.register(lambda: print("last", flush=True))
threading.Thread(target=lambda: (time.sleep(0.1), print("first"))).start()
"""
    assert run(source).stdout == b"first\nlast\n"


def test_programs_are_repeatable():
    source = "import random; print(random.random(), {'a', 'b', 'c', 'd'}, hash('a'))"
    assert run(source).stdout == run(source).stdout


def test_files_globals_and_mounts_of_a_program_are_gone_for_the_next():
    """The two programs run on the same server."""
    leave = (
        "import builtins; builtins.left = 1; open('left', 'w').close(); open('/dev/shm/left', 'w').close()"
    )
    look = "import builtins, os; print(hasattr(builtins, 'left'), os.listdir('.'), os.listdir('/dev/shm'))"
    mounts = "print(len(open('/proc/self/mountinfo').readlines()))"

    async def job(sandbox):
        return [
            (await sandbox.run(Program(source=source))).stdout for source in (mounts, leave, look, mounts)
        ]

    first, left, found, last = with_sandbox(job, slots=1)
    assert (left, found) == (b"", b"False [] []\n")
    assert first == last, "mounts of earlier programs are left"


def test_a_program_cannot_search_its_memory_for_data_of_an_earlier_one():
    """The server forks for each program, so its memory is a copy. It would hold the output if the server had read it."""
    secret = "marmalade"  # reversed here, so that the second program does not hold it itself
    source = """
import ctypes
secret, found = input()[::-1].encode(), 0
for line in open("/proc/self/maps"):
    place, rights = line.split()[:2]
    first, last = (int(number, 16) for number in place.split("-"))
    if rights.startswith("rw") and last - first < 1 << 28:
        data = ctypes.string_at(first, last - first)
        found += data.count(secret + b"-" + secret)
print(found)
"""

    async def job(sandbox):
        text = f"{secret}-{secret}"
        await sandbox.run(Program(source=f"print({text!r}, input())", stdin=text.encode()))
        return await sandbox.run(Program(source=source, stdin=secret[::-1].encode()))

    assert with_sandbox(job, slots=1).stdout == b"0\n"


def test_calls_return_values_with_their_types_and_exceptions():
    source = """
class Solution:
    def twice(self, x):
        print("called")
        return x + x
def kinds(x):
    return (x, {1: {2.5}}, b"a", 10 ** 30, None, True, object())
"""
    calls = [
        {"name": "Solution().twice", "args": [[1]]},
        {"name": "kinds", "args": [packed((1,))]},
        {"name": "twice", "args": [{}]},
    ]
    calls = [*calls[:2], {"name": "twice", "args": []}, {"name": "other", "args": []}]
    replies, outcome = called(source, calls)
    value = {
        "tuple": [
            {"tuple": [1]},
            {"dict": [[1, {"set": [2.5]}]]},
            {"literal": "b'a'"},
            {"literal": hex(10**30)},
            None,
            True,
            {"opaque": "object"},
        ]
    }
    assert replies[:2] == [{"value": [1, 1]}, {"value": value}]
    assert [reply["raise"][0] for reply in replies[2:]] == ["TypeError", "AttributeError"]
    assert outcome.stdout == b"called\n"


def test_packed_values_come_back():
    value = [
        None,
        True,
        1,
        -(10**5000),
        1.5,
        "ä\ud800",
        (1, [2]),
        {3: (4,)},
        {5, 6},
        frozenset({7}),
        b"8",
        9j,
    ]
    again = unpacked(packed(value))
    assert again == value
    assert [*map(type, again)] == [*map(type, value)]


def test_a_program_that_forges_messages_gains_nothing():
    """It writes replies itself. They are counted as replies, and a long or broken message ends it."""
    call = [{"name": "f", "args": []}] * 2
    head = "import os, time\ndef f(): pass\n"
    replies, _ = called(head + "os.write(3, b'[]\\n{\\n')", call)
    assert replies == [[], {"raise": ["ValueError", "a message that is not JSON"]}]
    _, long = called(head + "os.write(3, b'x' * 2000)\ntime.sleep(60)", call, output=1000)
    assert long.ended == "output"
    replies, half = called(head + "os.write(3, b'{')\ntime.sleep(60)", call, idle_s=0.2)
    assert (half.ended, replies) == ("idle", [])


def test_no_program_process_or_descriptor_is_left():
    def left():
        children = [path.read_text().split() for path in Path("/proc/self/task").glob("*/children")]
        return len(os.listdir("/proc/self/fd")), sum(map(len, children))

    async def job(sandbox):
        await sandbox.run(RIGHT)
        before = left()
        for _ in range(50):
            await sandbox.run(RIGHT)
            await sandbox.run(Program(source="import os; os.fork()"))
        slow = asyncio.create_task(sandbox.run(BUSY))
        await asyncio.sleep(0.2)
        slow.cancel()
        with suppress(asyncio.CancelledError):
            await slow
        await sandbox.run(RIGHT)
        return before, left()

    before, after = with_sandbox(job, slots=1)
    assert before == after


@only_bubblewrap
def test_a_killed_server_is_replaced_between_programs_and_in_the_middle_of_one():
    async def job(sandbox):
        first = await sandbox.run(RIGHT)
        sandbox._free[0].process.kill()
        second = await sandbox.run(RIGHT)
        slow = asyncio.create_task(sandbox.run(Program(source="import time; time.sleep(0.5); print(42)")))
        servers = list(sandbox._free)
        await asyncio.sleep(0.2)
        servers[0].process.kill()
        return [outcome.stdout for outcome in (first, second, await slow)], sandbox.restarts

    assert with_sandbox(job, slots=1) == ([b"42\n"] * 3, 2)


def test_a_program_that_ends_its_server_twice_has_ended_it(monkeypatch):
    async def job(sandbox):
        whole, starts = sandbox.script, 0

        async def fails(program):
            nonlocal starts
            if program is BUSY:
                starts += 1
                raise ServerError("killed")
            return await whole(program)

        sandbox.script = fails
        return await sandbox.run(BUSY), starts

    assert with_sandbox(job) == (Outcome(ended="server"), 2)


@only_bubblewrap
def test_a_sandbox_that_fails_gives_no_outcome():
    async def job(sandbox):
        fails = "raise SystemExit('setting up uid map: Permission denied')"
        sandbox.start = partial(Server, [sys.executable, "-c", fails])
        with pytest.raises(SandboxError, match=r"setting up uid map: Permission denied\. .*AppArmor"):
            await sandbox.run(RIGHT)
        return sandbox.restarts

    assert with_sandbox(job) == 1


def test_a_program_without_a_core_has_no_outcome(monkeypatch):
    """It is not idle, and it does not compute: the limit of wall time is below the time that it sleeps."""
    monkeypatch.setattr(Limits, "wall_s", 0.2)
    with pytest.raises(SandboxError, match="had no core"):
        run("import time; time.sleep(60)", idle_s=50.0)


def test_a_session_is_idle_without_a_limit_while_it_waits_for_a_message():
    async def job(sandbox):
        program = Program(source="def add(a, b):\n    return a + b", limits=Limits(idle_s=0.2))
        async with sandbox.live(program, "calls") as live:
            replies = []
            for number in range(2):
                await live.tell({"name": "add", "args": [number, 1]})
                replies.append(await live.said())
                await asyncio.sleep(0.4)
            return replies

    assert with_sandbox(job) == [{"value": 1}, {"value": 2}]


@only_bubblewrap
@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("open('/etc/passwd')", "FileNotFoundError"),
        ("open('/usr/left', 'w')", "OSError"),
        ("open('/left', 'w')", "OSError"),
        ("open('/dev/left', 'w')", "OSError"),
        ("open('/proc/sys/kernel/core_pattern')", "FileNotFoundError"),
        ("os.fork()", "BlockingIOError"),
        ("subprocess.run(['true'])", "BlockingIOError"),
        ("socket.create_connection(('127.0.0.1', PORT), timeout=1)", "ConnectionRefusedError"),
        ("socket.socket(socket.AF_UNIX).connect('\\0dapo_jax_canary')", "ConnectionRefusedError"),
        ("socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)", "OSError"),
        ("os.kill(2, 9)", "ProcessLookupError"),
        ("os.setuid(0)", "OSError"),
        (
            "[threading.Thread(target=time.sleep, args=(9,), daemon=True).start() for _ in range(40)]",
            "RuntimeError",
        ),
        ("[open('/dev/null') for _ in range(100)]", "OSError"),
        ("open('a', 'wb').write(bytes(17 << 20))", "OSError"),
        (
            "[open(f'{place}/{n}', 'wb').write(bytes(9 << 20)) for n in range(9) for place in ('.', '/dev/shm')]",
            "OSError",
        ),
        ("[open(str(n), 'w').close() for n in range(2000)]", "OSError"),
        ("check(libc.unshare(0x10000000))", "PermissionError"),
        ("check(libc.mount(b'none', b'.', b'tmpfs', 0, None))", "PermissionError"),
    ],
)
def test_a_program_cannot(source, error):
    """Each line passes outside of a sandbox, except calls that need a right of root."""
    head = """
import ctypes, errno, os, socket, subprocess, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def check(result):
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
"""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        with suppress(OSError):  # another test listens
            abstract.bind("\0dapo_jax_canary")
            abstract.listen()
        outcome = run(head + source.replace("PORT", str(server.getsockname()[1])))
    assert outcome.stderr.decode().splitlines()[-1].startswith(error), outcome


def test_sixteen_threads_and_a_stack_of_128_mib_are_possible():
    source = """
import sys, threading, time
for _ in range(15):
    threading.Thread(target=time.sleep, args=(0.1,)).start()
threading.stack_size(1 << 27)
sys.setrecursionlimit(10 ** 6)
depth = lambda n: n and 1 + depth(n - 1)
threading.Thread(target=lambda: print(depth(50_000))).start()
"""
    assert run(source).stdout == b"50000\n"


def test_nothing_runs_without_bubblewrap_or_where_it_may_not_make_namespaces(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        ValueError, match=r"bwrap is not installed\. Install it \(bwrap: apt-get install bubblewrap\)"
    ):
        load_sandbox()
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to creating new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    tmp_path.chmod(0o755)
    with pytest.raises(ValueError, match=r"sandbox failed: "):
        load_sandbox()
    with pytest.raises(
        ValueError, match=r"no sandbox is named 'gvisor'; there are auto, bubblewrap, podman:IMAGE, docker"
    ):
        load_sandbox("gvisor")
    with pytest.raises(ValueError, match=r"sandbox\.python=.*does not run as the user of programs"):
        load_sandbox(python=str(tmp_path / "python"))


def test_a_sandbox_that_leaks_is_refused(monkeypatch):
    """A program can use the network of the host, or has a place to write to."""
    run("pass")  # skips without bubblewrap
    for name, old, new, leak in (
        ("_ALONE", "--unshare-all", "--unshare-all --share-net", "used the network"),
        ("_READ_ONLY", "--remount-ro /", "--chmod 0777 /", "wrote /x"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(by_name, name, getattr(by_name, name).replace(old, new))
            with pytest.raises(ValueError, match=f"the sandbox leaks: a program {leak}"):
                load_sandbox()


def test_a_sandbox_without_a_limit_of_time_or_with_wrong_outputs_is_refused(monkeypatch):
    run("pass")

    async def ends(sandbox, program):
        return Outcome(ended="exit")

    monkeypatch.setattr(by_name.ServerSandbox, "run", ends)
    with pytest.raises(ValueError, match="does not end a program that runs for ever"):
        load_sandbox()
    monkeypatch.setattr("dapo_jax.sandbox.servers._KNOWN", Program(source="print(1)"))
    with pytest.raises(ValueError, match="the sandbox failed: a right program ended with"):
        load_sandbox()


def test_unsafe_limits_time_and_memory(monkeypatch):
    """The program has neither the environment nor the folder of this process, and a process that it started ends with it."""
    sandbox = load_sandbox("unsafe")
    source = """
import os, time
print(os.getcwd(), *sorted(os.environ), next(line for line in open("/proc/self/status") if line.startswith("NoNewPrivs")).strip())
child = os.fork()
if child == 0:
    time.sleep(60)
print(child)
"""

    async def job():
        seen = await sandbox.run(Program(source=source))
        memory = await sandbox.run(Program(source="bytearray(2 << 30)"))
        sandbox.close()
        return seen.stdout.decode(), memory.ended

    printed, memory = asyncio.run(job())
    seen, child = printed.splitlines()
    assert (seen, memory) == ("/ LANG PATH PYTHONHASHSEED NoNewPrivs:\t1", "memory")
    with suppress(FileNotFoundError):  # or process 1 has not noticed its end
        assert Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_program_that_is_unsafe_ends_with_its_server():
    sandbox, folder = load_sandbox("unsafe", slots=1), tempfile.TemporaryDirectory()
    note = Path(folder.name) / "pid"
    note.parent.chmod(0o777)  # the program may have another user
    source = f"import os, time\nwith open({str(note)!r}, 'w') as file: file.write(str(os.getpid()))\ntime.sleep(60)"

    async def job():
        server, end = sandbox.start(), time.monotonic() + 30
        await server.begin(Program(source=source), "script")
        while not (note.exists() and note.read_text()):
            assert time.monotonic() < end
            await asyncio.sleep(0.05)
        server.process.kill()
        with suppress(FileNotFoundError, ProcessLookupError):
            while Path(f"/proc/{note.read_text()}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                assert time.monotonic() < end
                await asyncio.sleep(0.05)
        server.close()

    with folder:
        asyncio.run(job())


def test_a_machine_without_merged_folders_is_read_only(monkeypatch):
    monkeypatch.setattr(os.path, "islink", lambda path: False)
    monkeypatch.setattr(os.path, "isdir", lambda path: True)
    command = by_name._isolated("bwrap", ["/usr/local", "/python"])
    writable = [place for place, part in enumerate(command) if part in ("--bind", "--bind-try", "--dev-bind")]
    assert {command[place + 1] for place in writable} == {
        f"/dev/{name}" for name in ("null", "zero", "random", "urandom")
    }
    read_only = {command[place + 1] for place, part in enumerate(command) if part == "--ro-bind"}
    assert read_only == {"/usr", "/bin", "/sbin", "/lib", "/lib64", "/python"}


@only_bubblewrap
def test_an_interrupt_at_the_terminal_does_not_reach_the_servers():
    """They are in a session of their own."""

    async def job(sandbox):
        await sandbox.run(RIGHT)
        pid = sandbox._free[0].process.pid
        [server] = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return os.getsid(int(server))

    assert with_sandbox(job) != os.getsid(0)


def test_servers_end_with_the_process_that_started_them(tmp_path):
    """Kill -9 of a process with a running program leaves neither the server nor the program."""
    run("pass")
    script = """
import asyncio, sys
from dapo_jax.sandbox import Limits, Program, load_sandbox
async def main():
    task = asyncio.create_task(sandbox.run(Program(source="import time\\nwhile True: time.sleep(0.01)", limits=Limits(cpu_s=60))))
    await asyncio.sleep(0.5)
    print("runs", flush=True)
    await task
sandbox = load_sandbox(slots=1)
asyncio.run(main())
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, env={**os.environ, "MARK": "1"}
    ) as process:
        assert process.stdout.readline() == b"runs\n"
        bwrap = [
            int(child)
            for path in Path(f"/proc/{process.pid}/task").glob("*/children")
            for child in path.read_text().split()
        ]
        process.kill()
    for _ in range(50):
        if not any(Path(f"/proc/{pid}/exe").exists() for pid in bwrap):
            break
        time.sleep(0.1)
    assert len(bwrap) == 1
    assert not Path(f"/proc/{bwrap[0]}/exe").exists()


def test_programs_run_while_threads_allocate():
    """The training process never forks, so a lock that another thread holds cannot stop a program."""
    stop = threading.Event()
    threads = [
        threading.Thread(target=lambda: [bytearray(1000) for _ in iter(lambda: stop.wait(0.001), True)])
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    try:
        assert run("print(1)").stdout == b"1\n"
    finally:
        stop.set()
        for thread in threads:
            thread.join()
