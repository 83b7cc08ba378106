"""Ask a pruned server about an image at several budgets: python examples/client.py IMAGE QUESTION.

Without arguments it asks about scene.jpg. The server must allow it: vllm serve ...
--autoprune-requests budget.
"""

from __future__ import annotations

import argparse
import base64
import mimetypes
from collections.abc import Sequence
from pathlib import Path

from openai import OpenAI

_SCENE = Path(__file__).with_name("scene.jpg")
_QUESTION = "What digit is on the shape left of the purple square?"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print prompt tokens and answer at each budget, and without pruning."""
    parser = argparse.ArgumentParser(
        description="Ask a pruned server at several budgets."
    )
    parser.add_argument("image", type=Path, nargs="?", default=_SCENE)
    parser.add_argument("question", nargs="?", default=_QUESTION)
    parser.add_argument("--url", default="http://localhost:8000/v1")
    parser.add_argument("--budgets", nargs="+", default=["1/4", "1/8", "1/16"])
    options = parser.parse_args(arguments)

    client = OpenAI(base_url=options.url, api_key="-")
    model = client.models.list().data[0].id
    kind = mimetypes.guess_type(options.image.name)[0] or "image/png"
    data = base64.b64encode(options.image.read_bytes()).decode()
    for budget in (None, *options.budgets):
        fields: dict[str, object] = (
            {"enabled": False} if budget is None else {"budget": budget}
        )
        answer = client.chat.completions.create(
            model=model,
            messages=[
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "image_url",
                            "image_url": {"url": f"data:{kind};base64,{data}"},
                        },
                        {"type": "text", "text": options.question},
                    ],
                }
            ],
            max_tokens=64,
            extra_body={"mm_processor_kwargs": {"autoprune": fields}},
        )
        tokens = answer.usage.prompt_tokens if answer.usage else 0
        name = "all tokens" if budget is None else f"K = {budget}"
        print(
            f"{name:>12}: {tokens:5} prompt tokens: {answer.choices[0].message.content}"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
