"""Ours holds: no word of another call, nobody waits for ever, no rank more than one call ahead."""

from __future__ import annotations

from dataclasses import replace

import pytest

from halma.hal.testing.protocol.cases import HOLDS, Variant
from halma.hal.testing.protocol.model import HEADER, Call, Op, Rules, epoch_flag, program
from halma.hal.testing.protocol.proved import PROVED
from halma.hal.testing.protocol.variants import variant
from halma.hal.testing.protocol.verdicts import as_expected, find


def _row(one: Variant) -> object:
    return pytest.param(one, id=one.name, marks=[pytest.mark.nightly] if one.nightly else [])


@pytest.mark.invariant("C14")
@pytest.mark.parametrize("one", [_row(one) for one in PROVED])
def test_it_holds(one: Variant) -> None:
    finding = find(one)
    assert finding.verdict == HOLDS, finding.counterexample
    assert finding.skew <= one.skew
    assert finding.cases == len(list(one.cases()))
    assert finding.states > finding.cases * 4


def test_the_bounds_are_those_that_the_rule_asks_for() -> None:
    ours = variant("ours")
    assert ours is not None
    assert ours.rules == Rules()
    assert set(ours.worlds) == {2, 3, 4}
    (script,) = ours.scripts
    assert len(script) >= ours.rules.buffers + 2
    assert {1, 2} <= {made.words for made in script}
    assert {1, 2} <= {made.grid for made in script}
    assert {"all_reduce", "broadcast", "dispatch", "two_shot"} <= {made.kind for made in script}
    assert any(made.silent for made in script)
    assert {"flag", "sentinel"} <= {made.wire for made in script}


def test_a_rank_too_far_ahead_is_not_as_expected() -> None:
    ahead = variant("push-first-4")
    assert ahead is not None
    finding = find(ahead)
    assert finding.skew == 2
    assert as_expected(ahead, finding)
    assert not as_expected(replace(ahead, skew=1), finding)


def test_every_call_sends_a_header_to_each_peer_and_waits_for_one() -> None:
    """C15, in the programs that are searched."""
    calls = (Call("broadcast", root=1), Call("dispatch", words=0), Call("two_shot", grid=2), Call(wire="sentinel"))
    made = program(Rules(), 3, calls)
    for rank in range(3):
        for call in range(len(calls)):
            steps = [step for block in made.blocks[rank][call] for step in block]
            sent = [w.location.reader for s in steps if s.op == Op.PUSH for w in s.words if w.location.area == HEADER]
            read = [w.location.sender for s in steps if s.op == Op.READ for w in s.words if w.location.area == HEADER]
            assert sorted(sent) == sorted(read) == sorted({0, 1, 2} - {rank})


def test_epochs_wrap_to_two_and_keep_their_parity() -> None:
    flags = [epoch_flag(Rules(last=7), count) for count in range(1, 27)]
    assert flags[:14] == [1, 2, 3, 4, 5, 6, 7, 2, 3, 4, 5, 6, 7, 2]
    assert [flag % 2 for flag in flags] == [count % 2 for count in range(1, 27)]
    assert 0 not in flags
