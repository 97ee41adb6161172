"""A judge over HTTP as a grader, with a server of the standard library in place of the model."""

import asyncio
import json
import re
import sqlite3
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import yaml

from dapo_jax.config import ConfigError, RewardConfig
from dapo_jax.config.reward_schema import GRADER_WORKERS
from dapo_jax.rewards import judge as judge_room
from dapo_jax.rewards.functions import RewardError
from dapo_jax.rewards.judge import Judge
from dapo_jax.run.grader_setup import submit_of
from tests.rewards.samples import sample, samples

SAMPLE = sample("a")
PROMPT = "{prompt} has the answer {answer}. Rate `{response}`."


def chat(text):
    """A completed chat of OpenAI's API."""
    choices = [{"message": {"role": "assistant", "content": text}}]
    return 200, json.dumps({"choices": choices, "usage": {"total_tokens": 7}}).encode()


class Server:
    """Answers with the next of `script`, or with the last one, and notes the requests."""

    def __init__(self, *script):
        self.script, self.seen, self.lock, self.ended = list(script), [], threading.Lock(), threading.Event()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with owner.lock:
                    owner.seen.append((self.path, dict(self.headers), body))
                    status, content = owner.script.pop(0) if len(owner.script) > 1 else owner.script[0]
                if status == 0:  # the server dies before it answers
                    return
                if status == 1:  # it does not answer in time
                    owner.ended.wait(60)
                    return
                self.send_response(200 if status == 2 else status)
                self.send_header("Location", "http://127.0.0.1:1/v1/chat/completions")
                # With status 2, the connection ends after half of the answer.
                self.send_header("Content-Length", str(len(content) * 2 if status == 2 else len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()


@contextmanager
def serving(*script):
    server = Server(*script)
    try:
        yield server
    finally:
        server.ended.set()
        server.http.shutdown()
        server.http.server_close()


@pytest.fixture(autouse=True)
def no_waits(monkeypatch):
    """The waits between tries are noted and not made."""
    waits = []

    async def sleep(seconds):
        waits.append(seconds)

    monkeypatch.setattr(judge_room.asyncio, "sleep", sleep)
    return waits


@pytest.fixture
def settings(tmp_path):
    """Writes a judge's file, and returns its path."""

    def write(url, /, **changes):
        values = {"url": url, "model": "m", "prompt": PROMPT, "timeout_s": 5.0, **changes}
        file = tmp_path / "helpful.yaml"
        file.write_text(yaml.safe_dump(values))
        return str(file)

    return write


def graded(path, *responses, **limits):
    """The verdicts of a judge, through the graders of a run."""
    submit, close = submit_of(RewardConfig(grader=f"judge:{path}"), workers=GRADER_WORKERS._replace(**limits))
    try:
        return submit(samples(*responses)).result()
    finally:
        close()


def test_the_judge_gets_prompt_response_and_answer_and_its_number_is_the_score(settings):
    """A response that contains a placeholder or a special token is passed on as text, and is not expanded."""
    with serving(chat("0.25")) as server:
        file = settings(server.url + "/", options={"max_tokens": 3, "seed": 1})
        [verdict] = graded(file, "{answer} <|im_end|>")
        [(path, headers, body)] = server.seen
    assert (verdict.score, verdict.correct, verdict.reason) == (0.25, True, "0.25")
    assert (path, headers["Content-Type"]) == ("/v1/chat/completions", "application/json")
    assert "Authorization" not in headers
    message = {"role": "user", "content": "6*7 has the answer 42. Rate `{answer} <|im_end|>`."}
    assert body == {"model": "m", "messages": [message], "temperature": 0.0, "max_tokens": 3, "seed": 1}


@pytest.mark.parametrize(
    ("reply", "changes", "score"),
    [
        (" 1 \n", {}, 1.0),
        ("0", {}, 0.0),
        ("<think>1 or 0.5?</think>\n0.25", {}, 0.25),
        ("Score: 3. No, Score: 8/10", {"score": r"Score: (\d+)", "highest": 10}, 8.0),
        ("-2.5", {"lowest": -3}, -2.5),
        ("\ud800 1", {"score": r"(\d)"}, 1.0),
        ("0.5 or so", {}, None),
        ("2", {}, None),
        ("nan", {"score": "(.*)nan|nan"}, None),
        ("Score: high", {"score": "Score: (.*)"}, None),
        ("", {}, None),
    ],
)
def test_a_score_is_the_last_match_of_the_pattern_within_the_bounds(reply, changes, score, settings):
    with serving(chat(reply)) as server:
        if score is not None:
            [verdict] = graded(settings(server.url, **changes), "a")
            assert (verdict.score, verdict.correct, verdict.lost) == (score, score > 0, "")
            assert verdict.reason == reply.replace("\ud800", "?")
            return
        with pytest.raises(RewardError, match=r"helpful.*judge\.score=.*prompt 7"):
            graded(settings(server.url, **changes), "a")
        [lost] = graded(settings(server.url, on_failure="lost", **changes), "a")
        assert (lost.correct, lost.score, lost.lost) == (False, None, "raised")
        assert len(server.seen) == 2  # a reply without a score is not asked for again


def test_an_overloaded_failing_or_dead_server_is_asked_again_after_growing_waits(settings, no_waits):
    with serving((429, b"slow down"), (503, b""), (0, b""), chat("1")) as server:
        [verdict] = graded(settings(server.url, retries=3), "a")
        assert (verdict.score, len(server.seen)) == (1.0, 4)
    assert no_waits == [1.0, 2.0, 4.0]
    with pytest.raises(RewardError, match=rf"{server.url} failed 3 of 3 times, .* with ConnectionRefused"):
        graded(settings(server.url), "a")
    [lost] = graded(settings(server.url, on_failure="lost", retries=0), "a")
    assert (lost.lost, lost.correct) == ("raised", False)


@pytest.mark.parametrize("limits", [{}, {"timeout_s": 0.05}])
def test_the_judges_own_limits_decide_however_short_a_grading_call_may_be(limits, settings):
    """Two tries of 0.2 s take longer than `workers.timeout_s`, but the verdict of the second counts."""
    with serving((1, b""), chat("1")) as server:
        [verdict] = graded(settings(server.url, timeout_s=0.2, retries=1), "a", **limits)
    assert (verdict.score, verdict.lost, len(server.seen)) == (1.0, "", 2)
    with serving((1, b"")) as server, pytest.raises(RewardError, match=r"failed 2 of 2 times.*[tT]ime"):
        graded(settings(server.url, timeout_s=0.1, retries=1), "a", **limits)
    assert len(server.seen) == 2


def test_a_wait_is_never_longer_than_a_minute(settings, no_waits):
    with serving((503, b"")) as server, pytest.raises(RewardError, match="failed 9 of 9 times"):
        graded(settings(server.url, retries=8), "a")
    assert no_waits == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ((400, b"no such model"), "400.*no such model"),
        ((302, b""), "302"),
        ((200, b"[" * 100_000), "no chat completion"),
        ((200, b'{"choices": []}'), "no chat completion"),
        ((200, b'{"x": "' + b"a" * (1 << 20) + b'"}'), "no chat completion"),
    ],
    ids=["refused", "redirect", "nested", "empty", "long"],
)  # fmt: skip
def test_an_answer_that_a_retry_would_not_change_is_an_error_at_once(answer, reason, settings):
    with serving(answer) as server, pytest.raises(RewardError, match=f"failed 1 of 3 times.*{reason}"):
        graded(settings(server.url), "a")
    assert len(server.seen) == 1


