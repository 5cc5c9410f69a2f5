"""Capture sessions on an arena: slots by descriptor, a ledger that all ranks compare, no replay before it."""

# pyright: basic
from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from halma.hal.arena.arena import Arena
from halma.hal.arena.ledger import first_difference
from halma.hal.arena.plan import ArenaPlan, plan_channels, plan_slots
from halma.hal.backend import Backend
from halma.hal.collectives.contract import Algorithm, Box, Call, Kind
from halma.hal.decisions import decisions
from halma.hal.errors import ArenaError, CaptureError
from halma.hal.graph.agreement import Vote
from halma.hal.graph.descriptor import Descriptor
from halma.hal.graph.ladder import decode_ladder
from halma.hal.graph.session import CaptureSession
from halma.hal.testing.conformance.roles import Toy, session_on
from halma.hal.testing.conformance.sharing import Machine, MirrorRanks

CALLS = 3
LADDER = decode_ladder(4)
SLOTS = plan_slots(LADDER, calls_per_descriptor=CALLS, bytes_per_token=512)
CHANNEL = plan_channels(largest=4 * 512, bytes_per_token=512)
BOTH = pytest.mark.parametrize("plan", [CHANNEL, SLOTS], ids=["channel", "slots"])
FIRST, SECOND = LADDER[:2]


def call(tokens: int = 1, kind: Kind = Kind.ALL_REDUCE) -> Call:
    return Call(kind, 512 * tokens, "bfloat16")


@contextmanager
def arena_of(backend: Backend, plan: ArenaPlan, alter: Any = None, **options: Any) -> Generator[Arena]:
    arena = Arena.create(Machine(backend).on(0), MirrorRanks(alter=alter), plan, **options)
    try:
        yield arena
    finally:
        arena.close()


class Program:
    """A toy step that also makes calls on an arena, as a communicator would: only while it is captured."""

    def __init__(self, backend: Backend, arena: Arena, calls: int = CALLS) -> None:
        self.toy = Toy(backend, 8)
        self.arena = arena
        self.calls = calls
        self.boxes: dict[Descriptor, list[Box | None]] = {}

    def of(self, session: CaptureSession) -> Callable[[Descriptor], Callable[[], Any]]:
        def program_of(descriptor: Descriptor) -> Callable[[], Any]:
            step = self.toy.program(session, descriptor)

            def run() -> Any:
                if self.arena.recording is not None:
                    assert self.arena.recording == descriptor
                    taken = [self.arena.take(call(descriptor.num_tokens), Algorithm.STAGED) for _ in range(self.calls)]
                    self.boxes[descriptor] = taken
                return step()

            return run

        return program_of


def record(arena: Arena, use: Any, descriptor: Descriptor, calls: int = CALLS) -> list[Box | None]:
    with use.recording(descriptor):
        return [arena.take(call(descriptor.num_tokens), Algorithm.STAGED) for _ in range(calls)]


# -- taking ----------------------------------------------------------------------------------------------------


@pytest.mark.invariant("A3")
def test_each_captured_call_has_the_slot_of_its_place_in_any_order_of_capture(capturing: Backend) -> None:
    found: list[dict[Descriptor, list[Box | None]]] = []
    for order in ("descending", "ascending", "shuffled(3)"):
        with arena_of(capturing, SLOTS) as arena, session_on(capturing, arenas=[arena]) as session:
            program = Program(capturing, arena)
            session.capture_all(LADDER, program.of(session), order)
            found.append(program.boxes)
            assert arena.live_slots == CALLS * len(LADDER)
    assert found[0] == found[1] == found[2] and set(found[0]) == set(LADDER)
    boxes = [box for taken in found[0].values() for box in taken]
    assert len(set(boxes)) == len(boxes) == CALLS * len(LADDER) and None not in boxes


@pytest.mark.invariant("A3")
@pytest.mark.parametrize(
    ("calls", "tokens", "says"), [(4, 1, "are used up"), (3, 2, "a slot of decode(1 tokens, 1 requests) is too small")]
)
def test_a_call_without_a_slot_fails_the_capture_and_takes_nothing(
    halma_backend: Backend, calls: int, tokens: int, says: str
) -> None:
    with arena_of(halma_backend, SLOTS) as arena:
        use = arena.session("persistent")
        with pytest.raises(ArenaError) as caught, use.recording(FIRST):
            for _ in range(calls):
                arena.take(call(tokens), Algorithm.STAGED)
        assert says in str(caught.value) and arena.live_slots == 0 and arena.recording is None
        assert record(arena, use, FIRST) == [arena.plan.slots and arena.plan.slots.runs[FIRST].box(n) for n in range(3)]


