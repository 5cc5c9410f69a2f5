"""The reduced search says what the unreduced one says, on everything small enough for both."""

from __future__ import annotations

import random
from itertools import product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from halma.hal.testing.protocol.cases import (
    BYSTANDER,
    CAST,
    CHUNK,
    CHUNK_TWO_WIDE,
    HOLDS,
    NOTHING,
    ONE_WAY,
    RUNAWAY,
    SMALL,
    TALL,
    THIN,
    TWO,
    VALUE,
    VALUE_TALL,
    VALUE_TWO,
    WIDE,
    Variant,
)
from halma.hal.testing.protocol.explorer import TooManyStates, explore
from halma.hal.testing.protocol.model import ModelError, Rules, Script, program
from halma.hal.testing.protocol.replay import IllegalMove, replay
from halma.hal.testing.protocol.system import Move, Reduced, Whole
from halma.hal.testing.protocol.variants import variant

_FLAGS = (SMALL, WIDE, CAST)
_VALUES = (VALUE, VALUE_TALL, SMALL)
_GRID: tuple[tuple[Rules, Script], ...] = (
    (Rules(), _FLAGS),
    (Rules(), (TWO, CHUNK, VALUE_TWO)),
    (Rules(buffers=1), _FLAGS),
    (Rules(header=False), _FLAGS),
    (Rules(header=False, buffers=3), (ONE_WAY, SMALL)),
    (Rules(epoch="block"), (TALL, WIDE, THIN)),
    (Rules(cycle=(0, 1, 0)), (SMALL, CAST)),
    (Rules(last=3), (SMALL, TALL)),
    (Rules(last=3, scrub="never"), (SMALL, TALL)),
    (Rules(last=2), (SMALL, CAST)),
    (Rules(clear="overlapped"), _VALUES),
    (Rules(clear="overlapped", fenced=False), _VALUES),
    (Rules(clear="overlapped", clear_size="current"), _VALUES),
    (Rules(shared="formats"), (SMALL, VALUE)),
    (Rules(shared="phases"), (SMALL, TWO)),
    (Rules(ahead=1, push_first=True), (SMALL, CAST)),
    (Rules(ahead=2), (SMALL, RUNAWAY, BYSTANDER)),
    (Rules(timeout="sticky", stops=True), (SMALL, VALUE)),
    (Rules(stops=True), (SMALL, CAST)),
    (Rules(released=False), (CHUNK, SMALL)),
    (Rules(timeout="goes on", header=False), (VALUE, SMALL)),
)
"""Rules right and wrong, each with calls of which every list of three is tried."""


def _same(rules: Rules, world: int, script: Script, limit: int) -> tuple[frozenset[str], int]:
    """Both searches, to their ends: all kinds of violation agree, and the skew where there is none."""
    made = program(rules, world, script)
    whole, reduced = Whole(made), Reduced(made)
    all_, some = explore(whole, first=False, limit=limit), explore(reduced, first=False)
    assert all_.violations == some.violations, (rules, world, script)
    assert all_.states >= some.states
    if not all_.violations:
        assert whole.skew == reduced.skew, (rules, world, script)
    return all_.violations, all_.states


@pytest.mark.invariant("C14")
@pytest.mark.parametrize(("rules", "alphabet"), _GRID)
def test_three_calls(rules: Rules, alphabet: Script) -> None:
    one, two = alphabet[:2]
    for script in ((one, one, one), (one, two, one), (two, one, two)):
        _same(rules, 2, script, 200_000)


@pytest.mark.nightly
@pytest.mark.invariant("C14")
@pytest.mark.parametrize(("rules", "alphabet"), _GRID)
def test_every_list_of_three_calls(rules: Rules, alphabet: Script) -> None:
    for script in product(alphabet, repeat=3):
        _same(rules, 2, script, 200_000)


@pytest.mark.invariant("C14")
@pytest.mark.parametrize(
    "name",
    [
        *("one-buffer", "one-slot", "odd-graph", "broadcast-2", "broadcast-3", "broadcast-4", "sentinel-unfenced"),
        *("sentinel-size", "sentinel-two-shot", "shared-formats", "shared-phases", "odd-modulus", "wrap-to-1"),
        *("wrap-to-0", "no-bound", "ours-whole", "sentinel-overlapped"),
    ],
)
def test_a_variant_and_its_cure(name: str) -> None:
    one = variant(name)
    assert one is not None
    _compare(one, 20_000)


