"""What a channel's fault says to a person: who waited for whom, in which call, and which rank is behind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from halma.hal.collectives.contract import Algorithm, ErrorRecord, Fault, FlightEntry, Kind
from halma.hal.collectives.exchange_contract import STAGE_NAMES, Stage, Step
from halma.hal.errors import RankError

LINES: int = 4
"""Calls of each rank that a report shows; the last ones tell where ranks went apart."""


class ChannelFault(RankError):
    """The sticky fault of a channel (C7).

    Attributes:
        rank: this rank of the group.
        record: the first fault, as device code wrote it.
        flights: the calls that each answering rank started last.
        stragglers: ranks that did not answer, or are behind the others; empty where none is.
    """

    def __init__(self, what: str, rank: int, record: ErrorRecord, answers: Answers, **lines: Sequence[str]) -> None:
        super().__init__(what, **lines)
        self.rank = rank
        self.record = record
        self.flights = answers.flights
        self.stragglers = answers.stragglers


@dataclass(frozen=True)
class Answers:
    """The flight recorders of the ranks that answered, by rank of the group."""

    size: int
    flights: Mapping[int, Sequence[FlightEntry]]

    @property
    def silent(self) -> list[int]:
        """Ranks that did not answer."""
        return [rank for rank in range(self.size) if rank not in self.flights]

    @property
    def stragglers(self) -> list[int]:
        """Those that did not answer; where all did, those whose last call is behind another's."""
        if self.silent:
            return self.silent
        last = {rank: flight[-1].call if flight else 0 for rank, flight in self.flights.items()}
        return [rank for rank, call in last.items() if call < max(last.values())]


def channel_fault(
    channel: str, rank: int, names: Sequence[str], record: ErrorRecord, answers: Answers, known: Mapping[int, str]
) -> ChannelFault:
    """The error of a fault.

    Args:
        known: digest -> the call, as this rank describes it.
    """

    def named(one: int) -> str:
        return f"rank {one} ({names[one]})"

    def call_of(digest: int) -> str:
        return known.get(digest) or _recorded(answers, digest)

    found = [
        f"{named(rank)} was in call {record.call} of the channel: {call_of(record.digest)}",
        f"{_way(record.algorithm)}, after {record.waited_ns / 1e9:.3f} s",
        *_lines(answers, call_of),
    ]
    if answers.silent:
        found.append("no answer from " + ", ".join(map(named, answers.silent)))
    elif answers.stragglers:
        found.append("behind the others: " + ", ".join(map(named, answers.stragglers)))
    return ChannelFault(
        f"channel {channel!r}: {_headline(record, rank, named, call_of)}",
        rank,
        record,
        answers,
        asked=(_expected(record, call_of),),
        found=found,
        do=(
            _first_look(record, rank),
            "communicator.rearm() on every rank continues without another capture",
            "HALMA_CHECKED=1 compares eager calls before they run; HALMA_COLLECTIVE_BOUND is how long a wait may take",
        ),
    )


def _recorded(answers: Answers, digest: int) -> str:
    """A call that this rank did not make, or long ago, as another rank's flight recorder has it."""
    entries = (entry for flight in answers.flights.values() for entry in flight if entry.digest == digest)
    entry = next(entries, None)
    what = f"{_kind(entry)} of {entry.nbytes} bytes" if entry is not None else "a call"
    return f"{what} with digest {digest:#010x} that this rank did not make, or long ago"


def _headline(record: ErrorRecord, rank: int, named: Callable[[int], str], call_of: Callable[[int], str]) -> str:
    peer = named(record.peer)
    if record.fault is Fault.MISMATCH:
        return f"{peer} makes another call: {call_of(record.seen)}"
    if record.fault is Fault.OVERRUN:
        return f"{peer} is a call ahead of its turn"
    if record.fault is Fault.LEFT:
        return f"an exception on {peer} left a call before its end"
    if record.peer == rank:
        return f"a block of {peer}'s own call did not do its part within {record.waited_ns / 1e9:.3f} s"
    return f"{peer} did not do its part within {record.waited_ns / 1e9:.3f} s"


def _first_look(record: ErrorRecord, rank: int) -> str:
    if record.fault is Fault.TIMEOUT and record.peer == rank:
        return "look at what else runs on this rank's device: a call's blocks wait for each other, so all must fit"
    return "look at that rank's own output first; results since then are NaN on this channel"


def _expected(record: ErrorRecord, call_of: Callable[[int], str]) -> str:
    if record.fault is Fault.MISMATCH:
        return f"{call_of(record.expected)} (digest {record.expected:#010x}, seen {record.seen:#010x})"
    if record.algorithm == Stage.BACK:  # it has no flag
        return f"words of a sum, seen {record.seen:#010x} in them"
    return f"flag {record.expected}, seen {record.seen}"


def _way(algorithm: int) -> str:
    known = {int(one): f"by {one.name.lower()}" for one in Algorithm}
    known |= {int(stage): f"waiting for {name}" for stage, name in STAGE_NAMES.items()}
    return known.get(algorithm, "by its header word alone")


def _lines(answers: Answers, call_of: Callable[[int], str]) -> list[str]:
    lines: list[str] = []
    for rank, flight in sorted(answers.flights.items()):
        shown = ", ".join(f"{entry.call} {_kind(entry)} of {entry.nbytes} bytes" for entry in flight[-LINES:])
        lines.append(f"rank {rank} started last: {shown or 'nothing'}")
    return lines


def _kind(entry: FlightEntry) -> str:
    known = {int(one): one.name.lower() for one in (*Kind, *Step)}
    return known.get(entry.kind, f"kind {entry.kind}")
