"""A judge as a grader: a language model with an OpenAI-compatible API scores each response. `judge:FILE.yaml` names the file with its settings."""

import asyncio
import hashlib
import json
import os
import re
import sqlite3
import warnings
from collections import Counter
from contextlib import closing, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection, IncompleteRead
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dapo_jax.config.keys import POSITIVE, ConfigError, Range, key, prefixed, refuse
from dapo_jax.config.reading import read_file
from dapo_jax.config.section import entry
from dapo_jax.dapo.rollouts import Verdict
from dapo_jax.rewards.async_calls import once
from dapo_jax.rewards.sample import Sample
from dapo_jax.text.messages import content_text
from dapo_jax.text.thoughts import without_thoughts

_FIND, _KEEP = "select reply from replies where request = ?", "insert or replace into replies values (?, ?)"
_MOST_BYTES = 1 << 20  # a longer answer is cut off, and then it is not JSON
_MAY_PASS = re.compile(
    r"(?i)\A(?:408|429|5\d\d)\Z|rate.?limit|overload|exhausted|unavailable|time.?out|internal|server.?error"
)
"""Matches the statuses and codes of errors after which a request is repeated."""
_NOT_WHOLE = ("length", "max_tokens", "content_filter", "error", "abort")
"""Values of `finish_reason` of a reply that is not complete."""


@dataclass(frozen=True, kw_only=True)
class JudgeConfig:
    """The settings of a judge, which `docs/write_a_reward.md` describes."""

    url: str = key(not_empty=True)
    model: str = key(not_empty=True)
    prompt: str = key(not_empty=True)
    score: str = r"\A\s*([-+]?\d+\.?\d*)\s*\Z"
    """Regular expression whose group is the score. The last match counts. By default, the whole reply must be a number."""
    lowest: float = key(0.0, range=None)
    highest: float = key(1.0, range=None)
    on_failure: str = key("error", choices=["error", "lost"])
    """Action if there is no score for any reason: error, or lost (the response has no verdict and counts as wrong)."""
    options: dict[str, Any] = key(default_factory=dict)
    timeout_s: float = key(30.0, range=POSITIVE)
    retries: int = key(2, range=Range("0 to 20", lambda v: 0 <= v <= 20))
    api_key_env: str = ""
    cache: str = ""


