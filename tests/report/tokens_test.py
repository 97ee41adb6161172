"""Where tokens end in a text, with tokenizers that make it hard."""

import numpy as np
import pytest

from dapo_jax.config import ModelConfig
from dapo_jax.report.rollouts import Pieces, tokenizer_of
from dapo_jax.report.runs import read_runs
from dapo_jax.text.huggingface import HuggingFaceTokenizer
from dapo_jax.text.tokenizers import ByteTokenizer, CharTokenizer
from tests.report.made import TOKENIZER, write_run
from tests.text.folders import byte_fallback_json, files_of

BYTE_LEVEL = HuggingFaceTokenizer(files_of())
SPACED = HuggingFaceTokenizer(files_of(byte_fallback_json(), eos_token="</s>", pad_token=None))


@pytest.mark.parametrize(
    "tokenizer", [BYTE_LEVEL, SPACED, ByteTokenizer()], ids=["byte_level", "spaced", "bytes"]
)
@pytest.mark.parametrize("text", ["an END of  it", "héllo 日本語 🙂🙂", "\n\n", " two", "a\u0301"])
def test_pieces_are_the_text(tokenizer, text):
    ids = [*tokenizer.encode(text).tolist(), tokenizer.eos_id]
    whole, parts = Pieces(tokenizer).of(ids, tokenizer.decode(np.array(ids)))
    assert "".join(parts) == whole
    assert len(parts) == len(ids)
    assert parts[-1] == ""
    assert max(len(part.encode()) for part in parts) < 12


@pytest.mark.parametrize(
    ("tokenizer", "ids", "text", "whole", "parts"),
    [
        (ByteTokenizer(), ByteTokenizer().encode("a🙂é"), "a🙂é", "a🙂é", ["a", "", "", "", "🙂", "", "é"]),
        (CharTokenizer("ab"), [2, 3, CharTokenizer("ab").eos_id], "ab", "ab", ["a", "b", ""]),
        # This decoder drops the space of a token that is decoded alone.
        (SPACED, SPACED.encode("END END"), "END END", "END END", ["EN", "D", " EN", "D"]),
        # After a plain prompt, it keeps the space.
        (SPACED, SPACED.encode("END END"), " END END", " END END", [" EN", "D", " EN", "D"]),
        (CharTokenizer("ab\n"), [2, 3, 4], "ab", "ab\n", ["a", "b", "\n"]),
        (ByteTokenizer(), [2 + byte for byte in b"a\xff\xfeb"], "a", "a\ufffd\ufffdb", None),
        (ByteTokenizer(), [], "", "", []),
    ],
    ids=[
        "several tokens",
        "end token",
        "first space",
        "plain prompt",
        "stop string",
        "no characters",
        "no tokens",
    ],
)
def test_tokens_have_their_parts_of_the_text(tokenizer, ids, text, whole, parts):
    """If several tokens make one character, the last one has it."""
    found, pieces = Pieces(tokenizer).of([int(each) for each in ids], text)
    assert found == whole
    assert pieces == parts or (parts is None and "".join(pieces) == whole)


@pytest.mark.parametrize(("ids", "text"), [([2, 3], "ba"), ([2, 99], "ab"), ([2], "ab")])
def test_a_text_that_is_not_of_these_tokens_is_not_cut(ids, text):
    """99 is outside the vocabulary: the tokenizer of another run."""
    assert Pieces(CharTokenizer("ab")).of(ids, text) is None


def test_the_tokenizer_is_the_runs_or_its_models(tmp_path):
    finished = write_run(tmp_path / "finished", steps=1)
    current = write_run(tmp_path / "current", steps=1, tokenizer=False)
    found = [tokenizer_of(run) for run in read_runs([finished, current])]
    assert found == [TOKENIZER, ByteTokenizer()]


@pytest.mark.parametrize("source", ["shipped:quickstart", "FOLDER", "nowhere", "hf:nobody/nothing"])
def test_the_model_a_run_started_from_may_be_gone(source, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    folder = write_run(tmp_path / "other", steps=1) / "model"
    source = source.replace("FOLDER", str(folder))
    run = write_run(tmp_path / "run", steps=1, tokenizer=False, model=ModelConfig(source=source))
    found = tokenizer_of(read_runs([run])[0])
    assert (found is None) == source.endswith(("nowhere", "nothing"))
