"""The arithmetic dataset for all tests of the folder, prepared once."""

import pytest

from dapo_jax.data import load_rows


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("datasets")
    load_rows("arithmetic", "train[:1]", folder)
    return folder
