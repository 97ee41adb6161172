"""A small model folder in which one file is another."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from dapo_jax.models.folder import save_model
from dapo_jax.testing import tiny_decoder_config, tiny_params
from tests.models.gguf_files import TOKENS, write_gguf
from tests.text.folders import files_of

CONFIG = tiny_decoder_config(
    vocab_size=336, embed_dim=8, layers=1, heads=2, kv_heads=1, head_dim=4, mlp_dim=8, max_positions=64
)
ROWS = b"".join(b'{"prompt": "%d+1", "answer": "%d"}\n' % (number, number + 1) for number in range(4))


@cache
def model_files():
    """Returns name -> bytes of an intact model folder of 24 kB."""
    with TemporaryDirectory() as folder:
        save_model(folder, CONFIG, tiny_params(CONFIG))
        files = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    return files | files_of()


@cache
def gguf_bytes():
    """Returns the bytes of an intact GGUF file."""
    config = tiny_decoder_config(
        vocab_size=len(TOKENS), embed_dim=8, layers=1, heads=2, kv_heads=1, head_dim=4, mlp_dim=8
    )
    with TemporaryDirectory() as folder:
        return write_gguf(Path(folder) / "model.gguf", config, tiny_params(config)).read_bytes()


def with_file(name, content):
    """Returns a function that makes the folder `model` and data for it, with another content of one file; None leaves it out."""

    def make(folder):
        (folder / "model").mkdir()
        (folder / "data.jsonl").write_bytes(ROWS)
        for file, its in (model_files() | {name: content}).items():
            if its is not None:
                (folder / "model" / file).write_bytes(its)

    return make
