"""The record of choices."""

from __future__ import annotations

import json
import threading

from halma.hal.decisions import Candidate, Decision, DecisionLog


def decision(subject: str, kind: str = "op") -> Decision:
    candidates = (Candidate("fast", False, "M=1 is below 8"), Candidate("reference", True, "rule"))
    return Decision(kind, subject, "reference", candidates, asked=f"{subject}(x)")


def test_equal_decisions_are_counted_and_order_is_that_of_the_first() -> None:
    log = DecisionLog()
    for subject in ("b", "a", "b"):
        log.record(decision(subject))
    assert [(d.subject, n) for d, n in log.all()] == [("b", 2), ("a", 1)]


def test_the_oldest_goes_when_the_log_is_full() -> None:
    log = DecisionLog(capacity=2)
    for subject in ("a", "b", "c"):
        log.record(decision(subject))
    assert [d.subject for d, _ in log.all()] == ["b", "c"]


def test_kinds_are_filtered_and_cleared() -> None:
    log = DecisionLog()
    log.record(decision("a"))
    log.record(decision("a", "graph"))
    assert [d.kind for d, _ in log.all("graph")] == ["graph"]
    log.clear()
    assert log.all() == []


def test_a_decision_is_plain_data_and_knows_its_reason() -> None:
    one = decision("a")
    assert one.reason == "rule"
    shown = json.loads(json.dumps(one.as_json()))
    assert shown["chosen"] == "reference"
    assert shown["candidates"][0] == {"name": "fast", "chosen": False, "reason": "M=1 is below 8"}
    assert Decision("op", "a", "x").reason == ""


def test_threads_lose_no_count() -> None:
    log = DecisionLog()
    threads = [threading.Thread(target=lambda: [log.record(decision("a")) for _ in range(500)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert log.all() == [(decision("a"), 2000)]
