"""Each shortcut fails in the way it is known to fail, its run is confirmed by a replay, and its cure is right."""

from __future__ import annotations

import pytest

from halma.hal.testing.protocol import verdicts
from halma.hal.testing.protocol.cases import BYSTANDER, HOLDS, RUNAWAY, Variant
from halma.hal.testing.protocol.explorer import HANG
from halma.hal.testing.protocol.model import program
from halma.hal.testing.protocol.refuted import REFUTED
from halma.hal.testing.protocol.replay import Outcome, replay
from halma.hal.testing.protocol.system import WRONG, Reduced, Whole
from halma.hal.testing.protocol.variants import VARIANTS, variant
from halma.hal.testing.protocol.verdicts import Unconfirmed, find

pytestmark = pytest.mark.torchfree

_ASKED = {
    HANG: {
        *("one-buffer", "one-slot", "broadcast-2", "broadcast-3", "broadcast-4", "silent-pair-2", "silent-pair-3"),
        *("push-first-3", "sentinel-unfenced", "odd-modulus", "wrap-to-1"),
    },
    WRONG: {"block-epochs", "block-epochs-3", "sentinel-size", "at-least", "sentinel-goes-on"},
}
"""What rule C14 names."""

_every = pytest.mark.parametrize("one", [pytest.param(one, id=one.name) for one in REFUTED])


@pytest.mark.invariant("C14")
@_every
def test_it_fails_in_its_own_way(one: Variant) -> None:
    finding = find(one)
    assert finding.verdict == one.verdict
    shown = finding.counterexample
    assert shown is not None
    again = replay(program(one.rules, shown.world, shown.script), shown.moves)
    if one.verdict == WRONG:
        rank, call, wanted, taken = again.wrong[0]
        assert (wanted.sender, wanted.call) != (rank, taken.call)
        assert wanted.call == call
        assert taken.call != call
    else:
        assert again.wrong == ()
        assert any("for flag" in line for line in again.stuck), "somebody waits for a word"
    assert again == shown.outcome
    if one.verdict == WRONG:  # the last read is needed: without it nothing is wrong yet
        last = max(number for number, move in enumerate(shown.moves) if move.kind == "read")
        assert replay(program(one.rules, shown.world, shown.script), shown.moves[:last]).wrong == ()


@pytest.mark.invariant("C14", control=True)
@_every
def test_the_same_calls_are_right_when_it_is_cured(one: Variant) -> None:
    finding = find(one, rules=one.cure)
    assert finding.verdict == HOLDS, finding.counterexample
    assert finding.cases == len(list(one.cases()))


@pytest.mark.invariant("C14", control=True)
def test_the_kernel_between_is_harmless_when_it_waits() -> None:
    bad = variant("no-wait")
    assert bad is not None
    waits = tuple(BYSTANDER if made == RUNAWAY else made for made in bad.scripts[0])
    assert waits != bad.scripts[0]
    assert find(Variant("waits", "", bad.rules, (waits,))).verdict == HOLDS


def test_all_that_the_rule_names_is_there() -> None:
    for verdict, names in _ASKED.items():
        assert names <= {one.name for one in REFUTED if one.verdict == verdict}
    names = [one.name for one in VARIANTS]
    assert len(set(names)) == len(names)


def test_a_counterexample_that_its_replay_does_not_show_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdicts, "replay", lambda program, moves: Outcome((), (), ()))
    for name in ("one-buffer", "block-epochs"):
        one = variant(name)
        assert one is not None
        with pytest.raises(Unconfirmed, match=name):
            find(one)


@pytest.mark.parametrize("name", ["one-buffer", "block-epochs", "sentinel-unfenced", "wrap-to-0", "at-least"])
def test_the_unreduced_search_has_a_shortest_run_of_the_same_kind(name: str) -> None:
    one = variant(name)
    assert one is not None
    whole, reduced = find(one, whole=True), find(one, whole=False)
    assert whole.verdict == reduced.verdict == one.verdict
    assert whole.counterexample is not None
    assert whole.states > reduced.states
    # A wrong value needs no more than the moves that lead to it; the reduced runs move others along with them.
    if one.verdict == WRONG:
        assert reduced.counterexample is not None
        assert len(whole.counterexample.moves) <= len(reduced.counterexample.moves)


def test_the_two_systems_are_two() -> None:
    one = variant("one-buffer")
    assert one is not None
    made = program(one.rules, 2, one.scripts[0])
    assert len(Whole(made).steps(Whole(made).start())) == 2
    assert [move.kind for move in Whole(made).steps(Whole(made).start())[0][0]] == ["wait"]
    reduced = Reduced(made)
    assert [move.kind for move in reduced.steps(reduced.start())[0][0]] == [*["deliver", "read"] * 2, "wait", "push"]
    assert [move.kind for move in reduced.opening] == ["wait", "push"] * 2
