"""How requests reach a server: its address, API key, headers, certificates and proxies.

Every HTTP client of the repository is made here (:func:`make_client`).
"""

from __future__ import annotations

import os
import re
import ssl
import sys
from base64 import b64encode
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar
from urllib.parse import unquote_to_bytes

import httpx
from pydantic import AfterValidator, Field, SecretStr

from vllm_autoprune.errors import ConfigError
from vllm_autoprune.flags import refuse_value
from vllm_autoprune.record_file import FrozenModel

_KEYS = ("VLLM_API_KEY", "OPENAI_API_KEY")
"""Environment variables of the API key; the first that is set counts."""
_TIMEOUT = httpx.Timeout(600.0, connect=10.0)
"""Long, because a request may wait for all others that are in flight."""
# vLLM closes a connection that was idle for 5 s (VLLM_HTTP_TIMEOUT_KEEP_ALIVE), also one on which a
# request is just being sent.
_LIMITS = httpx.Limits(max_connections=None, keepalive_expiry=2.0)
_GUESS_TIMEOUT = 3.0
_PORT = 8000
"""Default port of `vllm serve`, for addresses without a port."""

_Client = TypeVar("_Client", httpx.Client, httpx.AsyncClient)


def _check_header(text: str) -> str:
    if not re.fullmatch(r"[\w!#$%&'*+.^`|~-]+\s*=[\x20-\x7e]+", text, re.ASCII):
        what = f"{text.partition('=')[0]!r} is refused"
        raise refuse_value(what, "give NAME=VALUE in plain ASCII")
    return text


def _check_ca_file(path: Path) -> Path:
    try:
        ssl.create_default_context(cafile=path)
    except OSError as error:  # ssl.SSLError is one
        reason = (
            "it holds no certificate"
            if isinstance(error, ssl.SSLError)
            else error.strerror
        )
        what = f"{path} cannot be read ({reason})"
        fix = "name a file of certificates in PEM format"
        raise refuse_value(what, fix) from None
    return path


Header = Annotated[str, AfterValidator(_check_header)]
"""A header, as NAME=VALUE."""


class Connection(FrozenModel):
    """Key, headers and trust of requests to a server: flags of every command that sends some."""

    # Neither key nor headers, which may be secret too, are in any record.
    api_key: SecretStr | None = Field(
        default=None,
        exclude=True,
        title="KEY",
        description="API key of the server (default: VLLM_API_KEY, else OPENAI_API_KEY)",
    )
    header: list[Header] = Field(
        default=[],
        exclude=True,
        repr=False,
        title="NAME=VALUE",
        description="header of every request to the server; repeatable",
    )
    ca_file: Annotated[Path, AfterValidator(_check_ca_file)] | None = Field(
        default=None,
        title="FILE",
        description="certificates (PEM) to trust beside those of the system",
    )
    insecure: bool = Field(default=False, description="do not check certificates")

    def headers(self, url: str) -> httpx.Headers:
        """The key, or the user and password in the address, then ``--header``."""
        headers = httpx.Headers()
        name = "the API key"
        if self.api_key is None:
            name = next(filter(os.environ.get, _KEYS), "")
            key = os.environ.get(name, "").strip()
        else:
            key = self.api_key.get_secret_value().strip()
        if not (key.isascii() and key.isprintable()):
            fix = "copy the key again, in one line"
            raise ConfigError.of(
                name, "has a character that no key has", fix, subject="key"
            )
        if key:
            headers["Authorization"] = f"Bearer {key}"
        if user := _read_url(url).userinfo:
            headers["Authorization"] = (
                f"Basic {b64encode(unquote_to_bytes(user)).decode()}"
            )
        for name, _, value in (text.partition("=") for text in self.header):
            headers[name.strip()] = value.strip()
        return headers


def _read_url(text: str) -> httpx.URL:
    """An address as people write it; raises :class:`ConfigError`."""
    url = httpx.URL()
    fix = "give it as http://HOST:PORT"
    clean = text.strip().strip("\"'<>")
    with suppress(httpx.InvalidURL):
        url = httpx.URL(clean if "://" in clean else f"http://{clean}")
    # httpx accepts host names that are invalid, for which sockets raise UnicodeError: a label of a
    # name has 1 to 63 letters.
    name = r"([\w-]{1,63}\.)*[\w-]{1,63}\.?"
    address = r"[\da-f.]*:[\da-f:.]*(%\w+)?"
    valid = re.fullmatch(f"{name}|{address}", url.host) is not None
    valid = valid and url.scheme in ("http", "https")
    if not valid or not (url.port is None or 0 < url.port < 1 << 16):
        fix += ", IPv6 in brackets" if clean.count(":") > 2 else ""
        where = re.sub("//[^/]*@", "//", text)
        raise ConfigError.of(
            where, "is not the address of a server", fix, subject="server"
        )
    return url


