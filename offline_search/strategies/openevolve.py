"""`openevolve`: the package of that name evolves a program that returns the candidate.

Knows nothing about how programs are run. OpenEvolve's own parts choose the parent and those it is
shown with (`ProgramDatabase`, MAP-Elites), write the prompt (`PromptSampler`) and find
the program in a reply. Its controller stays out: that evaluates in worker processes without limits
(0.4.0, `EvaluatorConfig`: "resource limits not implemented"), and keeps replies and scores where no
ledger has them. The database is built anew from the history every round, so a search that is killed
loses nothing here either.

A program is scored by exp(objective), the share of the reference answer's probability that is left
(geometric mean): OpenEvolve weighs parents by scores above zero. One that returns nothing has 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import pprint
import random
from collections.abc import Iterator
from random import Random
from textwrap import indent
from typing import TYPE_CHECKING

from offline_search.history import History, Trial
from offline_search.prompt import Messages, language
from offline_search.proposal import Draft, alpha
from offline_search.settings import Settings
from offline_search.strategies.protocol import Round
from offline_search.strategies.starts import plain_state
from vllm_autoprune.errors import ConfigError, Problem

if TYPE_CHECKING:
    from openevolve.database import Program, ProgramDatabase

_BEST, _INSPIRATIONS = 3, 2
"""Programs shown beside the parent: a prompt has to fit a small model."""


class OpenEvolve:
    """The first round is one plain program; after it every slot is a rewrite of a parent."""

    asks = True
    races = False

    def __init__(self, settings: Settings) -> None:
        _require_openevolve()
        self._settings = settings

    async def propose(self, this: Round) -> list[Draft]:
        """All parents of a round come from the same database, as OpenEvolve's workers see it."""
        if this.number == 1:
            state = plain_state(self._settings)
            body = pprint.pformat(alpha(state), width=90, sort_dicts=False)
            returned = indent(body, " " * 11).strip()
            program = f"def policy(budget):\n    return {returned}\n"
            return [Draft("initial", state, program=program)]
        with _seeded(this.dice):
            database = self._database(this.history)
            asked = [self._prompt(database, this.number) for _ in range(this.count)]
        replies = (
            this.ask(index, messages, "openevolve", (parent,), code_in=_code_in)
            for index, (messages, parent) in enumerate(asked)
        )
        return list(await asyncio.gather(*replies))

    def _database(self, history: History) -> ProgramDatabase:
        """Everything that was tried, added in its order."""
        from openevolve.config import DatabaseConfig
        from openevolve.database import ProgramDatabase

        # One island: a search has fewer evaluations than several need to evolve apart. No seed:
        # the dice are the caller's, and OpenEvolve's own would be the same in every round.
        database = ProgramDatabase(DatabaseConfig(num_islands=1, random_seed=None))
        for number, trial in enumerate(history.trials):
            if trial.proposed.program:
                database.add(_program(trial, history), iteration=number)
        return database

    def _prompt(self, database: ProgramDatabase, number: int) -> tuple[Messages, str]:
        """What is asked for one slot, and the name of the parent."""
        from openevolve.config import PromptConfig
        from openevolve.prompt.sampler import PromptSampler

        parent, inspirations = database.sample_from_island(0, _INSPIRATIONS)
        best = [program.to_dict() for program in database.get_top_programs(_BEST, island_idx=0)]
        config = PromptConfig(
            system_message=_programming(self._settings),
            num_top_programs=_BEST,
            num_diverse_programs=0,
        )
        written = PromptSampler(config).build_prompt(
            current_program=parent.code,
            parent_program=parent.code,
            program_metrics=parent.metrics,
            previous_programs=best,
            top_programs=best,
            inspirations=[program.to_dict() for program in inspirations],
            evolution_round=number,
            diff_based_evolution=False,
            program_artifacts=parent.metadata.get("failure"),
            feature_dimensions=database.config.feature_dimensions,
        )
        messages: Messages = (
            {"role": "system", "content": written["system"]},
            {"role": "user", "content": written["user"]},
        )
        return messages, str(parent.id)


class _Name(str):
    """A name whose hash is the same in every process.

    OpenEvolve keeps names in sets and draws from them in the order of the set.
    """

    def __hash__(self) -> int:
        return int.from_bytes(hashlib.sha256(self.encode()).digest()[:7], "big")


def _program(trial: Trial, history: History) -> Program:
    """A trial as OpenEvolve keeps it; its clock stands still, or no two runs would be the same."""
    from openevolve.database import Program

    objective = history.objective_of(trial.name)
    score = 0.0 if objective is None else math.exp(min(objective, 0.0)) + max(objective, 0.0)
    reason = trial.tried.reason
    return Program(
        id=_Name(trial.name),
        code=trial.proposed.program,
        parent_id=trial.proposed.parents[0] if trial.proposed.parents else None,
        timestamp=0.0,
        iteration_found=trial.proposed.round,
        metrics={"combined_score": round(score, 4)},
        metadata={"failure": {"failure": reason}} if reason else {},
    )


def _code_in(reply: str) -> str:
    """The program in a reply, as OpenEvolve finds it; the whole reply where it finds none."""
    from openevolve.utils.code_utils import parse_full_rewrite

    return parse_full_rewrite(reply) or ""


def _programming(settings: Settings) -> str:
    """What is asked of whoever writes programs."""
    return (
        f"{language(settings)}\n\nYou improve a Python program: a function policy(budget) that "
        "returns such an object as a dict. It may compute and import math and random; it has no "
        "files and no network."
    )


@contextlib.contextmanager
def _seeded(dice: Random) -> Iterator[None]:
    """OpenEvolve draws from the module's own dice: these for a while, and then as they were."""
    before = random.getstate()
    random.seed(dice.getrandbits(64))
    try:
        yield
    finally:
        random.setstate(before)


def _require_openevolve() -> None:
    try:
        import openevolve.database  # noqa: F401

        # It tells of every parent that a better program has replaced.
        logging.getLogger("openevolve").setLevel(logging.ERROR)
    except ImportError:
        fix = 'pip install "vllm-autoprune[search,search-openevolve]"'
        raise ConfigError("search", [Problem("openevolve", "is not installed", fix)]) from None