def answer_with(**changes):
    """A chat that would score 1, with other fields: of the choice, of its message, or of the answer."""
    content = json.loads(chat("1")[1])
    [choice] = content["choices"]
    owners = {"finish_reason": choice, "choice_error": choice, "error": content}
    for name, value in changes.items():
        owners.get(name, choice["message"])[name.removeprefix("choice_")] = value
    return 200, json.dumps(content).encode()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"finish_reason": "length"}, "finish_reason='length'.*max_tokens"),
        ({"finish_reason": "content_filter"}, "finish_reason='content_filter'"),
        ({"finish_reason": "error"}, "finish_reason='error'"),
        ({"content": None}, "'content': None"),
        ({"content": None, "reasoning_content": "so 1"}, "'content': None, 'reasoning_content': 'so 1'"),
        ({"content": None, "finish_reason": "tool_calls", "tool_calls": [{"id": "1"}]}, "tool_calls"),
        ({"refusal": "I cannot."}, r"'refusal': 'I cannot\.'"),
        ({"content": None, "refusal": "I cannot."}, "I cannot"),
        ({"content": {"text": "1"}}, ""),
        ({"content": 1}, ""),
        ({"error": {"code": 404, "message": "no such model"}}, "404.*no such model"),
        ({"error": {"message": "500 is bad", "code": "invalid_api_key", "type": "authentication"}}, "500 is bad"),
        ({"error": "no such model"}, "no such model"),
        ({"choice_error": {"code": 400, "message": "bad"}}, "400"),
    ],
)  # fmt: skip
def test_an_answer_that_is_not_whole_has_no_score_and_is_not_asked_for_again(changes, words, settings):
    with serving(answer_with(**changes)) as server:
        with pytest.raises(RewardError, match=rf"helpful.*{server.url} failed 1 of 3 times.*{words}"):
            graded(settings(server.url, score="([01])"), "a")
        [lost] = graded(settings(server.url, score="([01])", on_failure="lost"), "a")
    assert (lost.correct, lost.score, lost.lost, len(server.seen)) == (False, None, "raised", 2)


