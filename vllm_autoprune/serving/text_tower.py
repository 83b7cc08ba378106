"""Description of a CLIP text tower: path, sign of its relevance, sizes. Loads no weights."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_autoprune.errors import ConfigError, Problem

TOWER_FLAG = "--autoprune-text-tower"

SIGN_KEY = "autoprune_relevance_sign"
"""Key of a CLIP ``config.json`` that states the direction; +1 or -1."""


@dataclass(frozen=True, slots=True)
class TextTower:
    """CLIP checkpoint used for relevance; ``vocabulary`` defaults to that of OpenAI's CLIP."""

    path: str
    sign: int
    reason: str
    segment: int
    width: int
    vision_width: int
    vocabulary: int = 49408


def read_text_tower(path: str) -> TextTower:
    """Read a CLIP checkpoint's description; raises ConfigError with what is wrong.

    The sign is -1 where the description says nothing: that is how OpenAI's CLIP behaves on the
    patches LLaVA uses (base policy specification of CDPruner, and its authors' own remark).
    """
    from transformers import AutoConfig, AutoTokenizer, CLIPConfig

    any_fix = "give a folder with a CLIP checkpoint (config, weights, tokenizer) or its Hub id"

    def refuse(what: str, fix: str = any_fix) -> ConfigError:
        return ConfigError("text tower", [Problem(f"{TOWER_FLAG} {path}", what, fix)])

    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise refuse(f"cannot be read ({str(error).splitlines()[0]})") from None
    if not isinstance(config, CLIPConfig):
        raise refuse(
            f"is a {config.model_type!r} model", "give a CLIP model with both towers"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise refuse(f"has no tokenizer ({str(error).splitlines()[0]})") from None
    text = config.text_config
    ids = set(tokenizer.get_vocab().values())
    # If the files are missing, transformers creates a tokenizer without words.
    if ids <= set(tokenizer.all_special_ids):
        raise refuse("has no tokenizer (only start and end tokens were found)")
    if max(ids) >= text.vocab_size:
        known = f"its text tower knows {text.vocab_size} tokens"
        fix = "give the tokenizer that belongs to the checkpoint"
        raise refuse(f"its tokenizer makes token {max(ids)}, but {known}", fix)
    sign = config.to_dict().get(SIGN_KEY)
    reason = f"its config states {SIGN_KEY}"
    if sign is None:
        sign = -1
        reason = "its config states no direction and OpenAI's CLIP is inverted on these patches"
    elif isinstance(sign, bool) or sign not in (1, -1):
        raise refuse(f"states {SIGN_KEY} = {sign!r}", "write 1 or -1")
    return TextTower(
        path=path,
        sign=int(sign),
        reason=reason,
        segment=text.max_position_embeddings,
        width=config.projection_dim,
        vision_width=config.vision_config.hidden_size,
        vocabulary=text.vocab_size,
    )
