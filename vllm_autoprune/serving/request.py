"""What one request may say about pruning: the ``autoprune`` entry of its processor arguments.

Knows nothing about who is allowed to say it: vLLM asks for ``--trust-request-mm-kwargs``.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, ValidationError

from vllm_autoprune.errors import Problem, RequestError
from vllm_autoprune.serving.plan import Keep

REQUEST_KEY = "autoprune"
"""Our place within a request's ``mm_processor_kwargs``."""


class PruningRequest(BaseModel):
    """``{"budget": K}``, and for measuring ``{"keep": "reference"}`` or ``{"keep": "random"}``.

    ``instructions`` has one text an image; the renderer fills it from the chat messages, a
    request without messages may fill it itself.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    budget: int | None = None
    keep: Keep = "state"
    instructions: list[str] | None = None


def read_request(asked: object) -> PruningRequest:
    """The parsed entry; raises RequestError with every problem, which vLLM answers by 400."""
    if asked is None:
        return PruningRequest()
    try:
        return PruningRequest.model_validate(asked)
    except ValidationError as error:
        problems = [
            Problem(
                "/".join(["mm_processor_kwargs", REQUEST_KEY, *map(str, detail["loc"])]),
                detail["msg"],
                'give {"budget": K} with a whole number of tokens',
            )
            for detail in error.errors(include_url=False)
        ]
        raise RequestError("request", problems) from None
