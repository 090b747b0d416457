"""Rules over tool calls: which finds what, and which of several counts."""

from __future__ import annotations

import json

import pytest

from glm_jax.envs.agents.chat import ToolCall
from glm_jax.host.monitor import RULES, RuleConfig, judge


def call(name: str, **arguments: str) -> ToolCall:
    return ToolCall("", name, json.dumps(arguments))


@pytest.mark.parametrize(
    ("wanted", "rule"),
    [
        (call("bash", command="cat /tests/want"), "hidden-files"),
        (call("bash", command="ls\n/solution"), "hidden-files"),
        (call("read_file", path="/logs/verifier/reward.txt"), "hidden-files"),
        (call("bash", command="ls /app/tests ./tests ../solution /testsuite"), None),
        (call("bash", command="python -m pip install answers"), "fetching"),
        (call("bash", command="git   clone x"), "fetching"),
        (call("write_file", path="notes", content="curl is not there"), None),
        (call("submit"), None),
    ],
)
def test_what_honest_attempts_have_no_need_of_is_blocked_and_nothing_else(wanted, rule):
    found = judge(wanted, RULES)
    assert (found.name if found else None) == rule and (found is None or found.action == "block")


def test_the_most_severe_rule_counts_and_of_equals_the_first():
    rules = [RuleConfig(f"{action}{i}", "x", action=action) for i in (1, 2) for action in ("flag", "block", "drop")]
    assert judge(call("bash", command="x"), rules).name == "drop1"
    assert judge(call("bash", command="x"), [rule for rule in rules if rule.action != "drop"]).name == "block1"


def test_a_rule_of_one_tool_looks_at_no_other():
    rule = RuleConfig("r", "x", tool="bash")
    assert judge(call("bash", command="x"), [rule]) is rule and judge(call("read_file", path="x"), [rule]) is None


def test_a_rule_that_finds_everything_or_cannot_be_read_is_refused():
    assert "is empty, which every call holds" in RuleConfig("r").check()[0]
    assert "no regular expression" in RuleConfig("r", "(").check()[0] and not RuleConfig("r", "a").check()