MAY_PASS = [
    *({"code": code, "message": "later"} for code in (429, "429", 500, 502, 529, 408, "rate_limit_exceeded")),
    *({"code": None, "type": name} for name in ("server_error", "overloaded_error", "timeout")),
    {"message": "busy", "status": "UNAVAILABLE"},
]


@pytest.mark.parametrize(
    "first",
    [
        *(answer_with(**{place: error}) for error in MAY_PASS for place in ("error", "choice_error")),
        (200, json.dumps({"object": "error", "message": "busy", "code": 503}).encode()),
        (2, chat("1")[1]),  # it ends early
    ],
)
def test_an_answer_with_an_error_that_may_pass_does_not_count_and_is_asked_for_again(first, settings):
    """The first answer has a score, too."""
    with serving(first, chat("0")) as server:
        assert graded(settings(server.url), "a")[0].score == 0.0
    assert len(server.seen) == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"finish_reason": "stop", "error": None, "refusal": None, "reasoning_content": "Score: 1"},
        {"content": "<think>Score: 1 or 0?</think>Score: 0"},
        {"content": "Score: 1 or 0?</think>Score: 0"},
        {"content": "Score: 0 <think>Score: 1?</think>"},
        {"content": [{"type": "thinking", "thinking": "Score: 1"}, {"type": "text", "text": "Score: 0"}]},
        {"content": [{"type": "text", "text": "Score"}, {"type": "text", "text": ": 0"}]},
    ],
)
def test_the_score_is_in_the_text_after_the_judges_thoughts(changes, settings):
    with serving(answer_with(**{"content": "Score: 0", **changes})) as server:
        assert graded(settings(server.url, score="Score: ([01])"), "a")[0].score == 0.0


@pytest.mark.parametrize(
    "content", ["", "<think>Score: 1", "Score: 1</think>", [{"type": "thinking", "thinking": "Score: 1"}]]
)
def test_thoughts_without_a_reply_have_no_score(content, settings):
    answer = answer_with(content=content, reasoning_content="Score: 1")
    with serving(answer) as server, pytest.raises(RewardError, match=r"judge\.score"):
        graded(settings(server.url, score="Score: ([01])"), "a")


@pytest.mark.parametrize("usage", [None, {}, {"total_tokens": None}, {"total_tokens": 1e999}, [3]])
def test_a_reply_counts_without_its_number_of_tokens(usage, settings):
    body = json.loads(chat("1")[1]) | {"usage": usage}
    with serving((200, json.dumps(body).encode())) as server:
        judge = Judge(settings(server.url + "/?version=2"))
        assert asyncio.run(judge(SAMPLE)).score == 1.0
        assert server.seen[0][0] == "/v1/chat/completions?version=2"
    assert judge.counts == {"calls": 1, "cache_hits": 0, "tokens": 0}


def test_equal_requests_without_a_score_are_sent_once(settings, tmp_path):
    with serving(chat("maybe")) as server:
        judge = Judge(settings(server.url, cache=str(tmp_path / "replies"), on_failure="lost"))

        async def verdicts(count):
            return await asyncio.gather(*(judge(SAMPLE) for _ in range(count)))

        assert [verdict.lost for verdict in asyncio.run(verdicts(4))] == ["raised"] * 4
        assert len(server.seen) == 1
        asyncio.run(verdicts(1))
        assert len(server.seen) == 2


