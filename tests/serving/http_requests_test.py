"""Bodies of requests are parsed in several threads at the same time."""

import json
import subprocess
import sys

import numpy as np
import pytest

from tests.text.stop_strings_test import MERGED, SPECIAL_STOPS, ids_of

pytest.importorskip("msgspec", reason="needs the extra http")

FIRST_REQUESTS = """
import importlib, sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from dapo_jax.serving import http_requests
from dapo_jax.text import chat_requests

GIVEN = {"_CompletionsBody": {"prompt": [[1]]}, "ChatBody": {"messages": [{}], "stop": "x"}, "_SamplingParams": {"stop": ["x"]}, "_GenerateBody": {"token_ids": [1]}}
sys.setswitchinterval(1e-7)
for _ in range(300):
    importlib.reload(chat_requests)
    importlib.reload(http_requests)
    for name, given in GIVEN.items():
        kind, start = getattr(http_requests, name), Barrier(4)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _: (start.wait(), http_requests.struct_of(dict(given), kind, "the body")), range(4)))
"""


def test_the_first_requests_of_a_server_may_arrive_together():
    """The process crashed if the first conversions to a struct overlapped. Threads switch as often as possible here, so it crashed within 300 tries."""
    done = subprocess.run([sys.executable, "-c", FIRST_REQUESTS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(("strings", "parts", "text"), SPECIAL_STOPS)
def test_a_stop_string_with_a_special_token_ends_a_served_response(strings, parts, text):
    from dapo_jax.serving.http_requests import read_completions
    from dapo_jax.serving.served_requests import ServedLimits

    limits = ServedLimits(
        model="m", tokenizer=MERGED, vocabulary=400, max_prompt_tokens=9, max_response_tokens=9, most_responses=1
    )  # fmt: skip
    [asked] = read_completions(json.dumps({"prompt": "a", "stop": strings}).encode(), limits)
    ids = ids_of(MERGED, parts)
    assert asked.options.stop(np.append(ids, ids), 0) == len(ids)
