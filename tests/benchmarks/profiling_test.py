"""The profile's table of a GPU's recording, whose kernels are on streams."""

import jax
import pytest

from benchmarks import profiling
from benchmarks.hlo_sources import Sources
from tests.benchmarks.hlo_sources_test import TEXT


def gpu_trace(kernels):
    """A recording in the format of JAX's profiler: one stream of a GPU, and the host's annotation. Times are in microseconds.

    A kernel is its name, its operation in program 3 (or None, as in a command buffer), its start and its duration.
    """
    names = list(dict.fromkeys(name for name, *_ in kernels))
    events = ""
    for name, operation, start, duration in kernels:
        stats = "stats { metadata_id: 1 ref_value: 4 } stats { metadata_id: 3 uint64_value: 3 }"
        stats += f' stats {{ metadata_id: 2 str_value: "{operation}" }}'
        times = f"offset_ps: {start * 10**6} duration_ps: {duration * 10**6}"
        events += f"events {{ metadata_id: {names.index(name) + 1} {times} {stats if operation else ''} }}\n"
    known = "".join(
        f'event_metadata {{ key: {at} value {{ id: {at} name: "{name}" }} }}\n'
        for at, name in enumerate(names, 1)
    )
    stats = "".join(
        f'stat_metadata {{ key: {at} value {{ id: {at} name: "{name}" }} }}\n'
        for at, name in enumerate(("hlo_module", "hlo_op", "program_id", "jit_f"), 1)
    )
    text = f"""
        planes {{ name: "/device:GPU:0" lines {{ name: "Stream #13(Compute)" timestamp_ns: 1000 {events} }} {known} {stats} }}
        planes {{
          name: "/host:CPU"
          lines {{ name: "python" timestamp_ns: 1000 events {{ metadata_id: 1 offset_ps: 0 duration_ps: 100000000 }} }}
          event_metadata {{ key: 1 value {{ id: 1 name: "measured" }} }}
        }}"""
    return jax.profiler.ProfileData.from_text_proto(text)


@pytest.fixture
def sources(tmp_path):
    """The dump of program 3, whose functions `tests/benchmarks/hlo_sources_test.py` gives."""
    (tmp_path / "module_0003.jit_f.sm_9.0_gpu_after_optimizations.txt").write_text(TEXT)
    return Sources(tmp_path)


def test_kernels_and_gaps_of_a_gpu_are_listed_with_their_functions(sources):
    """100 us: 20 before the first kernel, two calls of a product of 20 and 10, a gap of 5, a sum of 40, and 5 at the end."""
    kernels = [("gemm", "dot.1", 20, 20), ("gemm", "dot.1", 40, 10), ("loop_fusion", "loop-fusion", 55, 40)]
    result = profiling.attributed(gpu_trace(kernels), sources)
    assert result["parts"] == pytest.approx(
        {"decoder.py:Block.layer, backward": 30e-6, "decoder.py:Block.layer": 40e-6, profiling.HOST: 30e-6}
    )
    found = [(one["kernel"], one["operation"], one["function"], one["calls"]) for one in result["kernels"]]
    layer = "decoder.py:Block.layer"
    assert found == [("loop_fusion", "loop-fusion", layer, 1), ("gemm", "dot.1", layer, 2)]
    assert [one["seconds"] for one in result["kernels"]] == pytest.approx([40e-6, 30e-6])
    assert result["gaps"] == [
        {"length": 20_000, "before": "start", "after": "dot.1"},
        {"length": 5_000, "before": "dot.1", "after": "loop-fusion"},
        {"length": 5_000, "before": "loop-fusion", "after": "end"},
    ]
    printed = profiling.tables("update", result | {"seconds_without_profiler": 1e-4})
    assert "gemm (decoder.py:Block.layer)" in printed
    assert "3 gaps" in printed


@pytest.mark.parametrize(("unknown", "refused"), [(10, False), (11, True)])
def test_a_table_with_more_than_a_tenth_of_unknown_functions_is_refused(unknown, refused, sources):
    """The kernels of a command buffer have only the buffer's name."""
    kernels = [("gemm", "dot.1", 0, 50), ("command_buffer", None, 50, unknown)]
    result = profiling.attributed(gpu_trace(kernels), sources) | {"seconds_without_profiler": 1e-4}
    assert result["unattributed"] == pytest.approx(unknown / 100)
    if not refused:
        assert profiling.OTHER in profiling.tables("update", result)
        return
    with pytest.raises(RuntimeError, match=r"11\.0% of the update .*10%.*--xla_gpu_enable_command_buffer="):
        profiling.tables("update", result)
