"""HTTP clients of a running `vllm serve`: models, metrics, chat requests, streams, and what failed.

Everything that a request to a server can raise becomes a :class:`Problem` that names the server and
says what to do (:func:`describe_failure`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple, TypeVar

import httpx
from prometheus_client.parser import text_string_to_metric_families
from pydantic import AliasPath, BaseModel, Field, ValidationError

from vllm_autoprune.connection import (
    Connection,
    find_address,
    make_client,
    proxy_variables,
    read_json,
    server_address,
)
from vllm_autoprune.errors import AutopruneError, ConfigError, EvaluationFailed, Problem
from vllm_autoprune.stream import one_line, read_error

_T = TypeVar("_T")

MAX_IN_FLIGHT = 128
"""Concurrent requests a server. On two cores an answer took 16 ms of processor time with 128, 23 ms
with 32 and 45 ms with one, because requests share the cost of an engine step."""

CHAT = "/v1/chat/completions"
_MODELS = "/v1/models"
_CHECK_TIMEOUT = 30.0
"""Timeout of the list of models, which shows whether a server is alive."""
_LONGEST_WAIT = 60.0
"""Maximum seconds before the next attempt that a server may ask for."""
_SILENT_WAIT = 5.0
"""Waits of at least this many seconds are announced."""


class UnknownFormat(Exception):
    """A server's answer is not in the format that was asked for; one of :data:`FAILURES`."""


_BROKEN = (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError)
FAILURES = (httpx.HTTPError, httpx.InvalidURL, UnknownFormat)
"""Failures of a server: no answer, an error status, or another format."""


class RequestRefused(EvaluationFailed):
    """A server answered with a status that another attempt cannot change.

    The problem's kind is that of ``param`` in OpenAI's error object (docs/clients.md), or a field
    that vLLM itself names there.
    """


class ServerLost(AutopruneError):
    """No server answers any more, or its answers are wrong: no further request can succeed."""


class _ModelCard(BaseModel):
    id: str
    max_model_len: int | None = None


class _ModelList(BaseModel):
    data: list[_ModelCard]


class _Choice(BaseModel):
    message: dict[str, Any]
    finish_reason: str | None = None


class ChatAnswer(BaseModel):
    """The part of a chat completion that is read."""

    choices: list[_Choice] = Field(min_length=1)


class _ErrorBody(BaseModel):
    param: str = Field(validation_alias=AliasPath("error", "param"))


class _ErrorCode(BaseModel):
    """What OpenAI's API names an error, which it gives with status 429 to who has no credit."""

    code: str | None = Field(None, validation_alias=AliasPath("error", "code"))


class Metrics:
    """One answer of ``/metrics``; raises :class:`UnknownFormat` for other text."""

    def __init__(self, text: str) -> None:
        self._samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
        try:
            families = list(text_string_to_metric_families(text))
        except (ValueError, LookupError) as error:  # the parser raises both
            raise UnknownFormat(f"no metrics: {one_line(error, 80)}") from None
        for family in families:
            for sample in family.samples:
                self._samples.setdefault(sample.name, []).append(
                    (sample.labels, sample.value)
                )

    def since(self, earlier: Metrics) -> Metrics:
        """Growth of every counter and histogram since an earlier page."""
        gained = Metrics("")
        for name, samples in self._samples.items():
            previous = earlier._samples.get(name, ())
            gained._samples[name] = [
                (labels, value - sum(old for other, old in previous if other == labels))
                for labels, value in samples
            ]
        return gained

    def total(self, name: str, **labels: str) -> float | None:
        """Sum of a metric over its samples with these labels; None if there is none."""
        samples = self._samples.get(name, ())
        values = [
            value for present, value in samples if labels.items() <= present.items()
        ]
        return sum(values) if values else None

    def label(self, name: str, label: str) -> str | None:
        """A label's value in the first sample of a metric."""
        return next(
            (labels.get(label) for labels, _ in self._samples.get(name, ())), None
        )


