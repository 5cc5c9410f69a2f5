"""The choice of a communicator's calls, made and recorded once for each shape."""

from __future__ import annotations

import logging
from typing import Any, Final

from halma.hal.arena.layout import ChannelLayout
from halma.hal.capabilities import Capabilities, Unknown
from halma.hal.collectives.choice import THREADS, Table, choose, mixing_blocks, name_of, verdicts
from halma.hal.collectives.contract import Call, Choice, Kind, Refusal
from halma.hal.collectives.remembered import forget_oldest
from halma.hal.decisions import Candidate, Decision, decisions
from halma.hal.errors import CollectiveError

VENDOR: Final = "vendor"
PARTS: Final = "in parts"
"""No collective does the call as a whole, the vendor's neither: its caller makes it of others."""

log = logging.getLogger("halma.collectives")


class Deciding:
    """Choices on one channel.

    Args:
        layout: of the channel; None where the group has none, for the reason ``why_vendor``.
        channels: of the arena, whose grids may spin at the same time.
        strict: a call that no channel does is an error.

    Raises:
        CollectiveError: the grids of all channels do not fit the device together, however small (C16).
    """

    def __init__(
        self,
        channel: str,
        size: int,
        layout: ChannelLayout | None,
        capabilities: Capabilities,
        *,
        channels: int,
        table: Table,
        strict: bool,
        why_vendor: str,
    ) -> None:
        there = capabilities.resident_threads
        self._threads = None if isinstance(there, Unknown) else there
        self._asked = f"{size} ranks, channel {channel}"
        self._size, self._layout, self._table = size, layout, table
        self._atomicity = capabilities.remote_store_atomicity
        self._channels, self._strict, self._why_vendor = channels, strict, why_vendor
        self._mixing = capabilities.stream_mixing is True
        self._choices: dict[tuple[Any, ...], Choice | Refusal] = {}
        if layout is not None and self._threads is not None and channels * THREADS > self._threads:
            raise CollectiveError(
                "the grids of all channels do not fit the device together",
                asked=f"{channels} channels of at least {THREADS} threads, which may spin at the same time",
                found=f"the device holds {self._threads} threads at once",
                do="plan fewer channels",
            )

    def choice(self, call: Call) -> Choice | Refusal:
        """How a call is done; the same for all calls of its shape, whatever descriptor they belong to.

        Raises:
            CollectiveError: only the vendor can, and strict mode forbids it.
        """
        key = (call.kind, call.nbytes, call.dtype, call.root, call.row_length or call.detail)
        choice = self._choices.get(key)
        if choice is None:
            choice = self._choices[key] = self._decide(call)
            forget_oldest(self._choices)
        return choice

    def _decide(self, call: Call) -> Choice | Refusal:
        candidates: list[Candidate] = []
        if self._layout is None:
            choice: Choice | Refusal = Refusal(self._why_vendor)
        else:
            choice = choose(
                call, self._layout, self._size, self._atomicity,
                table=self._table, threads_there=self._threads, channels=self._channels, mixing=self._mixing,
            )  # fmt: skip
            blocks = mixing_blocks(self._threads, self._channels) if self._mixing else 0
            chosen = name_of((choice.algorithm, choice.wire)) if isinstance(choice, Choice) else ""
            for name, reason in verdicts(call, self._layout, self._size, self._atomicity, blocks):
                why = choice.why if name == chosen else reason or "applies"
                candidates.append(Candidate(name, name == chosen, why))
        refused = isinstance(choice, Refusal)
        otherwise = PARTS if call.kind is Kind.ALL_REDUCE_STREAMS else VENDOR
        candidates.append(Candidate(otherwise, refused, choice.why if refused else "a channel does it"))
        name = next(candidate.name for candidate in candidates if candidate.chosen)
        if refused and self._size > 1 and otherwise is VENDOR:
            if self._strict:
                raise CollectiveError(
                    f"{call.describe()} would take the vendor's collective, and HALMA_STRICT forbids it",
                    found=choice.why,
                    do="plan an arena that holds it, or unset HALMA_STRICT",
                )
            log.warning("%s takes the vendor's collective: %s", call.describe(), choice.why)
        decisions.record(Decision("collective", call.describe(), name, tuple(candidates), self._asked))
        return choice