def test_a_reply_counts_although_the_cache_cannot_be_written(settings, tmp_path):
    cache = tmp_path / "replies"
    with serving(chat("1")) as server:
        judge = Judge(settings(server.url, cache=str(cache)))
        cache.write_bytes(b"no database" * 100)
        with pytest.warns(UserWarning, match=rf"judge\.cache={cache}"):
            assert asyncio.run(judge(SAMPLE)).score == 1.0


def test_equal_requests_are_sent_once_and_replies_outlive_the_run(settings, tmp_path):
    """The cache is keyed by the whole request: another prompt, model, option or address is another request."""
    cache = str(tmp_path / "replies.sqlite")
    with serving(chat("1"), chat("0"), chat("0.5"), chat("0.75")) as server:
        path = settings(server.url, cache=cache)
        assert [verdict.score for verdict in graded(path, "a", "a", "a")] == [1.0] * 3
        assert [verdict.score for verdict in graded(path, "b", "a")] == [0.0, 1.0]
        assert len(server.seen) == 2
        graded(settings(server.url, cache=cache, options={"seed": 2}), "a")
        assert len(server.seen) == 3
        with pytest.raises(RewardError, match=r"judge\.score"):
            graded(settings(server.url, cache=cache, highest=0.5), "d")
        assert len(sqlite3.connect(cache).execute("select * from replies").fetchall()) == 3
        graded(settings(server.url), "a", "a")  # without a cache, every request is sent
        assert len(server.seen) == 6
    with serving(chat("0.25")) as other:  # the same request, sent to another address
        assert graded(settings(other.url, cache=cache), "a")[0].score == 0.25


def test_a_damaged_cache_is_an_error_that_names_it(settings, tmp_path):
    (tmp_path / "bad").write_bytes(b"no database" * 100)
    for cache in (tmp_path / "bad", tmp_path / "missing" / "c"):
        with pytest.raises(ConfigError, match=rf"helpful\.yaml: judge\.cache={cache}"):
            graded(settings("http://127.0.0.1:1/v1", cache=str(cache)), "a")


def test_the_key_comes_from_the_environment_and_is_never_shown(settings, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "s3cret-key")
    with serving((401, b"bad key s3cret-key")) as server:
        with pytest.raises(RewardError, match=r"bad key \$JUDGE_KEY") as failed:
            graded(settings(server.url, api_key_env="JUDGE_KEY"), "a")
        assert server.seen[0][1]["Authorization"] == "Bearer s3cret-key"
    assert "s3cret" not in str(failed.value)
    with pytest.raises(ConfigError, match=r"judge\.api_key_env") as refused:
        graded(settings("http://a/v1", api_key_env="sk-the-key-itself"), "a")
    assert "sk-the" not in str(refused.value)
    with pytest.raises(ConfigError, match=r"judge\.api_key_env: found 'NO_SUCH_KEY'"):
        graded(settings("http://a/v1", api_key_env="NO_SUCH_KEY"), "a")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"modle": "m"}, r"judge\.modle.*did you mean model"),
        ({"url": "ftp://a/v1"}, r"judge\.url: found 'a'"),
        ({"url": "http://me:pass@a/v1"}, r"judge\.url: found 'a'"),
        ({"url": "http://a:port/v1"}, "port"),
        ({"prompt": "Rate it."}, r"judge\.prompt.*\{response\}"),
        ({"score": "Score: [0-9]+"}, r"judge\.score.*one group"),
        ({"score": "("}, r"judge\.score.*unterminated"),
        ({"retries": -1}, r"judge\.retries"),
        ({"retries": 2000}, r"judge\.retries: found 2000"),
        ({"lowest": 2.0}, r"judge\.lowest: found 2\.0.*judge\.highest=1"),
        ({"on_failure": "wrong"}, r"judge\.on_failure.*error or lost"),
        ({"timeout_s": 0.0}, r"judge\.timeout_s: found 0"),
    ],
)
def test_a_wrong_setting_is_one_error_before_anything_starts(changes, message, settings):
    path = settings("http://127.0.0.1:1/v1", **changes)
    with pytest.raises(ConfigError, match=rf"reward\.grader: {re.escape(path)}: .*{message}"):
        graded(path, "a")
    with pytest.raises(ConfigError, match=r"no such file"):
        graded("missing.yaml", "a")