class Judge:
    """An async reward function that asks a judge. `path` is a YAML file with the fields of `JudgeConfig`. Raises ConfigError if the file or a value in it is
    invalid, the API key is missing, or the cache cannot be opened."""

    kind = "judge"  # the name of its counts in metrics
    limits_itself = True  # so `AsyncCalls` does not limit its calls

    def __init__(self, path: str) -> None:
        with prefixed(path, OSError):
            self.config = config = entry("judge", read_file(Path(path).expanduser()), JudgeConfig)
            self._key = os.environ.get(config.api_key_env, "").strip()
            _check(config, self._key)
            if config.cache:
                self._query_cache("create table if not exists replies (request text primary key, reply text)")
        self.__qualname__ = f"judge:{Path(path).stem}"  # the name in messages and metrics
        self.counts = Counter(calls=0, cache_hits=0, tokens=0)
        """Number of requests that were sent, of replies from the cache, and of tokens according to the server."""
        self._waiting = dict[str, asyncio.Future[str]]()
        """Pending replies, by request. Equal requests share the reply or the error of the first of them."""

    async def __call__(self, sample: Sample) -> Verdict:
        """Returns the judge's verdict on a response. Raises RuntimeError if there is no score, unless `on_failure` is lost."""
        config = self.config
        values = {"prompt": sample.prompt.text, "response": sample.response, "answer": sample.answer}
        # One pass, so that a placeholder in a response is not replaced.
        text = re.sub(r"\{(prompt|response|answer)\}", lambda name: values[name[1]], config.prompt)
        body = {"model": config.model, "messages": [{"role": "user", "content": text}]}
        body |= {"temperature": 0.0, "max_tokens": 256, **config.options}
        try:
            reply = await self._reply(json.dumps(body).encode())
            return Verdict(correct=(score := self._score(reply)) > 0, score=score, reason=reply)
        except RuntimeError as error:
            if config.on_failure == "error":
                raise
            return Verdict(correct=False, reason=str(error), lost="raised")

    async def _reply(self, body: bytes) -> str:
        """Returns the reply to a request, from the cache or from the server. Only replies with a score are stored."""
        if not self.config.cache:
            return await self._asked(body)
        request = hashlib.sha256(f"{self.config.url}\n".encode() + body).hexdigest()
        is_new = request not in self._waiting
        reply = await once(self._waiting, request, lambda: self._cached_reply(request, body))
        self.counts["cache_hits"] += not is_new
        return reply

    async def _cached_reply(self, request: str, body: bytes) -> str:
        if rows := await asyncio.to_thread(self._query_cache, _FIND, request):
            self.counts["cache_hits"] += 1
            return rows[0][0]
        reply = await self._asked(body)
        self._score(reply)
        await asyncio.to_thread(self._query_cache, _KEEP, request, reply)
        return reply

    def _score(self, reply: str) -> float:
        config, matches = self.config, re.findall(self.config.score, without_thoughts(reply))
        with suppress(IndexError, ValueError):
            if config.lowest <= (score := float(matches[-1])) <= config.highest:
                return score
        raise RuntimeError(
            f"the judge replied {reply!r:.200}, but judge.score={config.score!r} must find a number from {config.lowest:g} to {config.highest:g} in it: "
            "change the prompt or the pattern, or set on_failure: lost"
        )

    async def _asked(self, body: bytes) -> str:
        """Sends a request, and repeats it after an error that may pass. Surrogates in the reply are replaced, because files cannot store them."""
        config, number, reason = self.config, 0, ""
        for number in range(1, config.retries + 2):
            self.counts["calls"] += 1
            try:
                posted = asyncio.to_thread(self._post, body)
                status, content = await asyncio.wait_for(posted, config.timeout_s)
                failed = {"error": {"code": status, "message": content[:300]}}
                answer = json.loads(content) if status == 200 else failed
                with suppress(Exception):  # some servers count no tokens
                    self.counts["tokens"] += int(answer["usage"]["total_tokens"])
                return _reply_of(answer).encode(errors="replace").decode()
            except (OSError, HTTPException) as error:
                reason = repr(error)
            except Exception as error:  # the reply is not trusted, so it may be anything
                reason = f"no chat completion ({type(error).__name__}: {error!s:.400})"
                break
            if number <= config.retries:
                await asyncio.sleep(min(2.0 ** (number - 1), 60.0))
        reason = reason.replace(self._key, f"${config.api_key_env}") if self._key else reason
        raise RuntimeError(
            f"{config.url} failed {number} of {config.retries + 1} times, the last time with {reason}; check the address and the server, or change the prompt, options "
            f"(such as max_tokens), retries: {config.retries} or timeout_s: {config.timeout_s:g} in the judge's file"
        )

    def _post(self, body: bytes) -> tuple[int, bytes]:
        """Sends a request, and returns the status and the content of the answer. It follows no redirects, which could send the key to another server."""
        url = urlsplit(self.config.url)
        connect = HTTPSConnection if url.scheme == "https" else HTTPConnection
        headers = {"Content-Type": "application/json"}
        headers |= {"Authorization": f"Bearer {self._key}"} if self._key else {}
        with closing(connect(url.hostname or "", url.port, timeout=self.config.timeout_s)) as connection:
            query = f"?{url.query}" if url.query else ""
            connection.request("POST", f"{url.path.rstrip('/')}/chat/completions{query}", body, headers)
            answer = connection.getresponse()
            content = answer.read(_MOST_BYTES)
            if answer.length and len(content) < _MOST_BYTES:
                raise IncompleteRead(content, answer.length)  # `read` does not raise it if it has a limit
            return answer.status, content

    def _query_cache(self, query: str, *values: str) -> list[tuple[str]]:
        """Runs a query. If it fails, warns, because a reply counts even on a full disk, or raises ConfigError if the cache cannot be created."""
        path = Path(self.config.cache).expanduser()
        try:
            with closing(sqlite3.connect(path, timeout=2.0)) as cache, cache:
                return cache.execute(query, values).fetchall()
        except sqlite3.Error as error:
            failed = f"judge.cache={path}: {error}; remove the file, or name another"
            if not values:
                raise ConfigError(failed) from error
            warnings.warn(f"{failed}. The judge continues without it", stacklevel=2)
            return []


def _reply_of(answer: Any) -> str:
    """Returns the text of a chat completion. Raises ConnectionError after an error that may pass, and other errors without a complete text."""
    choice = (answer.get("choices") or [{}])[0]
    if error := answer if answer.get("object") == "error" else answer.get("error") or choice.get("error"):
        code = isinstance(error, dict) and (error.get("code") or error.get("type") or error.get("status"))
        raise (ConnectionError if _MAY_PASS.search(f"{code}") else ValueError)(f"the error {error!r:.400}")
    message, ended = choice["message"], choice.get("finish_reason")
    content = message.get("content")
    if message.get("refusal") or ended in _NOT_WHOLE or content is None:
        raise ValueError(f"finish_reason={ended!r}, {message!r:.300}")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return content_text([part for part in parts if part["type"] == "text"])


def _check(config: JudgeConfig, key: str) -> None:
    """Checks the values of a judge's settings. `key` is the API key."""
    url, name = urlsplit(config.url), config.api_key_env
    if url.scheme not in ("http", "https") or not url.hostname or "@" in url.netloc or url.port == 0:
        refuse("judge.url", url.hostname, "http:// or https://, a host, and no password", "correct it")
    if "{response}" not in config.prompt:
        refuse("judge.prompt", config.prompt, "the text {response}", "write it where the response belongs")
    if name and not key:
        shown = name if name.isupper() else "a value that may be a key"  # keys are not printed
        refuse("judge.api_key_env", shown, "the name of an environment variable that is set", "export it")
    if config.lowest > config.highest:
        refuse("judge.lowest", config.lowest, f"at most judge.highest={config.highest:g}", "swap them")
    try:
        groups, reason = re.compile(config.score).groups, ""
    except re.error as error:
        groups, reason = 0, f": {error}"
    if groups != 1:
        needs = f"a regular expression with one group{reason}"
        refuse("judge.score", config.score, needs, "put parentheses around the number alone")
