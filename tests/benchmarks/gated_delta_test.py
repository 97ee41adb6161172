"""The benchmark of Gated DeltaNet, with a small model. Its rows are several chunks long, and four responses share each prompt."""

import pytest

from benchmarks.gated_delta import decoder_of
from benchmarks.routing_replay import measure


@pytest.mark.slow  # tests/run/gated_delta_test.py checks shorter responses
def test_whole_responses_in_packed_rows_are_scored_as_they_were_sampled():
    """A row has a prompt of 32 tokens and four responses of 40, in three chunks. 2e-5 is the tolerance of `tests/training/lora_test.py`."""
    found = measure(decoder_of(delta=True, layers=4), prompts=1, tokens=40, dtype="float32")["off"]
    assert 0 < found["sync/logprob_diff_max"] <= 2e-5
