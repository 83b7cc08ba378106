"""Description of a CLIP text tower: path, sign of its relevance, sizes. Loads no weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vllm_autoprune.errors import ConfigError, Problem

SIGN_KEY = "autoprune_relevance_sign"
"""Key of a CLIP ``config.json`` that states the direction; +1 or -1."""

FLAG = "--autoprune-text-tower"


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

    def refuse(what: str, fix: str) -> ConfigError:
        return ConfigError("text tower", [Problem(f"{FLAG} {path}", what, fix)])

    fix = "give a folder with a CLIP checkpoint (config, weights, tokenizer) or its Hub id"
    if Path(path).exists() and not (Path(path) / "config.json").is_file():
        raise refuse("holds no config.json", fix)
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise refuse(f"cannot be read ({str(error).splitlines()[0]})", fix) from None
    if not isinstance(config, CLIPConfig):
        raise refuse(f"is a {config.model_type!r} model", "give a CLIP model with both towers")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise refuse(f"has no tokenizer ({str(error).splitlines()[0]})", fix) from None
    known = set(tokenizer.get_vocab().values())
    # If the files are missing, transformers creates a tokenizer without words.
    if known <= set(tokenizer.all_special_ids):
        raise refuse("has no tokenizer (only start and end tokens were found)", fix)
    if max(known) >= config.text_config.vocab_size:
        size = config.text_config.vocab_size
        what = f"its tokenizer makes token {max(known)}, but its text tower knows {size} tokens"
        raise refuse(what, "give the tokenizer that belongs to the checkpoint")
    stated = config.to_dict().get(SIGN_KEY)
    if stated is not None and (isinstance(stated, bool) or stated not in (1, -1)):
        raise refuse(f"states {SIGN_KEY} = {stated!r}", "write 1 or -1")
    return TextTower(
        path=path,
        sign=-1 if stated is None else int(stated),
        reason=(
            "its config states no direction and OpenAI's CLIP is inverted on these patches"
            if stated is None
            else f"its config states {SIGN_KEY}"
        ),
        segment=config.text_config.max_position_embeddings,
        width=config.projection_dim,
        vision_width=config.vision_config.hidden_size,
        vocabulary=config.text_config.vocab_size,
    )
