"""What is said of a server that cannot be asked."""

from __future__ import annotations

import pytest

from vllm_autoprune.errors import ConfigError
from vllm_autoprune.evaluation.client import AnswerClient


@pytest.mark.parametrize("url", ["localhost:8000", "127.0.0.1:8000", "server"])
async def test_an_address_without_http_is_named(url: str) -> None:
    client = AnswerClient(url, 1)
    with pytest.raises(ConfigError, match="is not the address of a server -> give it as http://"):
        await client.select_model(None)
    await client.close()


async def test_a_server_that_is_not_running_is_to_be_started() -> None:
    client = AnswerClient("http://127.0.0.1:9", 1)
    with pytest.raises(ConfigError, match=r"does not answer .* -> start the server"):
        await client.select_model(None)
    await client.close()
