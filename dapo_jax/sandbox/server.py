"""The server inside a sandbox. It runs one program at a time, and uses the standard library only, because the host passes its text to an interpreter.

The host sends a header with the program's files: its text, standard streams and a socket for messages. The server only forks and watches limits. It
never holds data of a program, because a later program, whose memory is a copy of the server's, could search for them. A remote service runs `alone`
instead.
"""

import ast
import atexit
import builtins
import collections
import contextlib
import ctypes
import datetime
import decimal
import fractions
import functools
import gc
import json
import linecache
import operator
import os
import platform
import random
import resource
import select
import shutil
import signal
import socket
import struct
import sys
import threading
import time
import traceback
import types

SYNTAX, MEMORY = 117, 118
"""Exit statuses after a syntax error or without memory. A program may choose them as well, but it is wrong in any case."""
FILE = "<program>"
DEEPEST = 100
RECURSION = 50_000
"""The recursion limit of programs whose functions are called, as in LiveCodeBench."""
STACK, LARGEST_FILE = 256 << 20, 16 << 20
FILES, TASKS = 64, 18
"""Number of open files, and of tasks: the server, the program and its 16 threads."""
SOCKET = "/socket"
"""The place of the host's socket in a container."""
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
SHARED = "typing collections itertools functools math heapq bisect string copy"
"""Modules whose names programs may use without an import. Names of Python itself come first."""
MODULES = f"{SHARED} datetime decimal fractions io json operator os random re statistics time"

# Flags of clone and unshare: NEWPID, then NEWNS, then any namespace, then THREAD.
_PID, _MOUNTS, _NAMESPACES, _THREAD = 0x20000000, 0x00020000, 0x7E020080, 0x00010000
_MACHINES, _CLONE, _SOCKET = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}, (56, 220), (41, 198)
_LIMITS = (302, 261)  # prlimit64
_REFUSED = """
ptrace 101 117 process_vm_readv 310 270 process_vm_writev 311 271 pidfd_getfd 438 438 kcmp 312 272 mount 165 40 umount2 166 39 pivot_root 155 41
chroot 161 51 open_tree 428 428 move_mount 429 429 fsopen 430 430 fsconfig 431 431 fsmount 432 432 fspick 433 433 mount_setattr 442 442 unshare 272 97
setns 308 268 bpf 321 280 perf_event_open 298 241 io_uring_setup 425 425 io_uring_enter 426 426 io_uring_register 427 427 add_key 248 217
request_key 249 218 keyctl 250 219 userfaultfd 323 282 memfd_create 319 279 memfd_secret 447 447 shmget 29 194 msgget 68 186 semget 64 190
mq_open 240 180 name_to_handle_at 303 264 open_by_handle_at 304 265 kexec_load 246 104 kexec_file_load 320 294 init_module 175 105
finit_module 313 273 delete_module 176 106 settimeofday 164 170 clock_settime 227 112 adjtimex 159 171 clock_adjtime 305 266 setpriority 141 140
sched_setparam 142 118 sched_setscheduler 144 119 sched_setaffinity 203 122 sched_setattr 314 274 ioprio_set 251 30 personality 135 92
acct 163 89 quotactl 179 60 reboot 169 142 swapon 167 224 swapoff 168 225 syslog 103 116 sethostname 170 161 setdomainname 171 162
"""
"""System calls that fail with EPERM, each with its number on x86-64 and on aarch64."""


_OPERATORS = "getitem setitem delitem eq lt le gt ge add sub mul"


async def _awaited(value):
    return await value


