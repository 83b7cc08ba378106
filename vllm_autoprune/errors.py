"""The exceptions of the project, all in one tree.

Knows nothing about states, tensors or servers: it only gives failures a shape.

    AutopruneError
    ├── StateError               a state cannot be read, or says something that is not allowed
    ├── BudgetError              a budget that the state, the flag or the request cannot have
    ├── RequestError             a request says something about pruning that is not understood
    ├── ConfigError              flags or settings that do not fit together
    ├── UnsupportedModelError    the served architecture has no plugin form
    ├── SelectionError           tensors that do not fit the policy they are given to
    └── SearchError              an offline search that cannot start or go on
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong: where (JSON pointer or flag), what, and the way to mend it.

    ``kind`` is for programs, not for people: problems of a state name the rule that it breaks.
    """

    where: str
    what: str
    mend: str
    kind: str = ""

    def __str__(self) -> str:
        return f"{self.where or '/'}: {self.what} -> {self.mend}"


class AutopruneError(Exception):
    """Base of every error this project raises on purpose."""


class ProblemsError(AutopruneError):
    """An error that lists every problem found, not only the first."""

    def __init__(self, subject: str, problems: Sequence[Problem]) -> None:
        self.subject = subject
        self.problems = tuple(problems)
        lines = [f"{subject}: {len(self.problems)} problem(s)"]
        lines += [f"  - {problem}" for problem in self.problems]
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[type[ProblemsError], tuple[str, tuple[Problem, ...]]]:
        # The default would pickle the rendered message as the only argument.
        return type(self), (self.subject, self.problems)


class StateError(ProblemsError, ValueError):
    """A state cannot be read or is not valid."""


class BudgetError(ProblemsError, ValueError):
    """A budget K that the state, the flag or the request cannot have."""


class RequestError(ProblemsError, ValueError):
    """A request says something about pruning that is not understood; servers answer 400."""


class ConfigError(ProblemsError):
    """Flags or settings that do not fit together, or do not fit the model.

    Not a ValueError: pydantic would bury it in a validation error of vLLM's own.
    """


class UnsupportedModelError(ProblemsError):
    """The served model has no form in this plugin."""


class SelectionError(AutopruneError, ValueError):
    """Tensors handed to a policy do not fit it or each other."""


class SearchError(AutopruneError):
    """An offline search that cannot start or go on; what it has done so far is kept."""