class Failures:
    """Failures that a run waited for; they are reported, as a limited server measures slowly."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._counts = Counter[str]()
        self._longest = _SILENT_WAIT

    def wait(self, error: Exception, planned: float) -> float:
        """Seconds until the next attempt, by Retry-After up to a minute, else as planned."""
        self._counts[describe_error(error)] += 1
        demanded = 0.0
        if isinstance(error, httpx.HTTPStatusError):
            header = error.response.headers.get("retry-after", "")  # seconds or a date
            # It raises TypeError for a text that is no date.
            with contextlib.suppress(ValueError, TypeError, OverflowError):
                demanded = parsedate_to_datetime(header).timestamp() - time.time()
            with contextlib.suppress(ValueError):
                demanded = max(0.0, float(header))
        if not demanded > 0:  # also not a number
            return planned
        wait = min(demanded, _LONGEST_WAIT)
        if demanded > self._longest:
            self._longest = demanded
            text = f"asks to wait {demanded:,.0f} s; asked again after {wait:.0f} s"
            print(f"{self._url} {text}", file=sys.stderr, flush=True)
        return wait

    def report(self) -> None:
        """Print how many requests had to be repeated."""
        if self._counts:
            causes = ", ".join(
                f"{count} x {what}" for what, count in self._counts.most_common(3)
            )
            print(
                f"{self._url} limited this run: {causes}, asked again", file=sys.stderr
            )


class Retries(NamedTuple):
    """Number of attempts, and the seconds before the second one.

    The wait doubles before each further attempt; a server's Retry-After replaces it.
    """

    attempts: int
    first_wait: float

    def wait(self, attempt: int, error: Exception, failures: Failures) -> float | None:
        """Seconds between a failed attempt, counted from 1, and the next; None after the last."""
        if attempt >= self.attempts:
            return None
        return failures.wait(error, self.first_wait * 2 ** (attempt - 1))


class ServerClient:
    """Client of one server; a context manager whose errors are of :data:`FAILURES`."""

    def __init__(self, url: str, connection: Connection | None = None) -> None:
        """``url`` as people write it; raises :class:`ConfigError` for what is no address."""
        self.url = server_address(url)
        self._failures = Failures(self.url)
        self.http = make_client(httpx.Client, url, connection or Connection())

    def __enter__(self) -> ServerClient:
        return self

    def __exit__(self, *error: object) -> None:
        self.http.close()
        self._failures.report()

    def list_models(self) -> dict[str, int]:
        """Names of the served models, at least one, with the context each has; 0: not told."""
        return self._ask(read_models, "GET", _MODELS, timeout=_CHECK_TIMEOUT)

    def read_metrics(self) -> Metrics | None:
        """Read ``/metrics``; None if the server has none."""
        answer = self.http.get(f"{self.url}/metrics")
        return Metrics(answer.text) if answer.is_success else None

    def read_served(self) -> dict[str, Any]:
        """Read ``/v1/autoprune``; empty if the server does not have the plugin."""
        answer = self.http.get(f"{self.url}/v1/autoprune")
        return read_object(answer) if answer.is_success else {}

    def chat(self, body: Mapping[str, object]) -> dict[str, Any]:
        """The answer to a chat request; :class:`RequestRefused` where the server refuses it."""
        return self._ask(_read_answer, "POST", CHAT, json=body)

    def _ask(
        self, read: Callable[[httpx.Response], _T], method: str, path: str, **more: Any
    ) -> _T:
        """What is read of the answer, at the third attempt where a failure may pass."""
        retries = Retries(attempts=3, first_wait=0.5)
        attempt = 0
        while True:
            attempt += 1
            try:
                return read(self.http.request(method, self.url + path, **more))
            except (httpx.HTTPStatusError, *_BROKEN) as error:
                if not may_pass(error):
                    raise
                wait = retries.wait(attempt, error, self._failures)
                if wait is None:
                    raise
            time.sleep(wait)

    @contextlib.contextmanager
    def reporting_failures(self) -> Iterator[None]:
        """Raise what a request to a server raises as a :class:`ConfigError`."""
        try:
            yield
        except (*FAILURES, RequestRefused) as error:
            raise ConfigError("server", [describe_failure(self.url, error)]) from None

    def choose_model(self, models: Mapping[str, int], wanted: str | None = None) -> str:
        """The wanted model or else the first; :class:`ConfigError` where it is not served."""
        if wanted is not None and wanted not in models:
            fix = f"serve {wanted}, or name a served model"
            raise self.error(f"serves {', '.join(models)}", fix)
        return wanted or next(iter(models))

    def error(self, what: str, fix: str) -> ConfigError:
        """Of what is wrong with this server."""
        return ConfigError.of(self.url, what, fix, subject="server")


class AsyncServerClient:
    """Client of one server for many concurrent requests; its errors are of :data:`FAILURES`."""

    def __init__(
        self,
        url: str,
        max_in_flight: int = MAX_IN_FLIGHT,
        connection: Connection | None = None,
    ) -> None:
        """As :class:`ServerClient`; requests beyond ``max_in_flight`` wait in order."""
        self.url = server_address(url)
        self.failures = Failures(self.url)
        # One connection a client: httpx scans all connections of a client for every request, which
        # took longer than the model with 128 of them.
        self._free: asyncio.LifoQueue[httpx.AsyncClient] = asyncio.LifoQueue()
        for _ in range(max_in_flight):
            client = make_client(httpx.AsyncClient, url, connection or Connection())
            self._free.put_nowait(client)

    async def list_models(self) -> dict[str, int]:
        """As :meth:`ServerClient.list_models`, asked once."""
        return read_models(await self._send("GET", _MODELS, timeout=_CHECK_TIMEOUT))

    async def chat(self, body: Mapping[str, object]) -> dict[str, Any]:
        """As :meth:`ServerClient.chat`, asked once."""
        return _read_answer(await self._send("POST", CHAT, json=body))

    async def close(self) -> None:
        """Close all connections that are not in use."""
        while not self._free.empty():
            await self._free.get_nowait().aclose()
        self.failures.report()

    async def _send(self, method: str, path: str, **more: Any) -> httpx.Response:
        client = await self._free.get()
        try:
            return await client.request(method, self.url + path, **more)
        finally:
            self._free.put_nowait(client)


async def chat_with_retries(
    servers: Sequence[AsyncServerClient],
    body: Mapping[str, object],
    attempts: int = 4,
    first_wait: float = 1.0,
) -> dict[str, Any]:
    """The answer to a chat request, from the next of the servers after each failure.

    Waits as Retry-After says, else ``first_wait`` seconds before the second attempt, twice as long
    before each further one. Raises :class:`RequestRefused`, :class:`EvaluationFailed` after the
    last attempt, and :class:`ServerLost` where no server answers any more.
    """
    retries = Retries(attempts, first_wait)
    for attempt, server in enumerate(itertools.cycle(servers), 1):
        try:
            return await server.chat(body)
        except FAILURES as error:
            failure = describe_error(error)
            wait = retries.wait(attempt, error, server.failures)
        if wait is None:
            break
        await asyncio.sleep(wait)
    for server in servers:
        with contextlib.suppress(*FAILURES):
            await server.list_models()
            what = f"{failure}, after {attempts} attempts"
            raise EvaluationFailed.of(server.url, what)
    addresses = ", ".join(server.url for server in servers)
    raise ServerLost.of(
        addresses,
        f"stopped answering ({failure})",
        "start it and resume: nothing is lost",
    )


class _Cause(NamedTuple):
    """Why a request failed, and what to do about it."""

    what: str
    fix: str
    may_be_address: bool = False
    """Whether the server may answer at another address."""


def describe_failure(
    url: str,
    error: Exception,
    server: str = "a vllm serve, such as http://localhost:8000",
) -> Problem:
    """Why a server cannot be used, by what a request to it raised, and what to do."""
    address_fix = f"give the address of {server}"
    match error:
        case httpx.HTTPStatusError(response=response):
            cause = _explain_status(response, address_fix)
        case httpx.TransportError():
            cause = _explain_transport(error)
        case RequestRefused():
            what = f"refuses a chat request: {error.reason}"
            fix = "give the key that the server asks for as --api-key, or look into its log"
            cause = _Cause(what, fix)
        case _:
            what = f"answers in an unknown format ({_describe_cause(error, 200)})"
            cause = _Cause(what, address_fix, may_be_address=True)
    fix = cause.fix
    if cause.may_be_address and (other := find_address(f"{url}/v1")):
        fix = f"give {other}, which answers"
    return Problem(url, cause.what, fix)


def _explain_status(response: httpx.Response, address_fix: str) -> _Cause:
    """Why a response with an error status, or a redirect, failed and what to do."""
    if response.has_redirect_location:
        target = str(response.url.join(response.headers["location"]))
        return _Cause(f"redirects to {server_address(target)}", "give that address")
    what = f"answers with {describe_rejection(response)}"
    match response.status_code:
        case 400 | 404 | 405:
            return _Cause(what, address_fix, may_be_address=True)
        case 401 | 403:
            fix = "give the key that the server asks for as --api-key or VLLM_API_KEY"
        case _ if is_unpaid(response):
            what = f"has no credit left for this key ({describe_rejection(response)})"
            fix = "add some, or name another endpoint"
        case 407:
            variables = ", ".join(proxy_variables())
            fix = f"give {variables} as http://USER:PASSWORD@HOST:PORT"
        case _:
            fix = "look into the server's log"
    return _Cause(what, fix)


def _explain_transport(error: httpx.TransportError) -> _Cause:
    """Why a connection was not made or broke, and what to do."""
    text = _describe_cause(error, 200)
    proxies = ", ".join(proxy_variables())
    if isinstance(error, httpx.ProxyError):
        what = f"cannot be reached by the proxy of {proxies} ({text})"
        fix = "correct the proxy, or name the server's host in NO_PROXY"
        return _Cause(what, fix)
    if "CERTIFICATE_VERIFY_FAILED" in text:
        reason = text.partition("failed: ")[2]
        what = f"has a certificate that is not trusted ({reason})"
        return _Cause(what, "name the certificate of its authority with --ca-file")
    what = f"does not answer ({type(error).__name__}: {text})"
    if isinstance(error, httpx.ReadTimeout):
        seconds = error.request.extensions["timeout"]["read"]
        fix = "look into its log: it may be busy, or hang"
        return _Cause(f"has not answered within {seconds:g} s", fix)
    if isinstance(error, _BROKEN):
        what = f"closes the connection before it has answered ({text})"
    if proxies:
        what += f", asked as {proxies} and NO_PROXY say"
    fix = "start the server, or correct its address"
    return _Cause(what, fix, may_be_address=True)


def describe_rejection(response: httpx.Response) -> str:
    """Status and message of a response that is an error, on one line."""
    text = read_error(read_json(response)) or response.content.decode(errors="replace")
    text = re.sub(r"<style.*?</style>|<[^>]*>", " ", text, flags=re.DOTALL)
    return f"status {response.status_code}: {one_line(text, 400) or 'no text'}"


def describe_error(error: Exception) -> str:
    """What a request raised, on one line that begins with its kind."""
    if isinstance(error, httpx.HTTPStatusError):
        return describe_rejection(error.response)
    kind = (
        type(error).__name__
        if isinstance(error, httpx.HTTPError)
        else "an unknown format"
    )
    return f"{kind}: {_describe_cause(error, 300)}"


def _describe_cause(error: BaseException, length: int) -> str:
    """The text of an error, or else of what caused it: a connection that breaks has none."""
    while not str(error) and (cause := error.__cause__ or error.__context__):
        error = cause
    return one_line(error, length) or type(error).__name__


def may_pass(error: Exception) -> bool:
    """Whether another attempt may not meet this failure."""
    if not isinstance(error, httpx.HTTPStatusError):
        return True
    if is_unpaid(error.response):
        return False
    return error.response.is_server_error or error.response.status_code in (
        408,
        425,
        429,
    )


def is_unpaid(response: httpx.Response) -> bool:
    """Whether an error is that of an account without credit."""
    if response.status_code == 402:
        return True
    with contextlib.suppress(ValidationError):
        code = _ErrorCode.model_validate(read_json(response)).code
        return code == "insufficient_quota"
    return False


def read_object(response: httpx.Response) -> dict[str, Any]:
    """The JSON object of an answer; raises one of :data:`FAILURES` that says what came instead."""
    response.raise_for_status()
    content = read_json(response)
    if message := read_error(content):
        status = response.status_code
        raise UnknownFormat(f"status {status} with an error: {message}")
    if not isinstance(content, dict):
        kind = response.headers.get("content-type", "no type").partition(";")[0]
        text = _quote(response) or "nothing"
        raise UnknownFormat(f"no JSON object but {kind}: {text}")
    return content


def _quote(response: httpx.Response) -> str:
    return one_line(response.content.decode(errors="replace"), 80)


def read_models(response: httpx.Response) -> dict[str, int]:
    """The list of models, as :meth:`ServerClient.list_models`; raises one of :data:`FAILURES`."""
    try:
        models = _ModelList.model_validate(read_object(response)).data
    except ValidationError:
        raise UnknownFormat(f"no list of models: {_quote(response)}") from None
    if not models:
        raise UnknownFormat("lists no model at /v1/models")
    return {model.id: model.max_model_len or 0 for model in models}


def _read_answer(response: httpx.Response) -> dict[str, Any]:
    try:
        return read_object(response)
    except httpx.HTTPStatusError as error:
        if may_pass(error):
            raise
        what = describe_rejection(response)
        kind = fix = ""
        with contextlib.suppress(ValidationError):
            param = _ErrorBody.model_validate(read_json(response)).param
            _, is_ours, kind = param.rpartition("#")
            if is_ours:  # so is the message: a problem and its fix
                what, _, fix = what.partition(" -> ")
        url = str(response.url).removesuffix(CHAT)
        raise RequestRefused.of(url, what, fix, kind=kind) from None