IMMUTABLE, MUTABLE = (str, int, float, tuple), (list, dict, set)
OPERATIONS = {
    **{
        kind.__name__: kind for kind in (getattr, setattr, iter, next, len, str, repr, bool, hash, isinstance)
    },
    **{name: getattr(operator, name) for name in _OPERATORS.split()},
    "call": lambda function, *args, **kwargs: function(*args, **kwargs),
    "enter": lambda manager: manager.__enter__(),
    "exit": lambda manager: manager.__exit__(None, None, None),
    "await": lambda value: __import__("asyncio").run(_awaited(value)),
    "value": lambda value: value,
    "plain": lambda value: next((kind(value) for kind in MUTABLE if isinstance(value, kind)), value),
    "error": lambda kind: isinstance(kind, type) and issubclass(kind, Exception),
}
"""The operations of tests on an object of a program. The judge lets arithmetic and comparisons have objects of the program only, because a value could be an expected one."""
MADE = {
    kind.__name__: kind
    for kind in (
        *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone),
        *(decimal.Decimal, fractions.Fraction, collections.deque, range, slice, bytearray, iter),
    )
}
"""Further plain data, by the function that makes it from plain data."""
libc = ctypes.CDLL(None, use_errno=True)


def packed(value, depth=0, keep=None):
    """Converts plain data to JSON-serializable data that keeps its types. Any other object becomes the result of `keep`, or {"opaque": type}, which equals nothing."""
    if type(value).__module__ == "numpy" and not hasattr(value, "__len__"):
        value = value.tolist()  # a number of NumPy becomes a number of Python
    kind = type(value)
    if keep and kind.__module__ == "solution" and isinstance(value, (*IMMUTABLE, *MUTABLE)):
        return keep(value)  # data of a class of the program also has methods and attributes
    if value is None or isinstance(value, (bool, str, float)):
        return value
    if isinstance(value, int):  # decimal text of long integers is slow and limited
        return value if abs(value) < 1 << 64 else {"literal": hex(value)}
    if isinstance(value, (bytes, complex)):
        return {"literal": repr(value)}
    if isinstance(value, dict) and depth < DEEPEST:
        return {"dict": [[packed(part, depth + 1, keep) for part in item] for item in value.items()]}
    for kind in (list, tuple, set, frozenset) if depth < DEEPEST else ():
        if isinstance(value, kind):
            items = [packed(item, depth + 1, keep) for item in value]
            return items if kind is list else {kind.__name__: items}
    kind = type(value)
    if MADE.get(kind.__name__) is kind:
        args = (list(value), value.maxlen) if kind is collections.deque else value.__reduce__()[1]
        return {"made": [kind.__name__, [packed(part, depth + 1, keep) for part in args]]}
    return keep(value) if keep else {"opaque": type(value).__name__}


def unpacked(data, kept=None):
    """Converts the result of `packed` back. `kept` returns the object for {"kept": name}. An opaque value becomes a new object. Only call it inside a sandbox,
    because data may be hostile."""
    if isinstance(data, list):
        return [unpacked(item, kept) for item in data]
    if not isinstance(data, dict):
        return data
    [(kind, inner)] = data.items()
    if kind == "literal":
        return ast.literal_eval(inner)
    if kind == "dict":
        return {unpacked(key, kept): unpacked(item, kept) for key, item in inner}
    if kind == "kept" and kept:
        return kept(inner)
    if kind == "own" and kept:
        return kept(inner[0], unpacked(inner[1], kept))
    if kind == "made":
        return MADE[inner[0]](*unpacked(inner[1], kept))
    kinds = {"tuple": tuple, "set": set, "frozenset": frozenset}
    return kinds[kind](unpacked(item, kept) for item in inner) if kind in kinds else object()