def server_address(text: str) -> str:
    """The root of a server: without ``/v1`` and what follows it, user and password.

    Raises :class:`ConfigError` for what is no address.
    """
    url = _read_url(text)
    path = re.sub("/v1$", "", _api_path(url))
    return str(
        url.copy_with(path=path, query=None, fragment=None, userinfo=b"")
    ).rstrip("/")


def api_address(text: str) -> str:
    """Where the paths of an OpenAI-compatible API begin: ``/v1``, unless another path is given."""
    path = _api_path(_read_url(text))
    return server_address(text) + ("/v1" if path.endswith("/v1") or not path else "")


def _api_path(url: httpx.URL) -> str:
    path = re.sub("/+", "/", url.path)
    path = re.sub("(/chat/completions|/completions|/models)?/?$", "", path)
    return re.sub("(/v1)+$", "/v1", path)


@cache
def _trust(ca_file: Path | None, insecure: bool) -> ssl.SSLContext:
    """Load the certificates that servers are checked by; cached, because this takes 60 ms."""
    context = ssl.create_default_context()
    if not context.cert_store_stats()["x509_ca"]:
        context = (
            httpx.create_ssl_context()
        )  # a system without certificates: those of certifi
    if ca_file is not None:
        context.load_verify_locations(ca_file)
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        print(
            "--insecure: certificates are not checked, so whoever is between can read key and data",
            file=sys.stderr,
        )
    return context


def make_client(
    kind: type[_Client], url: str, connection: Connection, **settings: Any
) -> _Client:
    """An httpx client for the server at an address, through the proxies of the environment.

    ``settings`` are httpx's. Raises :class:`ConfigError` for a proxy that cannot be used.
    """
    headers = connection.headers(url)
    headers.update(settings.pop("headers", {}))
    trust = _trust(connection.ca_file, connection.insecure)
    settings = {"timeout": _TIMEOUT, "limits": _LIMITS, **settings}
    try:
        return kind(verify=trust, headers=headers, **settings)
    except (ImportError, ValueError, httpx.InvalidURL) as error:
        fix = "correct or unset it"
        if isinstance(error, ImportError):
            fix = 'pip install "httpx[socks]", or unset it'
        what = f"is no proxy that can be used ({str(error).partition('.')[0]})"
        raise ConfigError.of(
            ", ".join(proxy_variables()), what, fix, subject="proxy"
        ) from None


def proxy_variables() -> list[str]:
    """Environment variables that name a proxy."""
    names = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
    return [name for name in os.environ if name.upper() in names and os.environ[name]]


def read_json(response: httpx.Response) -> object:
    """The JSON of a response's body; None for what is no JSON."""
    try:
        content: object = response.json()
    except (ValueError, RecursionError):
        return None
    return content


def find_address(tried: str) -> str | None:
    """The address of an API near ``tried``, where there is none; None if no place has one.

    It is tried without the last parts of its path, with the other scheme, and at vLLM's port. Key
    and headers are not sent, because these places may belong to somebody else.
    """
    base = httpx.URL(tried)
    parts = base.path.removesuffix("/v1").split("/")
    places = [
        base.copy_with(scheme=scheme, path="/".join([*parts[:length], "v1"]))
        for scheme in (base.scheme, "http" if base.scheme == "https" else "https")
        for length in range(len(parts), 0, -1)
    ]
    if base.port is None:
        places.append(base.copy_with(scheme="http", port=_PORT, path="/v1"))
    with httpx.Client(verify=False, timeout=_GUESS_TIMEOUT) as client:
        for url in (url for url in places if url != base):
            with suppress(httpx.HTTPError, httpx.InvalidURL):
                response = client.get(f"{url}/models")
                content = read_json(response)
                is_api = isinstance(content, dict) and {"data", "error"} & {*content}
                # The OpenAI format, also of an error.
                if is_api and response.status_code != 404:
                    return str(url)
    return None
