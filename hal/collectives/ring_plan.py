"""What attention and FFN ranks must agree on, and where the rings between them lie: pure arithmetic (F14).

Ranks 0 .. A-1 attend, ranks A .. A+F-1 serve experts. Between each attention rank and each FFN rank there are two
one-way rings of ``depth`` slots: items go one way, replies the other. A slot lies at its receiver.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Final

from halma.hal.arena.sizes import LARGEST_ADDRESSABLE, up
from halma.hal.collectives import control
from halma.hal.collectives.common_terms import refuse_other_terms
from halma.hal.collectives.contract import Ranks
from halma.hal.errors import CollectiveError

ITEMSIZES: Final = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
FLAGS: Final = 64
"""Parts that a slot's rows come in: row r is in part r % FLAGS, and each part has a flag behind it."""
HEADER_WORDS: Final = ("layer", "rows", "pairs", "shared_first", "shared")
"""Of an item, in its receiver's host memory. Each is 8 bytes, the value and above it the item's sequence number, so
that no order among them is needed: the header is there when every word has the number."""
HEADER_BYTES: Final = 64
SLOT_WORDS: Final = 8
"""u32 of an item's slot, behind its flags: the header's values once more, for FFN ranks whose device takes items by
itself. They are of part 0, so its flag covers them."""
MAX_DEPTH: Final = 64
TOTALS: Final = 6
NOBODY: Final = 0xFFFFFFFF
"""In place of an attention rank: nobody sent anything."""
SPLITS: Final = 512
"""Most blocks of the kernel that collects: each reads its own copy of how far it got, and writes those that are its
own alone."""


def ring_epoch(sequence: int, depth: int) -> int:
    """The number behind ``sequence``: after the last one comes ``depth``, so that 0, which untouched memory holds, is
    skipped and slots still follow one another (C2)."""
    return depth if sequence == 0xFFFFFFFF else sequence + 1


