"""Users who ask without a pause, and a tally of what they asked and what they were told.

Knows nothing about what is asked.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from random import Random
from urllib.parse import urlsplit

from benchmarks.soak.mix import Ask

PATH = "/v1/chat/completions"
PATIENCE = 300.0
"""Seconds that one answer may take."""

SHOWN = 20
"""Faults that are kept in words; all of them are counted."""


@dataclass
class Tally:
    """What a server should have counted, by what its client saw. Not for two threads at once."""

    sent: int = 0
    answered: int = 0
    refused: int = 0
    errors: int = 0
    images: Counter[str] = field(default_factory=Counter)
    requests: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    before: int = 0
    after: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0
    faults: list[str] = field(default_factory=list)

    def enter(self, ask: Ask, status: int, text: str) -> None:
        """Count one request and its answer."""
        self.sent += 1
        self.kinds[ask.kind] += 1
        if status != ask.status:
            self.errors += 1
            if len(self.faults) < SHOWN:
                self.faults.append(f"{ask.kind}: HTTP {status}, not {ask.status}: {text[:200]}")
        elif status != 200:
            self.refused += 1
        else:
            self._answered(ask, json.loads(text)["usage"])

    def _answered(self, ask: Ask, usage: dict[str, int]) -> None:
        self.answered += 1
        self.requests[ask.policy] += 1
        self.images[ask.keep] += ask.images
        self.before += ask.before
        self.after += ask.after
        self.prompt_tokens += usage["prompt_tokens"]
        self.answer_tokens += usage["completion_tokens"]


def keep_busy(
    url: str, draw: Callable[[Random], Ask], users: int, seconds: float, seed: int = 0
) -> Tally:
    """Ask for so long; every user waits for an answer and asks the next at once.

    What is running at the end is waited for, so that nothing is counted on one side alone.
    """
    tally, lock = Tally(), threading.Lock()
    end = time.monotonic() + seconds

    def user(number: int) -> None:
        random = Random(f"{seed}/{number}")
        while time.monotonic() < end:
            ask = draw(random)
            status, text = post(url, ask.body)
            with lock:
                tally.enter(ask, status, text)
            if status == 0:
                time.sleep(1.0)  # nobody is there: no use in asking a thousand times a second

    with ThreadPoolExecutor(users, thread_name_prefix="user") as pool:
        for done in [pool.submit(user, number) for number in range(users)]:
            done.result()
    return tally


def post(url: str, body: bytes) -> tuple[int, str]:
    """Status and text of the answer; 0 and the reason where there is none."""
    at = urlsplit(url)
    connection = http.client.HTTPConnection(at.hostname or "", at.port, timeout=PATIENCE)
    try:
        headers = {"Content-Type": "application/json", "Connection": "close"}
        connection.request("POST", PATH, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode("utf-8", "replace")
    except (OSError, http.client.HTTPException) as error:
        return 0, repr(error)
    finally:
        connection.close()
