"""Parts of chat messages in the forms of OpenAI, its Responses API, Anthropic and Qwen."""

from __future__ import annotations

from vllm_autoprune.errors import ConfigError
from vllm_autoprune.evaluation.data_sets.registry import Record
from vllm_autoprune.evaluation.pictures import PictureSource
from vllm_autoprune.stream import one_line


def read_part(record: Record, part: object) -> dict[str, str] | PictureSource:
    """A message's ``part`` as a text part or a picture; raises :class:`ConfigError` otherwise."""
    match part:
        case str(text) | {
            "type": "text" | "input_text" | "output_text",
            "text": str(text),
        }:
            return {"type": "text", "text": text}
        case (
            {"image_url": {"url": str(address)} | str(address)}
            | {"video_url": {"url": str(address)} | str(address)}
            | {"type": "image", "source": {"type": "url", "url": str(address)}}
            | {"type": "image", "url": str(address)}
            | {"type": "image", "path": str(address)}
            | {"image": str(address)}
            | {"video": str(address)}
        ):
            return record.file.find(record.where, address)
        case {
            "type": "image",
            "source": {"type": "base64", "media_type": str(kind), "data": str(data)},
        }:
            return record.file.find(record.where, f"data:{kind};base64,{data}")
        case {"text": str(text), **others} if not others:
            return {"type": "text", "text": text}
    name = part.get("type") if isinstance(part, dict) else part
    what = f"has a part of type {one_line(name, 40)!r}"
    fix = "give text and pictures as OpenAI's, Anthropic's or Qwen's API takes them"
    raise ConfigError.of(record.where, what, fix, subject="data")
