"""Compiles one program and records its memory and collectives, or the compiler's message if the program does not fit."""

import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax

from dapo_jax.models.cudnn import workspace_bytes
from dapo_jax.plan.collectives import Traffic, collectives

_UNITS = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True, kw_only=True)
class ProgramMemory:
    """Bytes of a program's buffers, per device."""

    arguments: int
    outputs: int
    aliased: int
    """Bytes of outputs that reuse the memory of donated arguments."""
    temporaries: int
    """Bytes of temporary arrays, with cuDNN's workspace for gradients, which XLA itself counts only if it compiles for a present GPU."""
    code: int | None
    """Bytes of the program's code, or None if the compiler does not report them, as with CUDA."""

    @property
    def needed(self) -> int:
        """Total bytes that the program needs."""
        return self.arguments + self.outputs - self.aliased + self.temporaries + (self.code or 0)

    @property
    def added(self) -> int:
        """Bytes that the program needs in addition to its arguments and its code."""
        return self.needed - self.arguments - (self.code or 0)

    @property
    def kept(self) -> int:
        """Bytes of the arguments whose memory is not reused for outputs."""
        return self.arguments - self.aliased


@dataclass(frozen=True, kw_only=True)
class CompiledProgram:
    """One program, compiled for a topology."""

    name: str
    compile_s: float
    memory: ProgramMemory | None
    """The program's buffers; None if the compiler rejected the program, because the program alone exceeds a device's memory."""
    traffic: list[Traffic] = field(default_factory=list)
    refusal: str = ""
    """The compiler's message if it rejected the program. It may list the program's largest arrays."""


def compile_program(name: str, lower: Callable[[], Any], **counting: Any) -> CompiledProgram:
    """Compiles the program that `lower` returns, and records its memory use and its collectives. `counting` is passed to `collectives`."""
    began = time.monotonic()
    try:
        compiled = lower().compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return CompiledProgram(name=name, compile_s=time.monotonic() - began, memory=None, refusal=str(error))
    memory, text = compiled.memory_analysis(), compiled.as_text()
    calls = re.findall(r"\(\w+\[(\d+),(\d+),(\d+),\d+\].* u8\[0\].*cudnn\$fmhaSoftmaxBackward", text)
    workspace = max((workspace_bytes(*map(int, sizes)) for sizes in calls), default=0)
    return CompiledProgram(
        name=name,
        compile_s=time.monotonic() - began,
        memory=ProgramMemory(
            arguments=memory.argument_size_in_bytes,
            outputs=memory.output_size_in_bytes,
            aliased=memory.alias_size_in_bytes,
            temporaries=memory.temp_size_in_bytes + workspace,
            code=memory.generated_code_size_in_bytes or None,
        ),
        traffic=collectives(text, **counting),
    )


def needed_bytes(message: str) -> int | None:
    """Returns the bytes that a rejected program needs according to the compiler's message, or None if the message contains no number."""
    found = re.search(r"(?:\(|Used )([\d.]+)([KMGT]?)(?:\) exceeds| of)", message)
    return math.ceil(float(found[1]) * _UNITS[found[2]]) if found else None