@pytest.mark.invariant("A3")
@pytest.mark.parametrize("made", [0, 1, 2])
def test_fewer_calls_than_planned_bring_a_slot_back_too_soon(halma_backend: Backend, made: int) -> None:
    with arena_of(halma_backend, SLOTS) as arena:
        with pytest.raises(ArenaError, match=f"made {made} calls, and 3 slots are planned"):
            record(arena, arena.session("persistent"), FIRST, made)
        assert arena.live_slots == 0


@pytest.mark.invariant("A3")
def test_a_call_that_belongs_to_no_descriptor_has_no_slot(halma_backend: Backend) -> None:
    with arena_of(halma_backend, SLOTS) as arena:
        with pytest.raises(ArenaError, match="belongs to no descriptor"):
            arena.take(call(), Algorithm.STAGED)
        use = arena.session("persistent")
        with pytest.raises(ArenaError, match="do not nest"), use.recording(FIRST), use.recording(SECOND):
            pass
    with arena_of(halma_backend, CHANNEL) as arena:
        assert arena.take(call(), Algorithm.ONE_SHOT) is None
        with pytest.raises(ArenaError, match='no channel "side"'):
            arena.take(call(), Algorithm.ONE_SHOT, "side")


@pytest.mark.invariant("A3", control=True)
@BOTH
def test_a_capture_that_makes_its_calls_files_them(capturing: Backend, plan: ArenaPlan) -> None:
    with arena_of(capturing, plan) as arena, session_on(capturing, arenas=[arena]) as session:
        session.capture_all(LADDER, Program(capturing, arena).of(session))
        assert len(session) == len(LADDER) and arena.sealed == frozenset(LADDER)
        assert arena.live_slots == (CALLS * len(LADDER) if plan is SLOTS else 0)


# -- covering a ladder -----------------------------------------------------------------------------------------


@pytest.mark.invariant("A2")
@BOTH
def test_a_session_checks_the_whole_ladder_before_it_captures_anything(capturing: Backend, plan: ArenaPlan) -> None:
    with arena_of(capturing, plan) as arena, session_on(capturing, arenas=[arena]) as session:
        program = Program(capturing, arena)
        with pytest.raises(ArenaError, match="does not cover") as caught:
            session.capture_all(decode_ladder(8), program.of(session), "ascending")
        assert "decode(8 tokens, 8 requests): " in str(caught.value)
        assert not program.boxes and len(session) == 0
        with pytest.raises(ArenaError, match="does not cover"):
            session.capture(Descriptor("decode", 8), lambda: None)


@pytest.mark.invariant("A2")
def test_what_falls_back_is_captured_and_may_not_touch_the_arena(capturing: Backend) -> None:
    decisions.clear()
    with (
        arena_of(capturing, SLOTS, policy="fall back") as arena,
        session_on(capturing, arenas=[arena]) as session,
    ):
        vendors = Program(capturing, arena, calls=0)
        session.capture_all((*LADDER, Descriptor("decode", 8)), Mixed(Program(capturing, arena), vendors).of(session))
        assert len(session) == 4 and arena.live_slots == CALLS * len(LADDER)
        ((made, _),) = decisions.all("collective")
        assert (made.subject, made.chosen) == ("decode(8 tokens, 8 requests)", "vendor")
        use = arena.session("scratch")
        with pytest.raises(ArenaError, match="may not use the arena"):
            record(arena, use, Descriptor("decode", 8))
    decisions.clear()


class Mixed:
    """The vendor's program for the widest descriptor."""

    def __init__(self, ours: Program, vendors: Program) -> None:
        self.ours, self.vendors = ours, vendors

    def of(self, session: CaptureSession) -> Callable[[Descriptor], Callable[[], Any]]:
        ours, vendors = self.ours.of(session), self.vendors.of(session)
        return lambda one: vendors(one) if one.num_tokens == 8 else ours(one)


@pytest.mark.invariant("A2", control=True)
def test_a_ladder_that_is_covered_is_captured(capturing: Backend) -> None:
    with arena_of(capturing, SLOTS) as arena, session_on(capturing, arenas=[arena]) as session:
        for one in LADDER:
            session.capture(one, Program(capturing, arena).of(session)(one))
        session.seal()
        assert len(session) == len(LADDER)


