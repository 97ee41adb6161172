"""Models from the hub, against a small local server: the files, the number of downloads, and the errors.

Each download runs in its own process, because huggingface_hub reads its environment when it is imported.
"""

import os
import subprocess
import sys

import pytest

from tests.models.hub_server import serve_hub

pytest.importorskip("huggingface_hub")

FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "additional_chat_templates/tool_use.jinja": b"{{ tools }}",
    "model-00001-of-00002.safetensors": b"one" * 1000,
    "model-00002-of-00002.safetensors": b"two" * 1000,
    "pytorch_model.bin": b"pickle",
    "modeling.py": b"code",
    "training.pt": b"pickle",
    "checkpoint-10/model.safetensors": b"older",
    "consolidated.safetensors": b"both" * 1000,
}
WANTED = sorted(name for name in FILES if name.endswith((".json", ".jinja", "2.safetensors")))
REPOSITORIES = {
    "org/model": FILES,
    "gated/model": FILES,
    "org/pickled": {"pytorch_model.bin": b"x", "config.json": b"{}"},
}
ASK = """
import sys
from dapo_jax.models import hub
try:
    print(getattr(hub, sys.argv[1])(sys.argv[2], revision=sys.argv[3] or None))
except ValueError as error:
    print("refused:", error)
"""


def start(address, cache, *, call="download", name="org/model", revision="", **environment):
    plain = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    quiet = {
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HOME": str(cache / "home"),
        "HF_HUB_CACHE": str(cache),
    }
    return subprocess.Popen(
        [sys.executable, "-c", ASK, call, name, revision],
        env={**plain, **quiet, "HF_ENDPOINT": address, "no_proxy": "127.0.0.1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def result(process):
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out.strip()


def ask(address, cache, **how):
    return result(start(address, cache, **how))


def files_of(folder):
    return sorted(os.path.relpath(os.path.join(place, name), folder) for place, _, names in os.walk(folder) for name in names)  # fmt: skip


def fetched(requests):
    return sorted(
        path.split("/resolve/")[1].partition("/")[2]
        for method, path in requests
        if method == "GET" and "/resolve/" in path
    )


def test_safetensors_json_and_the_chat_template_are_fetched_and_neither_code_nor_pickles(tmp_path):
    with serve_hub(REPOSITORIES) as (address, requests):
        folder = ask(address, tmp_path)
    assert files_of(folder) == WANTED == fetched(requests)
    with open(os.path.join(folder, "model-00002-of-00002.safetensors"), "rb") as file:
        assert file.read() == b"two" * 1000


def test_two_processes_of_a_host_fetch_each_file_once(tmp_path):
    with serve_hub(REPOSITORIES, delay_s=0.5) as (address, requests):
        folders = [result(process) for process in [start(address, tmp_path) for _ in range(2)]]
    assert folders[0] == folders[1]
    assert fetched(requests) == WANTED


def test_a_cached_model_is_found_offline_and_without_a_request(tmp_path):
    look = {"call": "look_up", "HF_HUB_OFFLINE": "1"}
    with serve_hub(REPOSITORIES) as (address, requests):
        assert ask(address, tmp_path, **look).startswith("refused: org/model is not in the cache")
        folder = ask(address, tmp_path)
        before = len(requests)
        assert ask(address, tmp_path, HF_HUB_OFFLINE="1") == folder
        assert ask(address, tmp_path, **look).endswith(", 6000)")
        assert len(requests) == before


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"name": "org/nothing"}, ["the hub has no repository org/nothing", "HF_TOKEN"]),
        ({"name": "gated/model"}, ["gated/model is a gated model", "accept its terms", "HF_TOKEN"]),
        ({"revision": "v9"}, ["has no revision 'v9'", "use a branch"]),
        ({"name": "org/pickled"}, ["org/pickled has no safetensors", "pickles"]),
        ({"name": "a/b/c"}, ["Repo id must be in the form", "a/b/c"]),
        ({"HF_HUB_OFFLINE": "1"}, ["HF_HUB_OFFLINE is set", "org/model is not", "the cache", "unset it"]),
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, ["the hub cannot be reached", "check the connection"]),
    ],
)
def test_failures_have_a_remedy(how, words, tmp_path):
    with serve_hub(REPOSITORIES, token="hf_right") as (address, _):
        message = ask(address, tmp_path, **how)
    assert message.startswith("refused: ")
    assert [word for word in words if word not in message] == []


def test_a_gated_model_is_fetched_with_the_token_of_the_environment(tmp_path):
    with serve_hub(REPOSITORIES, token="hf_right") as (address, _):
        assert files_of(ask(address, tmp_path, name="gated/model", HF_TOKEN="hf_right")) == WANTED


def test_a_missing_extra_is_named(monkeypatch):
    from dapo_jax.models.hub import download

    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match=r"pip install -e '\.\[hub\]'"):
        download("org/model")


def test_a_look_downloads_no_weights_but_returns_their_size(tmp_path):
    """Two files of 3,000 bytes; the weights in a subfolder are not the model's."""
    with serve_hub(REPOSITORIES) as (address, requests):
        assert ask(address, tmp_path, call="look_up").endswith(", 6000)")
    assert fetched(requests) == [name for name in WANTED if not name.endswith(".safetensors")]
