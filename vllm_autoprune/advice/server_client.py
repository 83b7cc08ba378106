"""Client of one running server: its model, its metrics, and timed streamed answers."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import httpx

from vllm_autoprune.advice.server_metrics import Exposition
from vllm_autoprune.errors import ConfigError, Problem

ANSWER_TOKENS = 8
_TIMEOUT = httpx.Timeout(600.0, connect=10.0)


@dataclass(frozen=True, slots=True)
class Timing:
    """One streamed answer, in seconds, and the engine's part of it."""

    ttft: float
    gaps: tuple[float, ...]
    """Between chunks with text."""
    prompt_tokens: int
    outside: float | None
    """TTFT less the engine's queue and prefill; None without ``/metrics``."""


class ServerClient:
    """Client of one server; every error is a :class:`ConfigError` with a fix."""

    def __init__(self, url: str, model: str | None = None, key: str | None = None) -> None:
        """``model``: default: the first that is served; ``key``: the server's API key."""
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.Client(timeout=_TIMEOUT, headers=headers)
        self._wanted = model
        self._model = ""
        self.context = 0
        """Longest prompt and answer that the server takes; 0: it does not say."""

    def __enter__(self) -> ServerClient:
        return self

    def __exit__(self, *error: object) -> None:
        self._client.close()

    def read_metrics(self) -> Exposition | None:
        """``/metrics``; None where the server has none."""
        with self._reporting():
            answer = self._client.get(f"{self.url}/metrics")
        return Exposition(answer.text) if answer.is_success else None

    def select_model(self) -> None:
        """Find the served model."""
        with self._reporting():
            answer = self._client.get(f"{self.url}/v1/models")
        if not answer.is_success:
            fix = "correct the address; set VLLM_API_KEY where the server asks for a key"
            raise server_error(self.url, f"/v1/models has status {answer.status_code}", fix)
        try:
            models = {
                str(one["id"]): int(one.get("max_model_len") or 0) for one in answer.json()["data"]
            }
        except (ValueError, KeyError, TypeError, AttributeError):
            fix = "give the address of a vllm serve"
            raise server_error(self.url, "/v1/models is no list of models", fix) from None
        if not models or (self._wanted is not None and self._wanted not in models):
            served = ", ".join(models) or "nothing"
            raise server_error(self.url, f"serves {served}", f"serve {self._wanted or 'a model'}")
        self._model = self._wanted or next(iter(models))
        self.context = models[self._model]

    def ask(self, text: str, image: str | None = None) -> Timing:
        """One streamed answer; ``image`` is a data URL."""
        content: list[Mapping[str, object]] = [{"type": "text", "text": text}]
        if image is not None:
            content.insert(0, {"type": "image_url", "image_url": {"url": image}})
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            "max_tokens": ANSWER_TOKENS,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        before = self.read_metrics()
        with self._reporting():
            ttft, gaps, tokens = self._stream(body, has_image=image is not None)
        after = self.read_metrics()
        engine = _engine_seconds(before, after)
        return Timing(ttft, gaps, tokens, None if engine is None else max(ttft - engine, 0.0))

    def _stream(
        self, body: Mapping[str, object], has_image: bool
    ) -> tuple[float, tuple[float, ...], int]:
        times, tokens, finished = list[float](), 0, None
        start = time.perf_counter()
        with self._client.stream("POST", f"{self.url}/v1/chat/completions", json=body) as answer:
            if not answer.is_success:
                answer.read()
                raise _refusal(self.url, answer, has_image)
            for line in answer.iter_lines():
                now = time.perf_counter() - start
                data = line.removeprefix("data:").strip()
                if not line.startswith("data:") or data == "[DONE]":
                    continue
                chunk = json.loads(data)
                if "error" in chunk:
                    what = f"an answer broke off: {str(chunk['error'])[:200]}"
                    raise server_error(self.url, what, "look at the server's log")
                for choice in chunk.get("choices") or ():
                    delta = choice.get("delta") or {}
                    if delta.get("content") or delta.get("reasoning_content"):
                        times.append(now)
                    elif choice.get("finish_reason"):
                        finished = now
                tokens = int((chunk.get("usage") or {}).get("prompt_tokens") or tokens)
        if not times and finished is not None:
            times.append(finished)  # the first token was the last one
        if not times or not tokens:
            raise server_error(
                self.url, "a streamed answer has no token or no usage", "give a vllm serve"
            )
        gaps = tuple(late - early for early, late in itertools.pairwise(times))
        return times[0], gaps, tokens

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        try:
            yield
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            what = f"does not answer ({type(error).__name__})"
            raise server_error(self.url, what, "start the server, or correct its address") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            what = f"answers in an unknown format ({type(error).__name__}: {error})"[:200]
            raise server_error(self.url, what, "give the address of a vllm serve") from None


def _engine_seconds(before: Exposition | None, after: Exposition | None) -> float | None:
    """Queue and prefill of the one request between two answers of ``/metrics``."""
    if before is None or after is None:
        return None
    count = "vllm:request_prefill_time_seconds_count"
    if (after.total(count) or 0.0) - (before.total(count) or 0.0) != 1:
        return None  # another client's request came between
    names = ("vllm:request_queue_time_seconds_sum", "vllm:request_prefill_time_seconds_sum")
    return sum((after.total(name) or 0.0) - (before.total(name) or 0.0) for name in names)


def _refusal(url: str, answer: httpx.Response, has_image: bool) -> ConfigError:
    what = f"status {answer.status_code}: {' '.join(answer.text.split())[:200]}"
    if has_image:
        fix = "serve a model that takes images, and allow one of this size"
        return server_error(url, f"refuses a request with an image: {what}", fix)
    fix = "set VLLM_API_KEY where the server asks for a key, or look at its log"
    return server_error(url, f"refuses a chat request: {what}", fix)


def server_error(url: str, what: str, fix: str) -> ConfigError:
    """Error that names the server, what is wrong with it and the fix."""
    return ConfigError("server", [Problem(url, what, fix)])