# -- changing nothing, replaying nothing too soon --------------------------------------------------------------


@pytest.mark.invariant("A5")
def test_nothing_is_made_opened_looked_at_or_closed_during_a_capture(capturing: Backend) -> None:
    with arena_of(capturing, CHANNEL) as arena:
        ranks = MirrorRanks()
        machine = Machine(capturing)
        attempts: dict[str, Callable[[], Any]] = {
            "an arena is made": lambda: Arena.create(machine.on(0), ranks, CHANNEL),
            "an arena is closed": arena.close,
            "a session is opened on an arena": lambda: arena.session("scratch"),
            "a channel is refilled": lambda: arena.refill("main"),
            "guard zones are looked at": arena.check_guards,
        }
        for what, attempt in attempts.items():
            with session_on(capturing, arenas=[arena]) as session:
                program = Program(capturing, arena).of(session)(FIRST)

                def grows(program: Any = program, attempt: Any = attempt) -> Any:
                    if arena.recording is not None:
                        attempt()
                    return program()

                session.capture(FIRST, grows)
                with pytest.raises(ArenaError, match=f"{what} during a capture"):
                    session.seal()
        assert not machine.when("allocate") and not arena.closed


@pytest.mark.invariant("A5")
def test_a_program_that_hides_such_an_error_has_failed_all_the_same(capturing: Backend) -> None:
    with arena_of(capturing, SLOTS) as arena, session_on(capturing, arenas=[arena]) as session:
        program = Program(capturing, arena).of(session)(FIRST)

        def hides() -> Any:
            if arena.recording is not None:
                try:
                    arena.session("scratch")
                except ArenaError:
                    pass
            return program()

        session.capture(FIRST, hides)
        with pytest.raises(ArenaError, match="during a capture"):
            session.seal()
        assert arena.live_slots == 0 and len(session) == 0


@pytest.mark.invariant("A5")
@BOTH
def test_a_graph_is_not_replayed_before_the_ranks_have_compared_their_ledgers(
    capturing: Backend, plan: ArenaPlan
) -> None:
    with arena_of(capturing, plan) as arena, session_on(capturing, arenas=[arena]) as session:
        too_soon: list[str] = []

        def replay(descriptor: Descriptor) -> None:
            graph = session.find(descriptor)
            assert graph is not None
            with pytest.raises(ArenaError, match="cannot be replayed yet") as caught:
                graph.replay()
            too_soon.append(str(caught.value))

        session.capture_all(LADDER, Program(capturing, arena).of(session), progress=replay)
        assert len(too_soon) == len(LADDER)
        session.replay(FIRST)


@pytest.mark.invariant("A5")
def test_nothing_is_replayed_on_an_arena_that_is_closed(capturing: Backend) -> None:
    with arena_of(capturing, SLOTS) as arena, session_on(capturing, arenas=[arena]) as session:
        session.capture_all(LADDER, Program(capturing, arena).of(session))
        arena.close()
        with pytest.raises(ArenaError, match="the arena is closed"):
            session.replay(FIRST)
        with pytest.raises(ArenaError, match="the arena is closed"):
            arena.take(call(), Algorithm.STAGED)


@pytest.mark.invariant("A5", control=True)
@BOTH
def test_a_settled_graph_is_replayed(capturing: Backend, plan: ArenaPlan) -> None:
    with arena_of(capturing, plan, checked=True) as arena, session_on(capturing, arenas=[arena]) as session:
        program = Program(capturing, arena)
        session.capture_all(LADDER, program.of(session))
        for one in LADDER:
            program.toy.fill(3)
            session.replay(one)
            rows = one.num_tokens
            assert bool((program.toy.y[:rows] == program.toy.x[:rows] * 2 + 1).all())
        late = Descriptor("decode", 3)
        if plan is CHANNEL:  # one more, after the workspace was sealed, is settled at once
            session.capture(late, program.of(session)(late))
            session.replay(late)


# -- persistent and scratch ------------------------------------------------------------------------------------


