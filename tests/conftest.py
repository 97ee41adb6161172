"""Strict JAX for every test: a silent dtype promotion or rank broadcast is an error, shapes are checked."""

import contextlib
import gc
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

# Two workers on a small machine: one compute thread each, or JAX's thread pools fight over the cores.
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# On a GPU, the processes that tests start need memory too.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

# Tests compile far more than they compute. What XLA does to make a program fast is left out, which takes a third off the time of
# compiling; `JAX_DISABLE_MOST_OPTIMIZATIONS=0 pytest` tests the programs as users run them.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# Nor do programs say which lines of Python they come from, which takes a tenth off the time of lowering them.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")

# A program that one worker, or one process that a test starts, has compiled is read by all others, unless it compiles so fast that
# files cost more. The process that starts the workers makes the folder, and removes it at the end.
_OWN_CACHE = None
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _OWN_CACHE = os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="dapo_jax_tests_xla_")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    # Modules, too: without files of bytecode, each process that a test starts compiles 3,000 modules in about 3 s.
    if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
        sys.dont_write_bytecode = False
        sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"] = f"{_OWN_CACHE}/bytecode"

# Prepared datasets, too. Their names contain digests of the files.
os.environ.setdefault("TFDS_DATA_DIR", f"{os.environ['JAX_COMPILATION_CACHE_DIR']}/datasets")

# What a shell starts in the background ignores SIGINT, and so would every process that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

from tests import typed

typed.install()

import jax
import pytest
from hypothesis import settings

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_num_cpu_devices", 8)

settings.register_profile("ci", derandomize=True, deadline=None, max_examples=30)
settings.load_profile("ci")


def pytest_collection_finish():
    """What was imported stays for good: the garbage collector need not look at it again and again, nor at every 700th new object."""
    gc.freeze()
    gc.set_threshold(100_000, 50, 50)


@pytest.fixture(scope="module", autouse=True)
def few_mappings():
    """Drops the compiled programs of past modules in time: each has about 16 memory mappings, and Linux permits a process 65,530."""
    yield
    drop_programs(beyond=20_000)


@pytest.fixture(autouse=True)
def few_mappings_in_long_modules():
    """Also within a module whose tests compile for long: without further mappings, the next compilation ends the process with a segmentation fault."""
    began = time.monotonic()
    yield
    if time.monotonic() - began > 5:
        drop_programs(beyond=40_000)


def drop_programs(beyond):
    with contextlib.suppress(FileNotFoundError), open("/proc/self/maps", "rb") as maps:
        if sum(1 for _ in maps) > beyond:
            jax.clear_caches()


def pytest_addoption(parser):
    parser.addoption("--durations-file", help="write the durations of the slowest 100 tests to this file")


def pytest_terminal_summary(terminalreporter, config):
    """A test's seconds are the sum of its setup, call and teardown. With workers, the sum of all is their time together."""
    if (file := config.getoption("--durations-file")) is None:
        return
    seconds = Counter()
    for report in terminalreporter.getreports("") + terminalreporter.getreports("passed"):
        seconds[report.nodeid] += report.duration
    slowest = [f"{spent:8.2f}  {name}" for name, spent in seconds.most_common(100)]
    head = f"# {len(seconds)} tests took {seconds.total():.0f} s together. The slowest 100, in seconds:"
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    Path(file).write_text("\n".join([head, *slowest, ""]))


def pytest_unconfigure():
    if _OWN_CACHE is not None:
        shutil.rmtree(_OWN_CACHE, ignore_errors=True)


def pytest_runtest_setup(item):
    """Tests marked `tpu` or `gpu` are for whoever has one."""
    for kind in ("tpu", "gpu"):
        if item.get_closest_marker(kind) is not None and (found := _backend()) != kind:
            command = next(line for line in item.config.getini("markers") if line.startswith(kind))
            pytest.skip(f"{command}; found {found}")


def _backend():
    try:
        return jax.default_backend()
    except RuntimeError as error:  # asked for by JAX_PLATFORMS, and not there
        return str(error)


@pytest.fixture(
    params=["cpu", pytest.param("tpu", marks=pytest.mark.tpu), pytest.param("gpu", marks=pytest.mark.gpu)]
)
def platform(request):
    """A test that asks for it also runs on a TPU with `-m tpu` and on a GPU with `-m gpu`, there with exact float32 products."""
    with jax.default_matmul_precision(None if request.param == "cpu" else "highest"):
        yield request.param


@pytest.fixture
def x64():
    """Double precision for the tests that compare with a float64 oracle."""
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="session")
def storage_server():
    """Google Cloud Storage's stand-in, to which all clients of this process and of those it starts are sent."""
    from tests.storage_server import serve_storage

    pytest.importorskip("gcsfs")
    with serve_storage("bucket", "runs") as storage, pytest.MonkeyPatch.context() as patch:
        for name, value in storage.environment.items():
            patch.setenv(name, value)
        yield storage


@pytest.fixture
def bucket(storage_server):
    """The stand-in with nothing in `gs://bucket`, and everything permitted."""
    storage_server.buckets["bucket"].clear()
    granted = set(storage_server.granted)
    yield storage_server
    storage_server.granted = granted
    storage_server.busy = 0
    storage_server.ahead_s = 0.0


@pytest.fixture(scope="session")
def chat_tokenizer():
    """Byte-level, as Qwen's: ends with <|im_end|>, pads with <|endoftext|>."""
    from dapo_jax.text.huggingface import HuggingFaceTokenizer
    from tests.text import folders

    return HuggingFaceTokenizer(folders.files_of())
