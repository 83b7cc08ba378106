"""`python -m benchmarks.accuracy.minillava`: accuracy of every policy of the paper on mini-LLaVA.

`vllm-autoprune eval` with its own questions, about scenes of the test split, and a server of its
own. The residual of the shipped state ``autoprune`` is applied to each base policy without tuning.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.server import ServerDied, command, serve
from benchmarks.yardsticks.examples import CHECKPOINTS, draw_examples, png_url, weights_digest
from vllm_autoprune.cli.commands.eval import add_run_arguments, run_suite
from vllm_autoprune.cli.output import CommandParser
from vllm_autoprune.errors import AutopruneError, ConfigError, Problem
from vllm_autoprune.evaluation.journal import MME, Contents, EvaluationError, Question
from vllm_autoprune.evaluation.questions import PreparedQuestion
from vllm_autoprune.evaluation.run import Progress, QuestionSuite, build_cases
from vllm_autoprune.http_client import MAX_IN_FLIGHT
from vllm_autoprune.tpdsl.loading import shipped_states

STATES = (
    "all", "minillava", "minillava-split",
    *(name for name in shipped_states() if name.startswith("ablation-")),
)  # fmt: skip
"""Every base policy, what searches found on this model, and the sweep of the exchange quota."""
BUDGETS = (64, 32, 16, 8, 4)

_FLAGS = (
    "--enforce-eager", "--max-model-len", "512", "--block-size", "32",
    "--autoprune-state", "cdpruner", "--autoprune-requests", "states",
)  # fmt: skip

_START_TIMEOUT = 1200.0
"""Seconds; a start takes ten on an idle machine, but many minutes on a busy one."""


def prepare_questions(scenes: int) -> list[PreparedQuestion]:
    """The questions about the first scenes of the test split; pairs are scored as in MME."""
    questions, urls = [], dict[int, str]()
    for number, example in enumerate(draw_examples("test", scenes)):
        urls.setdefault(example.image_id, png_url(example.image))
        paired = example.pair is not None
        record = Question(
            id=str(number),
            benchmark=MME if paired else example.kind,
            image=str(example.image_id),
            category=example.kind if paired else "",
            pair=str(example.pair) if paired else "",
        )
        image = urls[example.image_id]
        questions.append(PreparedQuestion(record, example.question, example.answer, image))
    return questions


class _MiniLlavaSuite(QuestionSuite):
    """A suite that starts a server where it has no address; the checkpoint and the log are its."""

    checkpoint: Path
    log: Path
    tokens: int
    """N, the number of visual tokens of an image."""

    @property
    def _flags(self) -> Sequence[str]:
        return (*_FLAGS, "--autoprune-text-tower", str(self.checkpoint / "clip"))

    def plan(self) -> Sequence[str]:
        """The address of the server, or the command line that starts one; then what is asked."""
        server, requests = super().plan()
        started = " ".join(command(self.checkpoint / "llava", 8000, self._flags))
        return [server if self.url else started, requests]

    @contextlib.contextmanager
    def open_server(self, progress: Progress) -> Iterator[str]:
        """The server of the settings, or one that runs while the context is open."""
        if self.url:
            yield self.url
            return
        progress.write("starting vllm serve with mini-LLaVA ...")
        model = self.checkpoint / "llava"
        try:
            with serve(model, *self._flags, log=self.log, patience=_START_TIMEOUT) as server:
                yield server.url
        except ServerDied as error:
            raise EvaluationError(f"{error} -> fix that and add --resume") from None

    def objections(self, contents: Contents) -> Iterator[str]:
        """Prompt lengths that do not match K, which shows that a case was not served as asked."""
        for case in self.cases:
            removed = self.tokens - case.budget
            for pruned, unpruned in contents.prompt_lengths(case):
                if pruned != unpruned - removed:
                    yield (
                        f"{case.name}: a prompt has {pruned} tokens instead of {unpruned} - "
                        f"{removed}: the case was not served as asked"
                    )
                    break


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0 for a valid report, 1 for one that is not or that cannot be made."""
    parser = CommandParser(
        prog="python -m benchmarks.accuracy.minillava",
        description="Measure accuracy of every base policy, residual and ablation on mini-LLaVA.",
    )
    add, out = parser.add_argument, Path("out/eval/minillava")
    add("--out", type=Path, default=out, metavar="FOLDER", help="folder for the results")
    add("--json", action="store_true", help="print the report as JSON")
    add_run_arguments(parser)
    text = "folder with llava/ and clip/; default: the embedded model"
    add("--model", type=Path, default=CHECKPOINTS["minillava"], metavar="FOLDER", help=text)
    # Half an hour of requests on two cores, where all states are measured.
    add("--scenes", type=int, default=15, help="scenes of the test split")
    add("--budgets", type=int, nargs="+", default=BUDGETS, metavar="K", help="each K")
    text = "as of `vllm-autoprune eval`; default: all of them"
    add("--state", nargs="+", default=STATES, metavar="STATE", help=text)
    text = "a running server with --autoprune-requests states; default: one is started"
    add("--server-url", default="", metavar="URL", help=text)
    options = parser.parse_args(arguments)
    folder: Path = options.model
    try:
        for part in ("llava/config.json", "clip/config.json"):
            if not (folder / part).is_file():
                problem = Problem(f"--model {folder}", f"has no {part}", "name another")
                raise ConfigError("eval", [problem])
        tokens = int(json.loads((folder / "llava/config.json").read_text())["image_seq_length"])
        if max(options.budgets) >= tokens:
            what, fix = f"is not below {tokens}", "an image has as many tokens"
            raise ConfigError("eval", [Problem(f"--budgets {max(options.budgets)}", what, fix)])
        name = "embedded" if folder == CHECKPOINTS["minillava"] else folder.name
        suite = _MiniLlavaSuite(
            prepare_questions(options.scenes),
            build_cases(options.state, options.budgets),
            url=options.server_url,
            served_name=options.served_name,
            max_in_flight=options.concurrency or MAX_IN_FLIGHT,
            suite="minillava",
            model=f"mini-LLaVA {name}, weights {weights_digest(folder)}",
            data=f"test split, {options.scenes} scenes",
        )
        suite.checkpoint, suite.log, suite.tokens = folder, options.out / "server.log", tokens
        return run_suite(suite, options.out, options)
    except AutopruneError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
