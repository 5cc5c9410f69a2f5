"""What an exchange of tokens between expert ranks is made for, and where everything of it lies: pure arithmetic.

Offsets depend on capacity alone, never on a message's size (A4): token t of rank r always lands in row
``r * max_tokens + t``. One buffer a direction is enough, because dispatch and combine alternate
(docs/exchange.md): a rank sends into a lane again only after every rank has begun the call in between.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Final

from halma.hal.arena.channels import SENTINEL_FILL, finished, head
from halma.hal.arena.layout import ChannelLayout
from halma.hal.arena.sizes import LARGEST_ADDRESSABLE, MIB, Cursor, up
from halma.hal.collectives.arithmetic import FP8_GROUP
from halma.hal.collectives.common_terms import split_experts
from halma.hal.collectives.exchange_limits import MOST_CHOICES, MOST_EXPERTS, PARTS, SORTERS
from halma.hal.collectives.expert_rows import slot_capacity
from halma.hal.errors import CollectiveError

PAYLOADS: Final = {
    "bf16": ("bfloat16", "bfloat16", 2),
    "fp8": ("bfloat16", "float8_e4m3fn", 1),
    "fp32": ("float32", "float32", 4),
    "fp64": ("float64", "float64", 8),
}
"""payload -> (dtype of what is given, dtype on the way out, its bytes). What comes back has the dtype that was given:
bf16 in shipping arithmetic, the accumulator's own in exact arithmetic."""
ITEM_BYTES: Final = {"bfloat16": 2, "float32": 4, "float64": 8}
LIMIT: Final = 4096 * MIB
"""Default of ``limit``: 16,384 tokens of 4096 columns on 8 ranks take 2 GiB a direction in bf16."""


@dataclass(frozen=True)
class Region:
    """Memory that one kind of message arrives in.

    Attributes:
        stride: bytes from a sender's part to the next one's.
        fill: what every byte holds before the first use.
    """

    offset: int
    nbytes: int
    stride: int
    fill: int = 0

    def at(self, sender: int) -> int:
        """Offset of a sender's part."""
        return self.offset + sender * self.stride


@dataclass(frozen=True)
class Places:
    """Where everything of an exchange lies in a rank's memory.

    Attributes:
        channel: control block, headers, guard zones; it has no lanes beside.
        choices: {data, flag} pairs of 8 bytes: for each token and choice the expert's id, then its weight (one pair,
            two where weights are float64). Flags are the epoch.
        rows: the payload, [ranks x max_tokens, hidden] without a gap: ``ExpertRows.rows`` is this memory.
        scales: float32 [ranks x max_tokens, groups]; empty without fp8.
        flags: u32 [ranks, max_tokens, PARTS]: the epoch, stored behind a part of a row.
        back: what comes back, [ranks, max_tokens, hidden]: words that are all ones until they are there.
        tallies: {count, epoch} pairs [experts of a rank, SORTERS] that a rank's own sorters tell one another.
        end: bytes of all of it.
    """

    channel: ChannelLayout
    choices: Region
    rows: Region
    scales: Region
    flags: Region
    back: Region
    tallies: Region
    end: int

    @property
    def regions(self) -> dict[str, Region]:
        """By name."""
        return {name: getattr(self, name) for name in ("choices", "rows", "scales", "flags", "back", "tallies")}