@pytest.mark.invariant("A6")
@BOTH
def test_a_descriptor_is_captured_once_while_a_persistent_session_lasts(
    halma_backend: Backend, plan: ArenaPlan
) -> None:
    with arena_of(halma_backend, plan) as arena:
        use = arena.session("persistent")
        record(arena, use, FIRST)
        with pytest.raises(ArenaError, match=r"decode\(1 tokens, 1 requests\) was captured already") as caught:
            record(arena, use, FIRST)
        assert "this session holds what its calls took" in str(caught.value)
        for kind in ("scratch", "persistent"):
            if plan is SLOTS:
                with pytest.raises(ArenaError, match="another, persistent session holds"):
                    record(arena, arena.session(kind), FIRST)
            else:  # buffers of a channel are nobody's: another session may use them
                assert record(arena, arena.session(kind), FIRST) == [None] * CALLS
        use.close()
        record(arena, arena.session("persistent"), FIRST)


@pytest.mark.invariant("A6")
def test_slots_of_a_scratch_session_come_back_and_it_seals_nothing(capturing: Backend) -> None:
    with arena_of(capturing, SLOTS) as arena:
        program = Program(capturing, arena)
        with session_on(capturing, "scratch", arenas=[arena]) as session:
            session.capture_all(LADDER[:2], program.of(session))
            profiled = dict(program.boxes)
            assert arena.live_slots == 2 * CALLS and arena.sealed == frozenset()
        assert arena.live_slots == 0
        with session_on(capturing, arenas=[arena]) as session:
            session.capture_all(LADDER, program.of(session))
            assert arena.live_slots == len(LADDER) * CALLS and arena.sealed == frozenset(LADDER)
        assert {one: program.boxes[one] for one in profiled} == profiled and arena.live_slots == 0


@pytest.mark.invariant("A6")
def test_a_scratch_session_may_capture_a_descriptor_again_in_the_same_slots(halma_backend: Backend) -> None:
    with arena_of(halma_backend, SLOTS) as arena:
        use = arena.session("scratch")
        assert record(arena, use, FIRST) == record(arena, use, FIRST) and arena.live_slots == CALLS


@pytest.mark.invariant("A6")
def test_v4_flash_profiles_two_descriptors_in_174_slots_and_then_captures_609(halma_backend: Backend) -> None:
    ladder = tuple(Descriptor("verify", 1 << power, 5) for power in range(7))
    plan = plan_slots(ladder, calls_per_descriptor=87, bytes_per_token=64)
    with arena_of(halma_backend, plan) as arena:

        def captured(use: Any, descriptors: Sequence[Descriptor]) -> int:
            for one in descriptors:
                with use.recording(one):
                    for _ in range(87):
                        arena.take(Call(Kind.ALL_REDUCE, 64 * one.num_tokens, "bfloat16"), Algorithm.STAGED)
            return arena.live_slots

        scratch = arena.session("scratch")
        assert captured(scratch, ladder[-2:]) == 174
        scratch.close()
        assert arena.live_slots == 0 and captured(arena.session("persistent"), ladder) == 609


@pytest.mark.invariant("A6")
def test_a_capture_that_failed_gives_its_slots_back(capturing: Backend) -> None:
    with arena_of(capturing, SLOTS) as arena, session_on(capturing, arenas=[arena]) as session:
        program = Program(capturing, arena).of(session)(FIRST)

        def fails() -> Any:
            found = program()
            if arena.recording is not None:
                raise ValueError("layer 3 is missing")
            return found

        session.capture(FIRST, fails)
        with pytest.raises(ValueError, match="layer 3"):
            session.seal()
        assert arena.live_slots == 0
        session.forget(FIRST)
        session.capture(FIRST, program)
        assert arena.live_slots == CALLS and arena.sealed == {FIRST}


@pytest.mark.invariant("A6")
def test_a_capture_that_another_rank_refused_gives_its_slots_back(capturing: Backend) -> None:
    def no_memory(stage: str, rank: int, value: Any) -> Any:
        late = isinstance(value, Vote) and value.stage == f"the capture of {FIRST}"
        return replace(value, refusal="no memory") if late else value

    with arena_of(capturing, SLOTS, no_memory) as arena, session_on(capturing, arenas=[arena]) as session:
        session.capture_all(LADDER, Program(capturing, arena).of(session))
        assert session.find(FIRST) is None and arena.sealed == frozenset(LADDER) - {FIRST}
        assert arena.live_slots == CALLS * (len(LADDER) - 1)


