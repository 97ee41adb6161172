"""Compiled programs are kept on disk for the session: every `Updater` here would compile the same ones anew."""

import jax
import pytest


@pytest.fixture(scope="session", autouse=True)
def compiled_programs(tmp_path_factory):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("xla")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