def filter_of(machine):
    """Returns the filter of system calls for a machine, as instructions of BPF. A program can start threads, but no processes."""
    which, error = list(_MACHINES).index(machine), 0x00050000
    load, equal, above, masks, end = 0x20, 0x15, 0x35, 0x45, 0x06

    def refuse(number, code):
        return [(equal, 0, 1, number), (end, 0, 0, error | code)]

    code = [(load, 0, 0, 4), (equal, 1, 0, _MACHINES[machine]), (end, 0, 0, 0x80000000), (load, 0, 0, 0)]
    if machine == "x86_64":
        code += [(above, 0, 1, 0x40000000), (end, 0, 0, error | 38)]  # x32 has other numbers
        code += [*refuse(57, 11), *refuse(58, 11)]  # fork and vfork
    own = [(load, 0, 0, 16), (equal, 1, 0, 0), (end, 0, 0, error | 1), (load, 0, 0, 0)]
    code += [(equal, 0, 4, _LIMITS[which]), *own]  # later programs inherit the limits of the server
    code += refuse(435, 38)  # clone3, whose arguments a filter cannot read; glibc uses clone instead
    for number in map(int, _REFUSED.split()[1 + which :: 3]):
        code += refuse(number, 1)
    clone = [(load, 0, 0, 16), (masks, 0, 1, _NAMESPACES), (end, 0, 0, error | 1)]
    clone += [(masks, 1, 0, _THREAD), (end, 0, 0, error | 11), (end, 0, 0, 0x7FFF0000)]
    code += [(equal, 0, len(clone), _CLONE[which]), *clone]
    families = [(equal, 3, 0, 1), (equal, 2, 0, 2), (equal, 1, 0, 10)]  # AF_UNIX, AF_INET, AF_INET6
    code += [(equal, 0, 5, _SOCKET[which]), (load, 0, 0, 16), *families, (end, 0, 0, error | 97)]
    return [*code, (end, 0, 0, 0x7FFF0000)]


def checked(result, what):
    """Raises OSError with the name of a C function that returned a negative number."""
    if result < 0:
        raise OSError(f"{what}: {os.strerror(ctypes.get_errno())}")


class ForkServer:
    """Starts the programs that the host sends, and watches their limits."""

    def __init__(self, host, kind):
        """Creates the filter of system calls. `kind` is `bubblewrap` (each program has its own namespaces), `container` (programs run one after another in the
        namespaces of the container), or `unsafe` (without namespaces and without a filter)."""
        self.host, self.kind, self.isolates = host, kind, kind == "bubblewrap"
        self.own = os.open("/proc/self/ns/pid", os.O_RDONLY)
        if kind != "unsafe":
            code = filter_of(platform.machine())
            self.lines = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
            self.filter = struct.pack("HxxxxxxQ", len(code), ctypes.addressof(self.lines))
        libc.prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: programs cannot look into the server
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # which process 1 of a container ignores

    def serve(self):
        """Runs programs until the host ends. Commands for a program that has ended are ignored."""
        while True:
            header, files, *_ = socket.recv_fds(self.host, 1 << 16, 8)
            if not header:
                return
            if files:
                self.run(json.loads(header), files)

    def run(self, job, files):
        """Runs a program, and reports its end. If it cannot be started, ends the server."""
        reading, writing = os.pipe()
        if self.isolates:
            checked(libc.setns(self.own, _PID), "setns")
            checked(libc.unshare(_PID), "unshare")
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                self.prepare(job["limits"], [*files, writing])
                status = Runner(job["mode"]).run()
            except BaseException:
                os.write(5, traceback.format_exc().encode()[-2000:])
            os._exit(status)
        for one in (*files, writing):
            os.close(one)
        failure = os.read(reading, 4000)
        os.close(reading)
        if failure != b"+":
            sys.exit(failure.decode())
        self.host.send(json.dumps(self.watched(pid, **job)).encode())
        if self.kind == "container":
            clean()

    def prepare(self, limits, files):
        """Gives a child its files and its view of the machine, and takes all rights from it."""
        for number, one in enumerate(files):  # 0 to 2: standard streams, 3: messages, 4: text, 5: the server
            os.dup2(one, 64 + number)
        for number in range(len(files)):
            os.dup2(64 + number, number)
        os.closerange(len(files), 256)
        if self.isolates:
            checked(libc.unshare(_MOUNTS), "unshare")
            checked(
                libc.mount(b"proc", b"/proc", b"proc", 14, b"subset=pid"),
                "mount /proc, which needs Linux 5.8",
            )
            for place in (b"/tmp", b"/dev/shm"):
                options = b"size=32m,nr_inodes=1024,mode=777"
                checked(libc.mount(b"tmpfs", place, b"tmpfs", 6, options), "mount tmpfs")
            for capability in range(64):
                libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP
            checked(libc.capset(struct.pack("Ii", 0x20080522, 0), bytes(24)), "capset")
            resource.setrlimit(resource.RLIMIT_NPROC, (TASKS, TASKS))
        else:
            os.setpgid(0, 0)
            libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        set_limits(limits["memory_mb"])
        libc.prctl(4, 1, 0, 0, 0)
        libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
        if self.kind != "unsafe":
            os.chdir("/tmp")
            checked(libc.prctl(22, 2, self.filter, 0, 0), "seccomp")

    def watched(self, pid, limits, mode):
        """Waits until a program ends or exceeds a limit, and kills all that it started. Returns how it ended."""
        process, poll, ended, runs = os.pidfd_open(pid), select.poll(), "", True
        poll.register(process, select.POLLIN)
        poll.register(self.host, select.POLLIN)
        start = last = time.monotonic()
        start_cpu = last_cpu = idle = idled = 0.0
        waited = dict[str, float]()
        while not ended:
            events = dict(poll.poll(50 if runs else 1000))
            now, before, (cpu, waited) = time.monotonic(), waited, spent(pid)
            # The kernel reports a wait when it ends, so the idle time may fall again.
            longest = max((waited[task] - before.get(task, 0.0) for task in waited), default=0.0)
            idle = max(0.0, idle + (now - last) - (cpu - last_cpu) - longest)
            if process in events:
                ended = "exit"
            elif self.host.fileno() in events:
                # `m`: a message was sent, so the limits of a call begin. `p`: the host has the reply, so the clock stops.
                command = self.host.recv(1)
                # A program may not sleep between messages for ever. Shorter times may be the host's, which is slow to read a message.
                idled += idle if runs and idle > 0.05 else 0.0
                runs, ended = command == b"m", "" if command in (b"m", b"p") else "stopped"
                start, start_cpu, idle = now, cpu, 0.0
            else:
                over = {"cpu": cpu - start_cpu, "total": cpu + idled, "idle": idle, "wall": now - start}
                past = [name for name in over if over[name] > limits[f"{name}_s"]]
                ended = next((name for name in past if runs or name == "total"), "")
            last, last_cpu = now, cpu
        with contextlib.suppress(ProcessLookupError):
            (os.kill if self.isolates else os.killpg)(pid, signal.SIGKILL)
        _, status, used = os.wait4(pid, 0)
        os.close(process)
        seconds = used.ru_utime + used.ru_stime
        if ended == "exit" and mode == "script" and seconds > limits["cpu_s"]:
            ended = "cpu"  # it ended between two looks at its clock
        if ended == "exit" and os.WIFSIGNALED(status):
            ended = "signal"
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        return {"ended": ended, "status": number, "cpu_s": seconds}