@dataclass(frozen=True)
class RingGeometry:
    """All that must be equal on every rank. Sizes are the worst case, so nobody learns shapes later.

    Attributes:
        attention, ffn: how many ranks there are of each role.
        max_tokens: most rows that an attention rank submits at once.
        hidden, top_k: of a row, and of its choices.
        experts: FFN rank f holds experts[f] .. experts[f + 1]; uneven parts are fine.
        layers: that an item may be of.
        depth: slots of a ring, a power of two: items that an attention rank may have under way.
        payload, weights, reply: dtypes of rows, of their choices' weights and of what comes back.
        model: further names and values, of the model and its arithmetic.
    """

    attention: int
    ffn: int
    max_tokens: int
    hidden: int
    top_k: int
    experts: tuple[int, ...]
    layers: int
    depth: int = 2
    payload: str = "float32"
    weights: str = "float32"
    reply: str = "float32"
    model: tuple[tuple[str, object], ...] = ()

    def __post_init__(self) -> None:
        problems: list[str] = []
        for name in ("attention", "ffn", "max_tokens", "hidden", "top_k", "layers"):
            if getattr(self, name) < 1:
                problems.append(f"{name} = {getattr(self, name)}; must be 1 or more")
        if not 1 <= self.depth <= MAX_DEPTH or self.depth & (self.depth - 1):
            problems.append(f"depth = {self.depth}; must be a power of two up to {MAX_DEPTH}")
        parts = self.experts
        if len(parts) != self.ffn + 1 or parts[0] != 0 or any(a >= b for a, b in pairwise(parts)):
            problems.append(f"experts = {parts}; must be {self.ffn + 1} bounds from 0 on, each above the one before")
        elif self.top_k > parts[-1]:
            problems.append(f"top_k = {self.top_k}; there are {parts[-1]} experts")
        unknown = [one for one in (self.payload, self.weights, self.reply) if one not in ITEMSIZES]
        problems += [f"dtype {one}; must be one of {', '.join(ITEMSIZES)}" for one in unknown]
        if problems:
            raise CollectiveError("there are no rings of this geometry", found=problems, do="correct it")

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.attention + self.ffn

    def terms(self) -> Mapping[str, object]:
        """Every field by name."""
        found: dict[str, object] = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "model"}
        return found | dict(self.model)

    def shared_part(self, rows: int, which: int) -> tuple[int, int]:
        """Which of ``rows`` go to the shared expert of FFN rank ``which``: from, to."""
        each = -(-rows // self.ffn)
        return min(which * each, rows), min((which + 1) * each, rows)


def require_equal(ranks: Ranks, geometry: RingGeometry) -> None:
    """Whether all ranks have the same geometry; every rank comes (F14).

    Raises:
        CollectiveError: they do not; names every field that differs, and whose it is.
        RankError: a rank did not come.
    """
    refuse_other_terms(
        "attention and FFN ranks were made for different shapes",
        ranks.exchange("the geometry of roles", geometry.terms()),
        ranks.names,
        do="start every rank with the same model, arithmetic, roles and sizes",
    )


@dataclass(frozen=True)
class Box:
    """A slot's parts, as offsets from its start; ``nbytes`` in all. A reply has no header, ids or weights."""

    flags: int
    header: int
    ids: int
    weights: int
    rows: int
    nbytes: int


@dataclass(frozen=True)
class RingPlan:
    """Offsets in the memory of every rank. Attention and FFN ranks have different ones, of the same plan.

    Attributes:
        item, reply: the parts of a slot of either ring.
        slots: where slots begin; those of peer number p, counted within its role, are ``depth`` from p * depth on.
        credits: u32 [peers, depth]: what a receiver gives back, a word a slot; at the sender.
        state: this rank's own words; no peer touches them.
        control: as :mod:`halma.hal.collectives.control` lays it out.
        attention_bytes, ffn_bytes: what a rank of either role allocates.
    """

    geometry: RingGeometry
    item: Box
    reply: Box
    control: int
    credits: int
    state: int
    slots: int
    attention_bytes: int
    ffn_bytes: int

    @staticmethod
    def of(geometry: RingGeometry) -> RingPlan:
        """The plan of a geometry.

        Raises:
            CollectiveError: it does not fit 64 bits.
        """
        g = geometry
        row = g.hidden * ITEMSIZES[g.payload]
        choices = g.max_tokens * g.top_k
        at_ids = up(4 * (FLAGS + SLOT_WORDS))
        at_weights = at_ids + up(4 * choices)
        at_rows = at_weights + up(ITEMSIZES[g.weights] * choices)
        item = Box(0, 4 * FLAGS, at_ids, at_weights, at_rows, at_rows + up(row * g.max_tokens))
        back = g.hidden * ITEMSIZES[g.reply]
        reply = Box(0, 0, 0, 0, up(4 * FLAGS), up(4 * FLAGS) + up(back * g.max_tokens))
        credits = up(control.CONTROL_BYTES)
        state = credits + up(4 * max(g.attention, g.ffn) * g.depth)
        slots = state + up(max(StateWords.of(g).nbytes, ServingWords.of(g).nbytes))
        attention = slots + g.ffn * g.depth * reply.nbytes
        ffn = slots + g.attention * g.depth * item.nbytes
        if max(attention, ffn) > LARGEST_ADDRESSABLE:
            raise CollectiveError("the rings do not fit 64 bits", asked=str(g), do="fewer tokens at once")
        return RingPlan(g, item, reply, 0, credits, state, slots, attention, ffn)

    def nbytes(self, rank: int) -> int:
        """Bytes of a rank."""
        return self.attention_bytes if rank < self.geometry.attention else self.ffn_bytes

    def item_slot(self, attention: int, slot: int) -> int:
        """Where in an FFN rank's memory items of an attention rank lie."""
        return self.slots + (attention * self.geometry.depth + slot) * self.item.nbytes

    def reply_slot(self, ffn: int, slot: int) -> int:
        """Where in an attention rank's memory replies of FFN rank number ``ffn`` lie."""
        return self.slots + (ffn * self.geometry.depth + slot) * self.reply.nbytes

    def credit(self, peer: int, slot: int) -> int:
        """Where in a sender's memory the receiver ``peer``, counted within its role, gives back a slot."""
        return self.credits + 4 * (peer * self.geometry.depth + slot)


@dataclass(frozen=True)
class StateWords:
    """An attention rank's own words, as offsets from the plan's ``state``. All are u32 or int32.

    Attributes:
        sent: [ffn]: number of the item that was sent last; one copy a ring, all equal.
        collected: [SPLITS]: number of the item that was collected last, a copy for each block.
        filled, taken: [ffn, depth], [depth]: which item was sent from a slot, and collected from one.
        header: [ffn, SLOT_WORDS]: of the item that is being sent.
        tokens: [ffn, max_tokens]: its rows' places in the step.
        place: [depth, ffn, max_tokens]: which row of the reply is a token's, -1 for none.
    """

    sent: int
    collected: int
    filled: int
    taken: int
    header: int
    tokens: int
    place: int
    nbytes: int

    @staticmethod
    def of(geometry: RingGeometry) -> StateWords:
        """The words of a geometry."""
        g = geometry
        sizes = (
            g.ffn, SPLITS, g.ffn * g.depth, g.depth, g.ffn * SLOT_WORDS, g.ffn * g.max_tokens,
            g.depth * g.ffn * g.max_tokens,
        )  # fmt: skip
        return StateWords(*_ends(sizes))


@dataclass(frozen=True)
class ServingWords:
    """An FFN rank's own words where its device takes items by itself, in the same place. u32, but for ``totals``.

    Attributes:
        served: [attention]: number of the item that was begun last, by its sender.
        replied: [attention, depth]: number of the item that was begun last in a slot.
        turn: the attention rank that is looked at first.
        item: the item that is being served: sender or ``NOBODY``, number, the number before it in its slot, then the
            header's values.
        totals: u64, in the order of :data:`halma.hal.collectives.ring_contract.COUNTED`.
    """

    served: int
    replied: int
    turn: int
    item: int
    totals: int
    nbytes: int

    @staticmethod
    def of(geometry: RingGeometry) -> ServingWords:
        """The words of a geometry."""
        g = geometry
        return ServingWords(*_ends((g.attention, g.attention * g.depth, 1, 3 + len(HEADER_WORDS), 2 * TOTALS)))


def _ends(sizes: Sequence[int]) -> list[int]:
    """Where arrays of so many words begin, and where the last one ends."""
    places = [0]
    for words in sizes:
        places.append(places[-1] + up(4 * words))
    return places
