"""The profile's table of a recording: of a CPU, whose operations are on the host's lines, and of a GPU, whose kernels are on streams."""

from types import SimpleNamespace

import pytest

from benchmarks import profiling
from benchmarks.hlo_sources import ANY, Source
from benchmarks.trace import Slice


def event(name, start, duration, **stats):
    return SimpleNamespace(name=name, start_ns=start, duration_ns=duration, stats=list(stats.items()))


def recording(**planes):
    """Planes of lines of events."""
    return SimpleNamespace(planes=[
        SimpleNamespace(name=name, lines=[SimpleNamespace(name=line, events=events) for line, events in lines.items()])
        for name, lines in planes.items()
    ])  # fmt: skip


MEASURED = event("measured", 0, 100)
OPERATION = {"hlo_op": "dot.1", "hlo_module": "jit_f", "program_id": 3}


def test_on_a_cpu_operations_are_those_with_an_operation_of_a_program():
    profile = recording(
        **{"/host:CPU": {"a thread": [MEASURED, event("x", 10, 5, **OPERATION), event("other", 1, 2)]}}
    )
    assert profiling._read(profile) == ([Slice(10, 15, "module_0003.jit_f", "dot.1")], (0, 100))


def test_on_a_gpu_operations_are_the_kernels_of_its_streams():
    """Not the host's launches, nor the lines that repeat the kernels. A kernel of a CUDA graph has only its own name."""
    profile = recording(**{
        "/host:CPU": {"a thread": [MEASURED, event("launch", 5, 90, **OPERATION)]},
        "/device:GPU:0": {
            "Stream #13(Compute)": [event("gemm", 10, 5, **OPERATION), event("loop_add_fusion_53", 20, 7)],
            "XLA Ops": [event("dot.1", 10, 5, **OPERATION)],
        },
    })  # fmt: skip
    slices, span = profiling._read(profile)
    assert slices == [Slice(10, 15, "module_0003.jit_f", "dot.1"), Slice(20, 27, ANY, "loop_add_fusion_53")]
    assert span == (0, 100)


def test_a_recording_without_operations_is_an_error():
    with pytest.raises(RuntimeError, match="recorded 0 operations and the measured run"):
        profiling._read(recording(**{"/host:CPU": {"a thread": [MEASURED]}}))


def test_parts_have_the_names_of_functions_files_or_libraries():
    known, file = Source("update.py:Updater._apply_program", False), Source("losses.py:dapo_loss", True)
    assert profiling._part(known, "fusion.1") == "optimizer"
    assert profiling._part(file, "fusion.2") == "objective, backward"
    assert profiling._part(Source("new.py:new", False), "fusion.3") == "new.py:new"
    assert profiling._part(Source(None, False), "copy.4") == profiling.OTHER
    assert profiling._part(Source(None, False), "nvjet_sm90_tss_128x128") == profiling.CUBLAS
