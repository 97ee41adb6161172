"""The filter of system calls, which an interpreter of BPF runs here for both kinds of machines, and the test that each sandbox has to pass."""

import ast
import socket
import subprocess
import sys

import pytest

from dapo_jax.sandbox import by_name
from dapo_jax.sandbox.server import filter_of

ALLOWED, KILLED, NO_SYSTEM_CALL = 0x7FFF0000, 0x80000000, 38
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
NUMBERS = """
acct 163 89 add_key 248 217 adjtimex 159 171 bpf 321 280 chroot 161 51 clock_adjtime 305 266 clock_settime 227 112 delete_module 176 106
finit_module 313 273 fsconfig 431 431 fsmount 432 432 fsopen 430 430 fspick 433 433 init_module 175 105 io_uring_enter 426 426
io_uring_register 427 427 io_uring_setup 425 425 ioprio_set 251 30 kcmp 312 272 kexec_file_load 320 294 kexec_load 246 104 keyctl 250 219
memfd_create 319 279 memfd_secret 447 447 mount 165 40 mount_setattr 442 442 move_mount 429 429 mq_open 240 180 msgget 68 186
name_to_handle_at 303 264 open_by_handle_at 304 265 open_tree 428 428 perf_event_open 298 241 personality 135 92 pidfd_getfd 438 438
pivot_root 155 41 process_vm_readv 310 270 process_vm_writev 311 271 ptrace 101 117 quotactl 179 60 reboot 169 142 request_key 249 218
sched_setaffinity 203 122 sched_setattr 314 274 sched_setparam 142 118 sched_setscheduler 144 119 semget 64 190 setdomainname 171 162
sethostname 170 161 setns 308 268 setpriority 141 140 settimeofday 164 170 shmget 29 194 swapoff 168 225 swapon 167 224 syslog 103 116
umount2 166 39 unshare 272 97 userfaultfd 323 282
"""
"""From asm/unistd_64.h and asm-generic/unistd.h of Linux, in the order of the alphabet."""


def result(machine, number, first=0, *, architecture=None):
    """The filter's decision on a system call: 0 if it is allowed, None if it kills the program, or the number of the error."""
    data = {0: number, 4: architecture or ARCHITECTURES[machine], 16: first}
    code, place, value = filter_of(machine), 0, 0
    while True:
        kind, yes, no, operand = code[place]
        place += 1
        if kind == 0x20:
            value = data[operand]
        elif kind == 0x06:
            known = {ALLOWED: 0, KILLED: None}
            return known[operand] if operand in known else operand - 0x00050000
        else:
            is_true = {0x15: value == operand, 0x35: value >= operand, 0x45: bool(value & operand)}[kind]
            place += yes if is_true else no


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_the_filter_refuses_each_call_by_its_number(machine):
    words, place = NUMBERS.split(), 1 + list(ARCHITECTURES).index(machine)
    refused = {int(number) for number in words[place::3]}
    calls = {"x86_64": (56, 435, 41, 302), "aarch64": (220, 435, 198, 261)}
    clone, clone3, create_socket, limits = calls[machine]
    others = dict.fromkeys((57, 58), 11) if machine == "x86_64" else {}  # fork and vfork
    expected = dict.fromkeys(refused, 1) | {clone3: NO_SYSTEM_CALL, clone: 11, create_socket: 97} | others
    found = {number: result(machine, number) for number in range(512)}
    assert {number: error for number, error in found.items() if error} == expected
    assert [result(machine, limits, pid) for pid in (0, 1)] == [0, 1]
    assert [result(machine, create_socket, family) for family in (1, 2, 10, 16, 40)] == [0, 0, 0, 97, 97]
    threads, namespaces = 0x00010000, (0x80, *(1 << bit for bit in (17, 25, 26, 27, 28, 29, 30)))
    assert result(machine, clone, threads) == 0
    assert {result(machine, clone, threads | namespace) for namespace in namespaces} == {1}


def test_the_filter_refuses_the_numbers_of_other_architectures():
    assert result("x86_64", 1, architecture=ARCHITECTURES["aarch64"]) is None
    assert result("aarch64", 64, architecture=ARCHITECTURES["x86_64"]) is None
    assert result("x86_64", 0x40000000 + 1) == NO_SYSTEM_CALL


def test_each_probe_of_a_sandbox_notices_a_leak(tmp_path):
    """Outside of a sandbox, each of them prints a text."""
    functions = [node.name for node in ast.parse(by_name._PROBES).body if isinstance(node, ast.FunctionDef)]
    local = by_name._LOCAL_PROBES.split()
    assert {probe.partition("(")[0] for probe in local} == {*functions}
    assert {"writes('/usr/x')", "writes('/x')"} < {*local}
    outside = [*by_name._REMOTE_PROBES.split(), f"writes('{tmp_path}/x')", "environment()", "processes()"]
    with socket.create_server(("127.0.0.1", 0)) as server:
        (tmp_path / "host").write_text("secret")
        for probe in outside:
            given = f"{tmp_path}/host {server.getsockname()[1]} {probe}"
            command = [sys.executable, "-c", by_name._PROBES]
            assert subprocess.check_output(command, input=given, text=True), probe
