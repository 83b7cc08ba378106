"""Reasons why a checkpoint cannot be read: files are missing, or the Hub cannot be asked."""

from __future__ import annotations

import re

from vllm_autoprune.errors import Problem

HUB_MISSING = "hub"
"""Kind of the problem that the Hub cannot be asked, so nothing is known of the checkpoint."""


def explain_unread(where: str, error: Exception, what: str, fix: str) -> Problem:
    """Make the problem for an ``error`` of reading a checkpoint.

    It has ``what`` and ``fix``, unless the error says that the Hub could not be asked.
    """
    from huggingface_hub import constants

    if not _is_hub_missing(error):
        return Problem(where, f"{what} ({describe_error(error)})", fix)
    reason = "cannot be reached"
    way = "try again where it can"
    if constants.HF_HUB_OFFLINE:
        reason = "is not asked (HF_HUB_OFFLINE is set)"
        way = "unset it"
    what = (
        f"is neither a folder nor in the Hub's cache, and the Hugging Face Hub {reason}"
    )
    return Problem(where, what, f"{way}, or give a folder", HUB_MISSING)


def _is_hub_missing(error: BaseException | None) -> bool:
    """Whether the error, or one that it wraps, says that the Hub could not be asked."""
    from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

    while error is not None:
        if isinstance(error, (LocalEntryNotFoundError, OfflineModeIsEnabled)):
            return True
        error = error.__cause__ or error.__context__
    return False


def describe_error(error: Exception) -> str:
    """First sentence of the message; messages of transformers go on with advice."""
    return re.split(r"[.:!?]?\s*\n|[.!?]\s", str(error).strip())[0][:150].rstrip(".")
