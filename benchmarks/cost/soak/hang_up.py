"""A client that closes its connection in the middle of a streamed answer."""

from __future__ import annotations

import http.client
import json
from contextlib import closing
from dataclasses import dataclass
from urllib.parse import urlsplit

from benchmarks.common.client import PATH

_DATA = b"data: "
_DONE = b"data: [DONE]"


@dataclass(frozen=True, slots=True)
class Killed:
    """Tokens of prompt and answer when the connection was closed, or why it never came to that."""

    prompt_tokens: int = 0
    answer_tokens: int = 0
    error: str = ""


def hang_up(url: str, body: bytes, events: int, timeout: float = 300.0) -> Killed:
    """Send a request for a stream that tells its usage with every event; close it after some."""
    parts = urlsplit(url)
    usage: dict[str, int] = {}
    try:
        with closing(http.client.HTTPConnection(parts.netloc, timeout=timeout)) as connection:
            headers = {"Content-Type": "application/json", "Connection": "close"}
            connection.request("POST", PATH, body, headers)
            answer = connection.getresponse()
            if answer.status != 200:
                text = answer.read(200).decode("utf-8", "replace")
                return Killed(error=f"HTTP {answer.status}, not 200: {text}")
            while events:
                line = answer.readline()
                if not line or line.startswith(_DONE):
                    return Killed(error="the answer ended before its client hung up")
                if line.startswith(_DATA):
                    usage = json.loads(line.removeprefix(_DATA))["usage"]
                    events -= 1
            answer.close()
    except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
        return Killed(error=repr(error))
    return Killed(usage["prompt_tokens"], usage["completion_tokens"])
