"""Special texts: control characters, special tokens, truncation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from tests.hostile.attack import LARGE, Site, attack, server_errors
from tests.hostile.client import Reply
from tests.hostile.pictures import Picture

_MARK = "forged-line-of-a-log"
_CONTROL = ("\n", "\r", "\x1b[2J", "\0", "\u2028", "\u202e", "\x85")
SPECIAL = (
    *("<image>", "<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"),
    *("</s>", "<s>", "<pad>", "<|vision_start|><|image_pad|><|vision_end|>"),
)


@attack()
def control_characters(site: Site) -> Iterable[str]:
    """Control characters in keys and values must not be repeated in messages or the log."""
    picture, repeated = Picture(13, *LARGE), set[str]()
    for control in _CONTROL:
        text = f"a{control}{_MARK}"
        for kwargs in (
            {"autoprune": {text: 8}},
            {"autoprune": {"state": text}},
            {"autoprune": {"state": {text: 1}}},
            {"autoprune": {"state": {"scoring": {"fusion": {"atom": text}}}}},
            {"autoprune": {"keep": text}},
            {"autoprune": {"budget": {text: 1}}},
            {text: 1, "autoprune": {}},
        ):
            reply = site.ask(picture, mm_processor_kwargs=kwargs)
            yield from server_errors(reply)
            if reply.status == 200:
                yield f"{kwargs} is served"
            # Only for the plugin's own entry; other keys are refused by vLLM's messages.
            if len(kwargs) == 1 and f"{control}{_MARK}" in reply.message:
                repeated.add(control)
    if repeated:
        yield f"{sorted(repeated)} are repeated in messages as they are"
    for line in site.client.server.logged().splitlines():
        if line.startswith(_MARK):
            yield "a client writes a line of the log"
            break


@attack()
def special_tokens(site: Site) -> Iterable[str]:
    """Special tokens in user text: no error that stock vLLM does not give."""
    picture, stock = Picture(14, *LARGE), site.open_stock()
    for text in SPECIAL:
        for words in (f"{text} {site.words}", f"{site.words} {text} {text}"):
            for pictures in ((picture,), ()):
                yield from no_worse(
                    f"{text!r} with {len(pictures)} images",
                    site.client.chat(words, *pictures),
                    partial(stock.chat, words, *pictures),
                )


@attack()
def truncated_prompts(site: Site) -> Iterable[str]:
    """Prompts cut by ``truncate_prompt_tokens``, also within an image: no new errors."""
    picture = Picture(15, *LARGE)
    pruned, unpruned = (
        [
            client.chat(site.words, picture, truncate_prompt_tokens=count, truncation_side=side)
            for count in (1, 2, 5, 20, 33, 200, 300, 2000, -1, 2**62)
            for side in ("left", "right")
        ]
        for client in (site.client, site.open_stock())
    )
    # Single replies are not comparable: other prompts fit, and vLLM 0.32 answers 500 for an image
    # of a previously refused prompt.
    errors, stock = ([r for r in replies if r.status >= 500] for replies in (pruned, unpruned))
    site.note(f"server errors: {len(errors)}, on stock {len(stock)}")
    if len(errors) > len(stock):
        yield f"{len(errors)} server errors, and {len(stock)} on stock; the last is {errors[-1]}"


def no_worse(name: str, reply: Reply, ask_stock: Callable[[], Reply]) -> Iterable[str]:
    """A problem for a server error that stock vLLM does not give."""
    if reply.status < 500 and reply.status != 0:
        return
    same = ask_stock()
    if same.status < 500:
        yield f"{name}: {reply}, and stock answers {same.status}"