def clean():
    """Removes the files that a program left. If it cannot, ends the server, so that the next program has a new container."""
    for place in ("/tmp", "/dev/shm", "/dev/mqueue"):
        for path in os.scandir(place):
            if path.is_dir(follow_symlinks=False):
                shutil.rmtree(path)
            else:
                os.unlink(path)


def set_limits(memory_mb):
    """Limits this process, except for its time."""
    for name, most in {"AS": memory_mb << 20, "FSIZE": LARGEST_FILE, "NOFILE": FILES, "CORE": 0}.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))


def spent(pid):
    """Returns the processor time of a process, and the time that each of its threads waited for a core, in seconds."""
    cpu, waited = 0.0, {}
    with contextlib.suppress(OSError):  # it has ended
        cpu = time.clock_gettime((~pid << 3) | 2)  # see clock_getcpuclockid
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/schedstat") as file:
                waited[task] = int(file.read().split()[1]) / 1e9
    return cpu, waited


class Runner:
    """Runs a program in the child. Modes: `script`, `calls` (a module that answers messages), and `judge` (a script that sends messages)."""

    def __init__(self, mode):
        """Gives the program its streams, and lets the server start its clock."""
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            errors = "backslashreplace" if number == 2 else "surrogateescape"
            buffering = 1 if number == 2 or mode == "calls" else -1
            stream = open(number, "w" if number else "r", buffering, "utf-8", errors, closefd=False)  # noqa: SIM115
            # As in the interpreter, a second name keeps the stream open if the program replaces it.
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
        if mode == "calls":  # as on the sites whose tests call a function
            sys.setrecursionlimit(RECURSION)
        with open(4, encoding="utf-8", errors="surrogatepass") as file:
            self.text = file.read()
        module = types.ModuleType("solution" if mode == "calls" else "__main__")
        self.calls, self.space, self.kept, self.numbers = mode == "calls", module.__dict__, [], {}
        self.messages = [open(3, how, closefd=False) for how in ("rb", "wb")]  # noqa: SIM115
        sys.modules[module.__name__] = module
        if mode == "judge":
            self.space.update(ask=self.ask, packed=packed, unpacked=unpacked)
        sys.argv = ["program"]
        random.seed(0)
        gc.enable()
        os.write(5, b"+")
        os.close(5)

    def run(self):
        """Runs the program and returns its exit status. As in the interpreter, threads and functions of `atexit` end first."""
        status = 0
        try:
            status = self.executed()
            threading.__dict__["_shutdown"]()
        except SystemExit as error:
            status = error.code if type(error.code) is int else int(error.code is not None)
        except MemoryError:
            self.show()
            status = MEMORY
        except BaseException:
            self.show()
            status = 1
        with contextlib.suppress(BaseException):
            atexit._run_exitfuncs()
        for stream in (sys.__stdout__, sys.stdout):
            try:
                if stream and not getattr(stream, "closed", False):
                    stream.flush()
            except BaseException:
                status = status or 120
        return status & 0xFF

    def executed(self):
        """Executes the program, and answers messages. Returns an exit status."""
        remember(self.text)
        try:
            code = compile(self.text, FILE, "exec", dont_inherit=True)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            self.show()
            return SYNTAX
        exec(code, self.space)
        reply = ()
        while self.calls:
            reply = (self.called(**self.ask(*reply)),)
        return 0

    def ask(self, *message):
        """Sends a message if there is one, and waits for the next message of the host."""
        received, sent = self.messages
        for one in message:
            sent.write(json.dumps(one).encode() + b"\n")
            sent.flush()
        line = received.readline()
        return json.loads(line) if line else sys.exit()

    def called(self, name, args, kwargs=None, back=False, on=False):
        """Calls a function of the program, or `cell` if `name` is empty, or with `on` one of `OPERATIONS` on objects. Returns the value or the exception. With `back`,
        also returns the arguments, which may have changed, and objects that are not plain data are kept for later calls."""
        try:
            args, kwargs = unpacked(args, self.found), unpacked(kwargs or {"dict": []}, self.found)
            if not name:
                return {"value": self.cell(*args)}
            value = (OPERATIONS[name] if on else self.found(name))(*args, **kwargs)
            keep = self.keep if back else None
            changed = {"args": packed([*args, *kwargs.values()], 0, keep)} if back else {}
            return {"value": packed(value, 0, keep)} | changed
        except MemoryError:
            os._exit(MEMORY)
        except BaseException as error:
            self.show()
            # The tests know the exceptions of Python only.
            kinds = [kind for kind in type(error).__mro__ if kind.__module__ == "builtins" or not back]
            raised = [kinds[0].__name__, " ".join(map(str, error.args))[:500]]
            if back and kinds[0] is not type(error):  # an exception of the program, see `exception_of`
                names, state = (
                    [kind.__name__ for kind in type(error).__mro__],
                    packed(vars(error), 0, self.keep),
                )
                return {"raise": [*raised, packed(list(error.args)), names, state, str(error)]}
            return {"raise": [*raised, packed(list(error.args))] if back else raised}

    def found(self, name):
        """Returns a kept object by its number, a function of the program or a method of its class `Solution` by its name, or a function of the tests by `@` and its number."""
        if isinstance(name, int):
            return self.kept[name]
        if name.startswith("@"):
            return lambda *args, **kwargs: self.asked(int(name[1:]), args, kwargs)
        first, *path = name.split(".")
        *_, name = first, *path
        is_method = (not path or first == "Solution()") and name in dir(self.space.get("Solution"))
        if first in self.space and first != "Solution" and not is_method:
            return functools.reduce(getattr, path, self.space[first])
        if "Solution" in self.space and (is_method or name not in self.space):
            return getattr(self.space["Solution"](), name)
        return self.space[name]

    def asked(self, number, args, kwargs):
        """Calls a function of the tests."""
        args, kwargs = packed([list(args), kwargs], 0, self.keep)
        message = {"callback": number, "args": args, "kwargs": kwargs}
        while "answer" not in (reply := self.ask(message)):  # the function of the tests calls the program
            message = self.called(**reply)
        answer = reply["answer"]
        if "raise" in answer:
            kind = getattr(builtins, answer["raise"][0], None)
            raise (kind if isinstance(kind, type) else RuntimeError)(answer["raise"][1])
        return unpacked(answer["value"], self.found)

    def keep(self, value):
        """Keeps an object, and returns the data for it."""
        number = self.numbers.setdefault(id(value), len(self.kept))
        if number == len(self.kept):
            self.kept.append(value)
        if not isinstance(value, IMMUTABLE):
            return {"kept": number}
        return {
            "own": [number, packed(list(value), 0, self.keep) if isinstance(value, tuple) else packed(value)]
        }

    def cell(self, text):
        """Executes a text in the program's namespace, and prints the value of its last expression."""
        remember(text)
        self.space["__name__"] = "__main__"
        tree = ast.parse(text, FILE)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, FILE, "exec"), self.space)
        value = eval(compile(ast.Expression(last.value), FILE, "eval"), self.space) if last else None
        if value is not None:
            print(repr(value))
        sys.stdout.flush()

    def show(self):
        """Prints the current exception with at most 10 frames, all of them of the program."""
        kind, error, frames = sys.exc_info()
        while frames and frames.tb_frame.f_code.co_filename != FILE:
            frames = frames.tb_next
        with contextlib.suppress(BaseException):
            traceback.print_exception(kind, error, frames, limit=-10)
            sys.stdout.flush()


