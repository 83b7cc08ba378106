"""The exception tree of the project.

AutopruneError
├── StateError               a state cannot be read or is not valid
├── BudgetError              a budget K is not allowed by the state, the flag or the request
├── RequestError             a request's pruning fields are not valid
├── ConfigError              flags or settings contradict each other
├── UnsupportedModelError    the plugin does not support the served architecture
├── SelectionError           input tensors do not fit the policy or each other
└── SearchError              an offline search cannot start or continue
    └── EvaluationFailed      a candidate or a case could not be measured
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """One validation error: where it is (JSON pointer or flag), what is wrong, and how to fix it.

    ``kind`` is a machine-readable category; for a state it names the rule that is broken.
    """

    where: str
    what: str
    fix: str
    kind: str = ""

    def __str__(self) -> str:
        # In one line, whatever a library's message contains.
        return " ".join(f"{self.where or '/'}: {self.what} -> {self.fix}".splitlines())


class AutopruneError(Exception):
    """Base class of every exception that this project raises."""


class ProblemsError(AutopruneError):
    """An error that lists all problems, not only the first; one line if there is one problem."""

    def __init__(self, subject: str, problems: Sequence[Problem]) -> None:
        self.subject = subject
        self.problems = tuple(problems)
        if len(self.problems) == 1:
            super().__init__(f"{subject}: {self.problems[0]}")
            return
        lines = [f"{subject}: {len(self.problems)} problems"]
        lines += [f"  - {problem}" for problem in self.problems]
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[type[ProblemsError], tuple[str, tuple[Problem, ...]]]:
        # By default only the rendered message would be pickled, as the only argument.
        return type(self), (self.subject, self.problems)


class StateError(ProblemsError, ValueError):
    """A state cannot be read or is not valid."""


class BudgetError(ProblemsError, ValueError):
    """A budget K is not allowed by the state, the flag or the request."""


class RequestError(ProblemsError, ValueError):
    """A request's pruning fields are not valid; the server answers with status 400."""


class ConfigError(ProblemsError):
    """Flags or settings contradict each other or the model.

    Not a ValueError, because pydantic would wrap it in a ValidationError of vLLM's configuration.
    """


class UnsupportedModelError(ProblemsError):
    """The plugin does not support the served architecture."""


class SelectionError(AutopruneError, ValueError):
    """Input tensors do not fit the policy or each other."""


class SearchError(AutopruneError):
    """An offline search cannot start or continue; its results so far are kept."""


class EvaluationFailed(SearchError):
    """A candidate or a case could not be measured, for the reason in the message."""
