"""Clients that hold connections without a complete request, against a server in a process that may open few files."""

import resource
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("aiohttp", reason="needs the extra http")

from tests.serving.servers import ask, flooded, running

GENERATE, KEY = "/inference/v1/generate", "s3cret"


@pytest.fixture
def many_sockets():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 4096:
        pytest.skip(f"needs 4,096 descriptors; the hard limit is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def seconds_of(address, prompt=(3, 12, 4)):
    begun = time.monotonic()
    body = {"token_ids": list(prompt), "sampling_params": {"max_tokens": 4}}
    return ask(address, GENERATE, body, key=KEY).status, time.monotonic() - begun


@pytest.mark.slow  # two servers, thousands of connections
@pytest.mark.parametrize(("halves", "requests", "descriptors"), [(2000, 200, 1024), (400, 40, 200)])
def test_whole_requests_are_answered_during_a_flood_of_incomplete_ones(
    halves, requests, descriptors, tmp_path, many_sockets
):
    """Within 2 s, before the incomplete ones reach their deadline, and with less than 100 lines of log."""
    with running(tmp_path, "shipped:quickstart", "--slots", 16, key=KEY, descriptors=descriptors) as server:
        assert seconds_of(server.address)[0] == 200
        clients = flooded(server.address, halves)
        answered = [seconds_of(server.address) for _ in range(5)]
        with ThreadPoolExecutor(requests) as pool:
            answered += pool.map(lambda _: seconds_of(server.address), range(requests))
        print(f"{halves} half-open, {requests} at once: at most {max(took for _, took in answered):.2f} s")
        assert {status for status, _ in answered} == {200}
        assert max(took for _, took in answered) < 2.0
        for client in clients:
            client.close()
        assert seconds_of(server.address)[0] == 200
        logged = server.out.read_text() + server.err.read_text()
        assert "Traceback" not in logged
        assert len(logged.splitlines()) < 100, logged[-2000:]