@dataclass(frozen=True)
class Geometry:
    """What every rank of an exchange must have in common, compared field by field when it is opened (F14).

    Args:
        ranks: of the group.
        max_tokens: most tokens that a rank sends in one call.
        hidden: elements of a row.
        top_k: choices of a token.
        experts: of all ranks together; rank r has a run of them (:meth:`first`), as :func:`split_experts` splits them.
        payload: how rows travel: a key of :data:`PAYLOADS`. fp8 is e4m3fn with a power-of-two scale per 128 columns.
        alignment: of the first slot of an expert.

    Raises:
        CollectiveError: values that no exchange can have; before anything is allocated or sent.
    """

    ranks: int
    max_tokens: int
    hidden: int
    top_k: int
    experts: int
    payload: str = "bf16"
    alignment: int = 1

    def __post_init__(self) -> None:
        found = [
            f"{name} is {value!r}: a whole number from 1 on"
            for name, value in self.named()
            if name != "payload" and (isinstance(value, bool) or not isinstance(value, int) or value < 1)
        ]
        if self.payload not in PAYLOADS:
            found.append(f"payload {self.payload!r}: one of {', '.join(PAYLOADS)}")
        if not found:
            found = self._unfit()
        if found:
            raise CollectiveError("no exchange can be like this", asked=self.describe(), found=found)

    def _unfit(self) -> list[str]:
        found: list[str] = []
        if self.top_k > self.experts:
            found.append(f"top_k {self.top_k} is more than the {self.experts} experts that there are")
        if self.experts < self.ranks:
            found.append(f"{self.experts} experts for {self.ranks} ranks: a rank without an expert has no part in it")
        if self.top_k > MOST_CHOICES:
            found.append(f"top_k {self.top_k}: at most {MOST_CHOICES}")
        if -(-self.experts // self.ranks) > MOST_EXPERTS:
            found.append(f"{-(-self.experts // self.ranks)} experts a rank: at most {MOST_EXPERTS}")
        if self.capacity(self.max_tokens) >= 1 << 31:
            found.append(f"{self.capacity(self.max_tokens):,} slots do not fit int32")
        return found

    def named(self) -> list[tuple[str, Any]]:
        """(field, value), in order."""
        return [(field.name, getattr(self, field.name)) for field in fields(self)]

    def describe(self) -> str:
        """``ranks 2, max_tokens 128, ...``."""
        return ", ".join(f"{name} {value}" for name, value in self.named())

    # -- experts ------------------------------------------------------------------------------------

    def first(self, rank: int) -> int:
        """The first expert of a rank; of ``ranks`` the number of experts."""
        return self._bounds[rank]

    def local(self, rank: int) -> int:
        """How many experts a rank has."""
        return self.first(rank + 1) - self.first(rank)

    @cached_property
    def _bounds(self) -> tuple[int, ...]:
        return split_experts(self.experts, self.ranks)

    # -- dtypes and bytes ---------------------------------------------------------------------------

    @property
    def given(self) -> str:
        """dtype of the rows that are given, and of what comes back."""
        return PAYLOADS[self.payload][0]

    @property
    def sent(self) -> str:
        """dtype of a row on its way out."""
        return PAYLOADS[self.payload][1]

    @property
    def accumulator(self) -> str:
        """dtype of weights and sums."""
        return "float64" if self.given == "float64" else "float32"

    @property
    def row_bytes(self) -> int:
        """Of a row on its way out, without scales."""
        return self.hidden * PAYLOADS[self.payload][2]

    @property
    def groups(self) -> int:
        """Scales of a row."""
        return -(-self.hidden // FP8_GROUP) if self.payload == "fp8" else 0

    @property
    def back_bytes(self) -> int:
        """Of a row that comes back."""
        return self.hidden * ITEM_BYTES[self.given]

    @property
    def choice_bytes(self) -> int:
        """Of a choice of a token: an id and a weight, four bytes of each pair of eight being a flag."""
        return 8 * (1 + ITEM_BYTES[self.accumulator] // 4)

    @property
    def landing(self) -> int:
        """Rows of ``ExpertRows.rows``."""
        return self.ranks * self.max_tokens

    def capacity(self, bound: int) -> int:
        """Slots of a rank for calls in which no rank sends more than ``bound`` tokens."""
        return slot_capacity(self.ranks * bound * self.top_k, -(-self.experts // self.ranks), self.alignment)

    # -- places -------------------------------------------------------------------------------------

    @cached_property
    def places(self) -> Places:
        """Where everything lies; the same on every rank."""
        cursor = Cursor()
        channel = head(cursor, "exchange", self.ranks, self.max_tokens * self.row_bytes)

        def region(a_rank: int, fill: int = 0, *, gap: bool = True, senders: int = self.ranks) -> Region:
            stride = up(a_rank) if gap else a_rank
            nbytes = senders * stride
            return Region(cursor.take(nbytes), nbytes, stride, fill)

        return Places(
            choices=region(self.max_tokens * self.top_k * self.choice_bytes),
            rows=region(self.max_tokens * self.row_bytes, gap=False),
            scales=region(self.max_tokens * 4 * self.groups, gap=False),
            flags=region(self.max_tokens * 4 * PARTS),
            back=region(self.max_tokens * self.back_bytes, SENTINEL_FILL),
            tallies=region(8 * SORTERS * -(-self.experts // self.ranks), senders=1),
            channel=finished(cursor, channel),
            end=cursor.end,
        )

    def need_within(self, limit: int) -> None:
        """Refuse a geometry whose memory is larger than ``limit`` bytes a rank.

        Raises:
            CollectiveError: with both numbers.
        """
        needed = self.places.end
        if needed > min(limit, LARGEST_ADDRESSABLE):
            raise CollectiveError(
                "the exchange does not fit its memory",
                asked=self.describe(),
                found=f"{needed:,} bytes needed on each rank, {limit:,} allowed",
                do=f"limit={needed}, fewer max_tokens, or payload fp8",
            )
