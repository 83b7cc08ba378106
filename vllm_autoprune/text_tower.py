"""Description of a CLIP text tower, without its weights: path, sign of relevance, sizes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from vllm_autoprune.errors import ConfigError
from vllm_autoprune.hub import explain_unread

TOWER_FLAG = "--autoprune-text-tower"

SIGN_KEY = "autoprune_relevance_sign"
"""Key in a CLIP ``config.json`` of the sign of relevance, +1 or -1."""


@dataclass(frozen=True, slots=True)
class TextTower:
    """CLIP checkpoint whose text tower measures relevance."""

    path: str
    """Folder or Hub id."""
    sign: int
    """+1 where relevant patches are similar to the text, -1 where they are least similar."""
    reason: str
    """Where the sign comes from."""
    segment: int
    """Maximum number of token ids that the tower encodes at once."""
    width: int
    """Width of the space in which texts and patches are compared."""
    vision_width: int
    """Width of the vision tower beside it."""
    vocabulary: int = 49408
    """Number of token embeddings; the default is that of OpenAI's CLIP."""


def read_text_tower(path: str) -> TextTower:
    """Read the description of a CLIP checkpoint; raises :class:`ConfigError` if it is not valid.

    The sign is -1 if the config states none, because OpenAI's CLIP gives relevant patches the
    smaller cosine on the features that LLaVA reads (CDPruner, appendix and code).
    """
    from transformers import AutoConfig, AutoTokenizer, CLIPConfig

    fix = "give a folder with a CLIP checkpoint (config, weights, tokenizer) or its Hub id"
    tower_error = partial(ConfigError.of, f"{TOWER_FLAG} {path}", subject="text tower")

    def load(loader: Any, problem: str) -> Any:
        try:
            return loader.from_pretrained(path)
        except (OSError, ValueError) as error:
            where = f"{TOWER_FLAG} {path}"
            unread = explain_unread(where, error, problem, fix)
            raise ConfigError("text tower", [unread]) from None

    config = load(AutoConfig, "cannot be read")
    if not isinstance(config, CLIPConfig):
        what = f"is a {config.model_type!r} model"
        raise tower_error(what, "give a CLIP model with both towers")
    tokenizer = load(AutoTokenizer, "has no tokenizer")
    text = config.text_config
    ids = set(tokenizer.get_vocab().values())
    # If the files are missing, transformers creates a tokenizer with special tokens only.
    if ids <= set(tokenizer.all_special_ids):
        what = "has no tokenizer (only start and end tokens were found)"
        raise tower_error(what, fix)
    if max(ids) >= text.vocab_size:
        what = f"its tokenizer makes token {max(ids)}, but its text tower knows "
        what += f"{text.vocab_size} tokens"
        raise tower_error(what, "give the tokenizer that belongs to the checkpoint")
    sign = config.to_dict().get(SIGN_KEY)
    reason = f"its config states {SIGN_KEY}"
    if sign is None:
        sign = -1
        reason = "its config states no direction and OpenAI's CLIP is inverted on these patches"
    elif isinstance(sign, bool) or sign not in (1, -1):
        raise tower_error(f"states {SIGN_KEY} = {sign!r}", "write 1 or -1")
    return TextTower(
        path=path,
        sign=int(sign),
        reason=reason,
        segment=text.max_position_embeddings,
        width=config.projection_dim,
        vision_width=config.vision_config.hidden_size,
        vocabulary=text.vocab_size,
    )
