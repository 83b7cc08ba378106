"""`openevolve`: the package OpenEvolve evolves the JSON text of states, by diffs.

OpenEvolve selects parents and inspirations (`ProgramDatabase`, MAP-Elites), writes the prompt
(`PromptSampler`) and applies the changes of a reply. Its controller is not used, because it keeps
replies and scores outside the ledger. The database is rebuilt from the history every round, so it
needs no storage of its own.

The fitness of a state is exp(objective), the geometric mean of the ratio between pruned and
unpruned answer probability, because OpenEvolve needs positive fitness. States that failed have 0.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import random
from functools import partial
from typing import TYPE_CHECKING

from offline_search.candidates import Draft, minimal_state
from offline_search.components import compact_json
from offline_search.history import History
from offline_search.prompt import Messages
from offline_search.proposer import ProposalRequest
from offline_search.settings import Settings
from offline_search.strategies.language_model import Round, Strategy
from offline_search.task import describe_task
from vllm_autoprune.errors import ConfigError
from vllm_autoprune.tpdsl.state import PruningState

if TYPE_CHECKING:
    from openevolve.database import Program, ProgramDatabase

_TOP_STATES = 3
_INSPIRATIONS = 2
"""Number of states shown beside the parent; it is low, so that a prompt fits a small model."""


class _OpenEvolve(Strategy, name="openevolve"):
    """Proposes changes of a minimal state in the first round, and changes of parents after it."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        try:
            import openevolve.database  # noqa: F401
        except ImportError:
            fix = 'from a checkout: pip install ".[search,search-openevolve]"'
            raise ConfigError.of(
                "openevolve", "is not installed", fix, subject="search"
            ) from None
        # It logs every replacement of a program by a better one.
        logging.getLogger("openevolve").setLevel(logging.ERROR)

    async def propose(self, current: Round) -> list[Draft]:
        """Request changes concurrently; parents are from one database of all earlier rounds."""
        drafts = list[Draft]()
        number = current.number
        if number == 1:
            drafts = [Draft("initial", minimal_state(self._settings))]
        # OpenEvolve uses the global random generator.
        generator = random.getstate()
        random.seed(current.rng.getrandbits(64))
        try:
            database = self._build_database(current.history)
            # Candidates are assigned to the islands in turn, over all rounds.
            start = (number - 1) * self._settings.per_round
            islands = len(database.islands)
            requests = []
            for index in range(len(drafts), current.count):
                messages, parent = self._build_prompt(
                    database, number, (start + index) % islands
                )
                change = partial(_apply_change, parent.code)
                requests.append(
                    ProposalRequest(
                        number,
                        index,
                        messages,
                        "openevolve",
                        (parent.id,),
                        change=change,
                    )
                )
        finally:
            random.setstate(generator)
        return [*drafts, *await current.request(requests)]

    def _build_database(self, history: History) -> ProgramDatabase:
        """Database of all states so far in order; before any is measured, of the minimal state.

        A child is added to the island that it was sampled for, as in OpenEvolve's controller.
        """
        from openevolve.config import DatabaseConfig
        from openevolve.database import ProgramDatabase

        # No seed, because it would be the same in every round; the caller seeds the global one.
        database = ProgramDatabase(DatabaseConfig(random_seed=None))
        for number, trial in enumerate(history.trials):
            if trial.state is not None:
                objective = history.objective_of(trial.name)
                fitness = 0.0
                if objective is not None:
                    fitness = math.exp(min(objective, 0.0)) + max(objective, 0.0)
                program = self._as_program(
                    trial.name, trial.state, fitness, trial.result.reason
                )
                program.parent_id = next(iter(trial.proposal.parents), None)
                program.iteration_found = trial.proposal.round
                island = number % len(database.islands)
                database.add(program, iteration=number, target_island=island)
                database.increment_island_generation(island)
                if database.should_migrate():
                    database.migrate_programs()
        if not history.trials:
            initial = self._as_program("1.0", minimal_state(self._settings), 0.0, "")
            database.add(initial, iteration=0, target_island=0)
        return database

    def _as_program(
        self, name: str, state: PruningState, fitness: float, failure: str
    ) -> Program:
        """A state in OpenEvolve's form, with a constant timestamp so that runs are repeatable."""
        from openevolve.database import Program

        return Program(
            id=_StableHashString(name),
            code=json.dumps(compact_json(state, bool(self._settings.bases)), indent=1),
            language="json",
            timestamp=0.0,
            metrics={"combined_score": round(fitness, 4)},
            metadata={"failure": {"failure": failure}} if failure else {},
        )

    def _build_prompt(
        self, database: ProgramDatabase, number: int, island: int
    ) -> tuple[Messages, Program]:
        """The prompt for one change, and its parent."""
        from openevolve.config import PromptConfig
        from openevolve.prompt.sampler import PromptSampler

        parent, inspirations = database.sample_from_island(island, _INSPIRATIONS)
        best = database.get_top_programs(_TOP_STATES, island_idx=island)
        top = [program.to_dict() for program in best]
        config = PromptConfig(
            system_message=f"{describe_task(self._settings)}\n\nYou improve the text of such an "
            "object, which is the program.",
            num_top_programs=_TOP_STATES,
            num_diverse_programs=0,
        )
        prompt = PromptSampler(config).build_prompt(
            current_program=parent.code,
            parent_program=parent.code,
            program_metrics=parent.metrics,
            previous_programs=top,
            top_programs=top,
            inspirations=[program.to_dict() for program in inspirations],
            language="json",
            evolution_round=number,
            diff_based_evolution=True,
            program_artifacts=parent.metadata.get("failure"),
            feature_dimensions=database.config.feature_dimensions,
        )
        messages: Messages = (
            {"role": "system", "content": prompt["system"]},
            {"role": "user", "content": prompt["user"]},
        )
        return messages, parent


class _StableHashString(str):
    """A string with the same hash in every process.

    OpenEvolve draws names from sets, in an order that depends on their hashes.
    """

    def __hash__(self) -> int:
        return int.from_bytes(hashlib.sha256(self.encode()).digest()[:7], "big")


def _apply_change(parent: str, reply: str) -> str:
    """Apply the changes in ``reply`` to ``parent``; raises :class:`ValueError` if there are none.

    A reply that does not change the parent is refused, as by OpenEvolve.
    """
    from openevolve.config import Config
    from openevolve.utils.code_utils import apply_diff_blocks, extract_diffs

    blocks = extract_diffs(reply, Config().diff_pattern)
    if not blocks:
        raise ValueError("the reply has no SEARCH/REPLACE block")
    text, applied = apply_diff_blocks(parent, blocks)
    if not applied:
        raise ValueError(f"none of {len(blocks)} SEARCH blocks is part of the object")
    if text == parent:
        raise ValueError("the reply does not change the object")
    return str(text)
