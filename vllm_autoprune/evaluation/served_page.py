"""What a server tells of its own state on ``GET /v1/autoprune``, and the cases that evaluate it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from pydantic import BaseModel, ValidationError

from vllm_autoprune.errors import ConfigError
from vllm_autoprune.evaluation.cases import build_cases
from vllm_autoprune.evaluation.journal import Case
from vllm_autoprune.http_client import FAILURES, ServerClient
from vllm_autoprune.tpdsl.loading import load_state, shipped_states

ALLOW = "start it with --autoprune-state NAME --autoprune-requests states"
SHOW_PAGE = "start it with VLLM_PLUGINS=autoprune,autoprune_endpoint"

OWN = Case(name="the server's own state", arm="found", label="served", named=1)
"""Stands for the server's own state where no server is asked."""


class _Budget(BaseModel):
    k: int | str = 0


class _Evidence(BaseModel):
    chosen_by: str = ""


class ServedPage(BaseModel):
    """The fields that are read of ``/v1/autoprune``; the defaults if a server has no such page."""

    state: str | None = ""
    digest: str = ""
    budget: _Budget = _Budget()
    evidence: _Evidence = _Evidence()
    requests: str = ""
    allows: dict[str, object] = {}

    @classmethod
    def read(cls, client: ServerClient) -> ServedPage:
        """Read the page; raises :class:`ConfigError` if the server serves no state."""
        page = cls()
        with contextlib.suppress(*FAILURES, ValidationError):
            # A server without the plugin may have another page at this address.
            page = cls.model_validate(client.read_served())
        if page.state is None:
            raise ConfigError.of(client.url, "serves no state", ALLOW, subject="eval")
        return page

    def find_own_case(self, cases: Sequence[Case]) -> Case | None:
        """The server's own state as a refused case; None if one of ``cases`` has this state."""
        if not self.state or self.digest in {case.digest for case in cases}:
            return None
        # For videos, a case adds rules for frames to a state for pictures, which changes the
        # digest; the state is recognised by its name.
        about_videos = any(case.frames for case in cases)
        if about_videos and self.state in {case.label for case in cases}:
            return None
        return Case(
            name=f"served {self.digest[:12]}",
            arm="found",
            label=self.state,
            digest=self.digest,
            refused=f"was not asked -> name it with --state {self.state}, or its file",
            served=True,
        )

    def build_own_cases(
        self,
        url: str,
        budgets: Sequence[str] | None,
        cells: Sequence[str],
        frames: int,
    ) -> list[Case]:
        """The cases of :func:`build_cases` for the server's own state, by default at its budget.

        A state that does not ship is not compared with its base policy alone, because only the
        server has the state. Raises :class:`ConfigError` if the server does not name its state, or
        if cells or videos need the state itself.
        """
        if not self.state:
            what = f"is missing, and {url} does not say which state it serves"
            raise ConfigError.of(
                "--state", what, f"name one, or {SHOW_PAGE}", subject="eval"
            )
        own_budgets = budgets or ["1/4" if frames else str(self.budget.k)]
        if (
            self.state in shipped_states()
            and load_state(self.state).digest == self.digest
        ):
            return build_cases([self.state], own_budgets, cells, frames)
        if cells or frames:
            what = f"is missing, and {self.state}, which {url} serves, does not ship"
            raise ConfigError.of("--state", what, "name its file", subject="eval")
        cases = build_cases([], own_budgets)
        return cases + [
            Case(
                name=f"{self.state}@{control.budget}",
                arm="found",
                label=self.state,
                budget=control.budget,
                digest=self.digest,
                pruning={"budget": control.budget},
                named=1,
            )
            for control in cases
            if control.arm == "norm"
        ]
