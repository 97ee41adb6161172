"""What all tests of the data package share: the arithmetic dataset, prepared once, and a tokenizer with a chat template."""

import pytest

from dapo_jax.data import load_rows
from dapo_jax.data.huggingface import HuggingFaceTokenizer
from tests.data import folders


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("datasets")
    load_rows("arithmetic", "train[:1]", folder)
    return folder


@pytest.fixture(scope="session")
def chat_tokenizer():
    """Byte-level, as Qwen's: ends with <|im_end|>, pads with <|endoftext|>."""
    return HuggingFaceTokenizer(folders.files_of())
