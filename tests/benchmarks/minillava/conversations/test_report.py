"""Accuracy by turn, and the verdict on what recall wins back."""

from __future__ import annotations

from benchmarks.minillava.conversations.arms import FULL, Arm, build_arms, list_arms
from benchmarks.minillava.conversations.draw import Conversation, draw_conversations
from benchmarks.minillava.conversations.report import TurnComparison, build_section

PLAIN, RECALL = Arm("minillava-split", 8), Arm("minillava-split", 8, 4)
COUNT = 40


def _conversations() -> list[Conversation]:
    return draw_conversations("validation", COUNT)


def _answers(seconds: dict[str, int]) -> dict[str, list[list[bool]]]:
    """All turns right, but turn 2 only in so many conversations of each arm."""
    return {
        name: [[True, number < right, True, True] for number in range(COUNT)]
        for name, right in seconds.items()
    }


def test_what_is_won_back_is_a_share_of_what_is_lost() -> None:
    answers = _answers({FULL.name: 40, PLAIN.name: 20, RECALL.name: 36})
    comparison = TurnComparison(_conversations(), answers)

    won = comparison.won_back(RECALL, 1)
    assert round(won.value) == 80
    assert won.low < 80 < won.high <= 100
    assert round(comparison.below_half(RECALL, 1).value, 6) == 10 - 25


def test_the_claim_holds_only_where_the_whole_interval_is_above_half() -> None:
    verdicts, tables = [], {8: [FULL, PLAIN, RECALL]}
    for right in (39, 30, 21):
        answers = _answers({FULL.name: 40, PLAIN.name: 20, RECALL.name: right})
        section = build_section(_conversations(), tables, answers, ["a setup"])
        verdicts.append(section.claims[0].verdict)
        assert "K = 8: recalling 4 tokens" in section.claims[0].promise
        assert "of 50.0" in section.claims[0].measured

    assert verdicts == ["holds", "inconclusive", "does not hold"]


def test_tables_list_every_turn_of_every_arm_and_as_many_tokens_from_the_start() -> None:
    tables = build_arms("minillava", "minillava-split", [8, 16], [4])
    names = [arm.name for arm in list_arms(tables)]
    answers = _answers({name: 20 + number for number, name in enumerate(names)})

    lengths = dict.fromkeys(names, "58.0") | {RECALL.name: "61.5"}
    section = build_section(_conversations(), tables, answers, [], lengths)

    budgets, categories = section.tables[::2], section.tables[1::2]
    assert [table.caption for table in budgets] == ["K = 8.", "K = 16."]
    rows = [tuple(row[:3]) for row in budgets[0].rows]
    assert rows == [
        ("all tokens", "all", "-"),
        ("`minillava`", "8", "-"),
        ("`minillava`", "8", "4"),
        ("`minillava-split`", "8", "-"),
        ("`minillava-split`", "8", "4"),
        ("`minillava-split`", "8", "4 at random"),
        ("`minillava-split`", "8", "4 of the evidence"),
        ("`minillava-split`", "20", "-"),
    ]
    by_name = {tuple(row[:3]): row for row in budgets[0].rows}
    assert by_name["`minillava-split`", "8", "4"][-1] == "61.5"
    assert by_name["`minillava-split`", "8", "4"][3].startswith("100.0")
    assert by_name["`minillava-split`", "8", "4"][-2].startswith("+2.5")
    assert sum(int(row[1]) for row in categories[0].rows) == COUNT
    assert section.data["right"] == answers


def test_arms_without_answers_are_left_out() -> None:
    tables = build_arms("minillava", "minillava-split", [8], [])
    answers = _answers({FULL.name: 40, "minillava 8": 20})

    section = build_section(_conversations(), tables, answers, [])

    assert [row[0] for row in section.tables[0].rows] == ["all tokens", "`minillava`"]
    assert "prompt of turn 4, tokens" not in section.tables[0].columns
    assert not section.claims