@pytest.mark.invariant("A6", control=True)
def test_different_descriptors_of_one_session_are_each_captured(halma_backend: Backend) -> None:
    with arena_of(halma_backend, SLOTS) as arena:
        use = arena.session("persistent")
        taken = [record(arena, use, one) for one in LADDER]
        assert arena.live_slots == len({box for boxes in taken for box in boxes}) == CALLS * len(LADDER)


# -- ledgers ---------------------------------------------------------------------------------------------------


def ledger_vote(change: Callable[[tuple[str, ...]], tuple[str, ...]]) -> Callable[[str, int, Any], Any]:
    """Another rank's ledger, as ``change`` makes it of this one's."""

    def alter(stage: str, rank: int, value: Any) -> Any:
        mine = isinstance(value, Vote) and value.stage == "the arenas' ledger"
        return replace(value, subjects=change(value.subjects)) if mine else value

    return alter


@pytest.mark.invariant("A4")
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda lines: lines[:-1], "rank 1: nothing"),
        (lambda lines: tuple(line.replace("3 calls", "2 calls") for line in lines), "4 requests): 2 calls"),
        (lambda lines: tuple(line.replace("bfloat16", "float16") for line in lines), "2048 bytes of float16"),
        (lambda lines: tuple(line.replace("staged", "one_shot") for line in lines), "one_shot, in the slot"),
        (lambda lines: tuple(line.replace("slot at", "slot at 1") for line in lines), "in the slot at 1"),
        (lambda lines: lines[:1], "rank 1: nothing"),
    ],
    ids=["a call less", "counts", "dtype", "algorithm", "offset", "nothing captured"],
)
def test_ledgers_that_differ_are_an_error_with_the_first_difference(
    capturing: Backend, change: Callable[[tuple[str, ...]], tuple[str, ...]], says: str
) -> None:
    with arena_of(capturing, SLOTS, ledger_vote(change)) as arena, session_on(capturing, arenas=[arena]) as session:
        with pytest.raises(CaptureError, match="they differ in entry .* of the arenas' ledger") as caught:
            session.capture_all(LADDER, Program(capturing, arena).of(session))
        assert says in str(caught.value) and arena.sealed == frozenset()
        with pytest.raises(ArenaError, match="cannot be replayed yet"):
            session.replay(FIRST)


@pytest.mark.invariant("A7")
def test_a_damaged_guard_zone_keeps_a_session_from_being_settled(capturing: Backend) -> None:
    with arena_of(capturing, SLOTS, checked=True) as arena:
        with session_on(capturing, arenas=[arena]) as session:
            arena.own.tensor[arena.plan.guards[-1]] = 0
            with pytest.raises(ArenaError, match="a guard zone of the arena was written to"):
                session.capture_all(LADDER, Program(capturing, arena).of(session))
            assert arena.sealed == frozenset()
            arena.own.tensor[arena.plan.guards[-1]] = 0xA5


@pytest.mark.invariant("A12")
def test_a_rank_that_took_nothing_still_compares_its_ledger(capturing: Backend) -> None:
    ranks = MirrorRanks()
    arena = Arena.create(Machine(capturing).on(0), ranks, CHANNEL)
    votes: list[Vote] = []
    ranks.alter = lambda stage, rank, value: votes.append(value) or value if isinstance(value, Vote) else value
    with session_on(capturing, arenas=[arena]) as session:
        session.capture_all((), Program(capturing, arena, calls=0).of(session))
    empty = [vote for vote in votes if vote.stage == "the arenas' ledger"]
    assert len(empty) == 1 and empty[0].subjects == (f"persistent session on an arena of {arena.plan.fingerprint}",)
    arena.close()


@pytest.mark.invariant("A12")
def test_an_empty_ledger_is_a_ledger() -> None:
    assert first_difference([[], ["a call"]], NAMES) == ("rank 7 on alpha: nothing", "rank 3 on beta: a call")
    assert first_difference([["a call"], []], NAMES) == ("rank 7 on alpha: a call", "rank 3 on beta: nothing")
    assert first_difference([["a", "b"], ["a", "c"]], NAMES) == ("rank 7 on alpha: b", "rank 3 on beta: c")


@pytest.mark.invariant("A12", control=True)
def test_ledgers_that_are_equal_do_not_differ() -> None:
    assert first_difference([["a", "b"], ["a", "b"]], NAMES) is None and first_difference([[], []], NAMES) is None


NAMES = ("rank 7 on alpha", "rank 3 on beta")