def remember(text):
    """Lets tracebacks show the lines of a program."""
    linecache.cache[FILE] = (len(text), None, text.splitlines(True), FILE)


def share_names():
    """Prepares what all programs share, such as the names of common modules."""
    for name in MODULES.split():
        module = __import__(name)
        names = getattr(module, "__all__", dir(module)) if name in SHARED.split() else ()
        public = {one: getattr(module, one) for one in names if one[0] != "_"}
        vars(builtins).update({name: module} | public | vars(builtins))
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(0)
    # Threads would otherwise reserve as much address space as the first thread, and 64 MiB for allocations.
    threading.stack_size(8 << 20)
    libc.mallopt(-8, 1)  # M_ARENA_MAX
    sys.path = [place for place in sys.path if place]


def start_again():
    """Starts the interpreter a second time, with the stack and the environment of programs. It places its memory and seeds its hashes when it starts."""
    if sys.argv[-1] != "again":
        _, most = resource.getrlimit(resource.RLIMIT_STACK)
        size = STACK if most == resource.RLIM_INFINITY else min(STACK, most)
        resource.setrlimit(resource.RLIMIT_STACK, (size, size))
        os.execve(sys.executable, [*sys.orig_argv, "again"], ENVIRONMENT)


def serve(kind):
    """Serves the host, whose socket is the standard input or, in a container, a file."""
    share_names()
    gc.collect()
    gc.freeze()
    gc.disable()
    if kind == "container":
        if os.getpid() != 1:
            sys.exit("a server that removes files needs a container of its own, where it is process 1")
        host = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        host.connect(SOCKET)
    else:
        host = socket.socket(fileno=0)
    ForkServer(host, kind).serve()


def alone(mode, memory_mb):
    """Runs one program, whose files are in this folder: `source`, `stdin`, and the host's `messages`. Writes `stdout`, `stderr` and `replies`."""
    start_again()
    share_names()
    for number, name in enumerate(("stdin", "stdout", "stderr", "messages", "source", "started")):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT, 0o600), number)
    runner = Runner(mode)
    runner.messages[1] = open("replies", "wb")  # noqa: SIM115
    set_limits(memory_mb)
    os._exit(runner.run())


if __name__ == "__main__":
    start_again()
    serve(sys.argv[1])