@pytest.mark.nightly
@pytest.mark.invariant("C14")
@pytest.mark.parametrize(
    "name",
    [
        *("ours", "early-start", "two-shot", "sentinel", "sentinel-overlapped-3", "chunk", "sticky", "slots-2"),
        *("push-first-4", "goes-on-equal", "block-epochs", "block-epochs-3", "silent-pair-2", "silent-pair-3"),
        *("push-first-3", "no-wait", "sentinel-idle-block", "sentinel-size-3", "chunk-unreleased", "scrub-unfenced"),
        "at-least",
    ],
)
def test_a_large_variant_and_its_cure(name: str) -> None:
    one = variant(name)
    assert one is not None
    _compare(one, 1_500_000)


def _compare(one: Variant, limit: int) -> None:
    for script in one.scripts:
        kinds, _ = _same(one.rules, 2, script, limit)
        assert (one.verdict in kinds) if one.verdict != HOLDS else not kinds
        if one.verdict != HOLDS:
            assert _same(one.cure, 2, script, limit)[0] == frozenset()


@pytest.mark.invariant("C14")
@pytest.mark.parametrize(
    ("rules", "script"),
    [
        (Rules(), (NOTHING, CAST, NOTHING)),
        (Rules(buffers=1), (NOTHING, NOTHING, NOTHING)),
        (Rules(header=False), (SMALL, SMALL, SMALL, SMALL)),
        (Rules(header=False), (CAST, SMALL, CAST)),
        (Rules(header=False), (VALUE, VALUE, VALUE)),
    ],
)
def test_three_ranks(rules: Rules, script: Script) -> None:
    _same(rules, 3, script, 200_000)


_CALLS = st.sampled_from([SMALL, WIDE, TALL, CAST, ONE_WAY, TWO, VALUE, VALUE_TWO, CHUNK, CHUNK_TWO_WIDE, BYSTANDER])


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.sampled_from([rules for rules, _ in _GRID]), st.lists(_CALLS, min_size=1, max_size=5), st.randoms())
def test_random_runs_mean_the_same_to_the_replay(rules: Rules, calls: list, chance: random.Random) -> None:
    """Whatever a system does is possible on real words, and is wrong there exactly when the system says so."""
    assume(not (rules.clear == "overlapped" and VALUE_TWO in calls))
    made = program(rules, 2, tuple(calls))
    for system in (Whole(made), Reduced(made)):
        state = system.start()
        moves: list[Move] = list(system.opening) if isinstance(system, Reduced) else []
        for _ in range(100):
            after = system.steps(state)
            if not after or system.violation(state):
                break
            run, state = chance.choice(after)
            moves += run
        outcome = replay(made, moves)
        assert bool(outcome.wrong) == bool(system.violation(state))
        assert len(outcome.lines) == len(moves)
        if system.done(state):
            assert outcome.stuck == ()


def test_the_replay_refuses_what_is_not_possible() -> None:
    made = program(Rules(), 2, (SMALL, SMALL))
    reduced = Reduced(made)
    run = [*reduced.opening, *reduced.steps(reduced.start())[0][0]]
    assert replay(made, run).wrong == ()
    kinds = [move.kind for move in run]
    for left_out in range(len(run)):
        if kinds[left_out] in ("wait", "push", "deliver") and left_out < len(run) - 2:
            with pytest.raises(IllegalMove):
                replay(made, run[:left_out] + run[left_out + 1 :])
    with pytest.raises(IllegalMove, match="no bound"):
        replay(made, [*reduced.opening, Move("timeout", 0, 0, 0)])
    with pytest.raises(IllegalMove, match="not begun"):
        replay(made, [Move("wait", 0, 1, 0)])


def test_the_replay_of_a_right_protocol_goes_on_to_the_end() -> None:
    for script in ((SMALL, WIDE, CAST), (VALUE, VALUE_TWO, VALUE), (CHUNK, CHUNK_TWO_WIDE)):
        assert replay(program(Rules(), 3, script), []).stuck == ()
    stopped = replay(program(Rules(stops=True), 2, (SMALL,)), [Move("stop", 0)]).stuck
    assert stopped == ("rank 1 call 0 block 0 waits for flag 1 at 0>1 header buffer 1: it holds nothing",)


def test_what_has_no_meaning_is_refused() -> None:
    with pytest.raises(ModelError, match="two-shot"):
        program(Rules(clear="overlapped"), 2, (VALUE_TWO, VALUE))
    with pytest.raises(ModelError, match="more than 256 states"):
        explore(Reduced(program(Rules(header=False), 2, (CAST,) * 300)))


def test_a_search_beyond_its_limit_raises() -> None:
    with pytest.raises(TooManyStates):
        _same(Rules(), 2, (WIDE,) * 4, 100)
