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
from enum import StrEnum
from typing import ClassVar, Self


@dataclass(frozen=True, slots=True)
class Problem:
    """One error: where it is (JSON pointer, flag, file), what is wrong, and how to fix it.

    ``where`` is empty for a whole state, the root of its JSON pointers. ``kind`` is a category for
    programs, which do not parse the sentences; for a state it names the broken rule.
    """

    where: str
    what: str
    fix: str = ""
    kind: str = ""

    def __str__(self) -> str:
        text = f"{self.where or '/'}: {self.what}"
        if self.fix:
            text += f" -> {self.fix}"
        return " ".join(text.splitlines())  # messages of libraries may have line breaks


class Refusal(StrEnum):
    """Kinds of problems for which a server refuses requests, as clients read them.

    They are part of the API (docs/clients.md).
    """

    NOT_ALLOWED = "not_allowed"
    OUT_OF_RANGE = "out_of_range"
    UNKNOWN_STATE = "unknown_state"
    UNSUPPORTED = "unsupported"
    WHOLE_VIDEO = "whole_video"
    TOO_LONG = "too_long"


class AutopruneError(Exception):
    """Base class of every exception that this project raises; lists all problems.

    The message of a single problem is one line. ``subject`` names what the problems are about, and
    is empty if the problems tell it.
    """

    usual_subject: ClassVar[str] = ""
    """Subject of errors of the class if :meth:`of` gets none."""

    def __init__(self, subject: str, problems: Sequence[Problem]) -> None:
        if not problems:
            raise ValueError("an error has a problem")
        self.subject = subject
        self.problems = tuple(problems)
        title = f"{subject}: " if subject else ""
        if len(self.problems) == 1:
            super().__init__(f"{title}{self.problems[0]}")
            return
        lines = [f"{title}{len(self.problems)} problems"]
        lines += [f"  - {problem}" for problem in self.problems]
        super().__init__("\n".join(lines))

    @classmethod
    def of(
        cls,
        where: str,
        what: str,
        fix: str = "",
        *,
        kind: str = "",
        subject: str | None = None,
    ) -> Self:
        """Make an error with a single problem."""
        subject = cls.usual_subject if subject is None else subject
        return cls(subject, [Problem(where, what, fix, kind)])

    def __reduce__(self) -> tuple[type[Self], tuple[str, tuple[Problem, ...]]]:
        # By default an exception is pickled with its rendered message as the only argument.
        return type(self), (self.subject, self.problems)


class StateError(AutopruneError, ValueError):
    """A state cannot be read or is not valid."""


class BudgetError(AutopruneError, ValueError):
    """A budget K is not allowed by the state, the flag or the request."""


class RequestError(AutopruneError, ValueError):
    """A request's pruning fields are not valid; the server answers with status 400."""

    usual_subject = "request"


class ConfigError(AutopruneError):
    """Flags or settings contradict each other or the model.

    Not a ValueError, because pydantic would wrap it in a ValidationError of vLLM's configuration.
    """


class UnsupportedModelError(AutopruneError):
    """The plugin does not support the served architecture."""


class SelectionError(AutopruneError, ValueError):
    """Input tensors do not fit the policy or each other."""


class SearchError(AutopruneError):
    """An offline search cannot start or continue; its results so far are kept."""


class EvaluationFailed(SearchError):
    """A candidate or a case could not be measured, for the reason in the message."""

    @property
    def reason(self) -> str:
        """Text for journals and ledgers; for a single problem it leaves out ``where``."""
        if len(self.problems) > 1:
            return str(self)
        (problem,) = self.problems
        return f"{problem.what} -> {problem.fix}" if problem.fix else problem.what
