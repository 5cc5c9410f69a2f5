"""Which sizes of item are captured. Pure arithmetic: no tensor, no device.

A size is a number of *routed rows*: pairs of a token and one of its experts here. A published ladder of multiples of
the expected item (vllm-project/afd-plugin#335) steps from 1.0 to 1.1 there, while it replays nothing that pads by
more than 1.05: of items just above the expected size, about half of all, most ran eagerly. So here:

- near a *cluster* (an item size that is expected, or was recorded) no step is larger than the gate;
- elsewhere sizes double, where a launch costs more than its rows, or grow by half;
- the largest bucket is the exact bound (G16).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from halma.hal.errors import CaptureError

GATE = 1.05
"""Largest padding, charged over real rows, at which a replay is taken to pay where nothing was measured."""
SPREAD = 0.1
"""How far round a cluster items are expected, as a part of its size: routing is uneven."""
COARSE = 1.5
FINEST = 64
"""Routed rows below which sizes double: a step there costs launches and the weights touched, not rows."""
QUANTUM = 128
"""Sizes are multiples of it, or of a smaller power of two where it would be coarser than half a step."""


@dataclass(frozen=True, order=True)
class Bucket:
    """A captured size: routed rows and shared rows that it holds."""

    routed: int
    shared: int = 0

    def __str__(self) -> str:
        return f"{self.routed} routed, {self.shared} shared rows"


@dataclass(frozen=True)
class Ladder:
    """Buckets, ascending; see :meth:`fit`.

    Attributes:
        max_routed, max_shared: the bound; its bucket is the last.
        clusters: sizes round which no step is larger than ``gate``.
    """

    buckets: tuple[Bucket, ...]
    max_routed: int
    max_shared: int
    gate: float
    clusters: tuple[int, ...]

    @classmethod
    def fit(
        cls,
        max_tokens: int,
        top_k: int,
        ffn_ranks: int,
        experts: int,
        *,
        gate: float = GATE,
        histogram: Mapping[int, int] | None = None,
        clusters: Sequence[int] | None = None,
        shared: bool = True,
        most: int = 48,
    ) -> Ladder:
        """The ladder of one FFN rank.

        Args:
            max_tokens: of one item: all attention ranks' tokens that it may carry.
            top_k: experts of a token.
            ffn_ranks: ranks that share the experts.
            experts: of the model.
            gate: largest step near a cluster, as a ratio.
            histogram: routed rows -> items of that size, as recorded: the clusters are its sizes.
            clusters: instead of the expected item and half of it (two micro-batches).
            shared: the model has a shared expert; its rows are divided evenly among ranks.
            most: buckets at most. Dropped first: those that fewest recorded items need.

        Raises:
            CaptureError: a size below 1, more choices or ranks than experts, a gate not above 1, a histogram beyond
                the bound.
        """
        _check(max_tokens, top_k, ffn_ranks, experts, gate)
        here = -(-experts // ffn_ranks)
        max_routed = max_tokens * min(top_k, here)
        max_shared = -(-max_tokens // ffn_ranks) if shared else 0
        if histogram is not None:
            counted = _counted(histogram, max_routed)
            centres = tuple(sorted(counted))
            sizes = _covering(counted, gate, most - 1)
        else:
            expected = -(-max_tokens * top_k // ffn_ranks)
            given = (-(-expected // 2), expected) if clusters is None else clusters
            centres = tuple(sorted({min(max(size, 1), max_routed) for size in given}))
            sizes = _round_clusters(centres, min(top_k, here), max_routed, gate)
        kept = sorted({*sizes, max_routed})
        buckets = [Bucket(size, _shared_of(size, max_routed, max_shared)) for size in kept]
        return cls(tuple(buckets), max_routed, max_shared, gate, centres)

    def pick(self, routed: int, shared: int = 0) -> Bucket | None:
        """The smallest bucket that holds both, or None: the item is empty, or larger than the bound (F6)."""
        if routed < 0 or shared < 0 or routed + shared == 0:
            return None
        for one in self.buckets[bisect_left(self._sizes, routed) :]:
            if one.shared >= shared:
                return one
        return None

    @cached_property
    def _sizes(self) -> list[int]:
        return [one.routed for one in self.buckets]

    def why_none(self, routed: int, shared: int = 0) -> str:
        """Why :meth:`pick` gives nothing, in words."""
        if routed + shared == 0:
            return "the item is empty"
        return (
            f"{routed} routed and {shared} shared rows are beyond the bound of {self.max_routed} and {self.max_shared}"
        )

    def refit(self, histogram: Mapping[int, int], *, most: int = 48) -> Ladder:
        """The same bound with buckets for the items that were recorded.

        Raises:
            CaptureError: as :meth:`fit`.
        """
        counted = _counted(histogram, self.max_routed)
        sizes = sorted({*_covering(counted, self.gate, most - 1), self.max_routed})
        buckets = [Bucket(size, _shared_of(size, self.max_routed, self.max_shared)) for size in sizes]
        return Ladder(tuple(buckets), self.max_routed, self.max_shared, self.gate, tuple(sorted(counted)))

    def charged(self, histogram: Mapping[int, int]) -> tuple[int, int, int]:
        """(items within the gate, rows that they charge, real rows of them) of ``histogram``: what a gate replays."""
        within = charged = real = 0
        for size, items in histogram.items():
            bucket = self.pick(size)
            if bucket is not None and bucket.routed <= size * self.gate:
                within, charged, real = within + items, charged + items * bucket.routed, real + items * size
        return within, charged, real


def _check(max_tokens: int, top_k: int, ffn_ranks: int, experts: int, gate: float) -> None:
    asked = f"{max_tokens} tokens, top-{top_k} of {experts} experts on {ffn_ranks} ranks, gate {gate}"
    problem = None
    if min(max_tokens, top_k, ffn_ranks, experts) < 1:
        problem = "every size is at least 1"
    elif top_k > experts:
        problem = f"a token cannot have {top_k} different experts of {experts}"
    elif ffn_ranks > experts:
        problem = f"{ffn_ranks - experts} ranks would have no expert"
    elif not gate > 1:
        problem = "a gate of 1 or less lets no padding pass"
    if problem is not None:
        raise CaptureError("no ladder can be made of this", asked=asked, found=problem, do="check the roles' sizes")


def _counted(histogram: Mapping[int, int], bound: int) -> dict[int, int]:
    counted = {size: items for size, items in histogram.items() if size > 0 and items > 0}
    wrong = [size for size in counted if size > bound]
    if wrong or not counted:
        raise CaptureError(
            "the recorded items do not fit this ladder",
            asked=f"{len(histogram)} sizes",
            found=f"{max(wrong)} rows, the bound is {bound}" if wrong else "no item with a row",
            do="record items of a run with the same bound",
        )
    return counted


def _covering(counted: Mapping[int, int], gate: float, most: int) -> list[int]:
    """The fewest sizes such that no recorded item pads by more than the gate; of more than ``most`` the busiest.

    From the largest down: a bucket must stand at the largest size that is not covered yet, and covers all within
    the gate below it.
    """
    load: dict[int, int] = {}
    top = 0
    for size in sorted(counted, reverse=True):
        if not top or top > size * gate:
            top = size
        load[top] = load.get(top, 0) + counted[size]
    busiest = sorted(load, key=lambda size: (-load[size], size))[: max(most, 1)]
    return sorted(busiest)


def _round_clusters(centres: Sequence[int], first: int, bound: int, gate: float) -> list[int]:
    """Sizes from ``first`` to ``bound``: small steps round the centres, coarse ones between them."""
    sizes, size = [min(first, bound)], min(first, bound)
    while size < bound:
        if _near(size, centres, gate):
            grown = _step(size, gate)
        else:
            grown = size * 2 if size < FINEST else _rounded(int(size * COARSE), COARSE)
            entry = min((_entry(centre) for centre in centres if _entry(centre) > size), default=bound)
            grown = min(grown, entry)  # never over the edge of a cluster
        # A centre is a size of its own: the expected item pads by nothing.
        between = [centre for centre in centres if size < centre < grown]
        size = min(between[0] if between else grown, bound)
        sizes.append(size)
    return sizes


def _near(size: int, centres: Sequence[int], gate: float) -> bool:
    """Whether an item between ``size`` and one gate above it belongs to a cluster."""
    return any(_entry(centre) <= size < centre * (1 + SPREAD) for centre in centres)


def _entry(centre: int) -> int:
    return max(int(centre * (1 - SPREAD)), 1)


def _step(size: int, gate: float) -> int:
    return max(_rounded(int(size * gate), gate), size + 1)


def _rounded(size: int, ratio: float) -> int:
    """Down to a multiple of the largest power of two, up to QUANTUM, that is at most half a step of ``ratio``."""
    quantum = 1
    while quantum < QUANTUM and quantum * 2 <= size * (1 - 1 / ratio) / 2:
        quantum *= 2
    return size // quantum * quantum


def _shared_of(routed: int, max_routed: int, max_shared: int) -> int:
    return min(max(-(-max_shared * routed // max_routed), 1), max_shared) if max_shared else 0


def item_ladder(max_tokens: int, top_k: int, ffn_ranks: int, experts: int, *, shared: bool = True) -> Ladder:
    """The ladder of items that bring rows with their choices, laid out here: a row takes ``top_k`` routed rows.

    A token reaches one of F ranks unless all its choices lie elsewhere, so nearly all of a step's rows come: its
    cluster is at 1 - (1 - 1/F)^k of the bound, and half of it for two micro-batches. Shared rows are among the rows.

    Raises:
        CaptureError: as :meth:`Ladder.fit`.
    """
    _check(max_tokens, top_k, ffn_ranks, experts, GATE)
    rows = round(max_tokens * (1 - (1 - 1 / ffn_ranks) ** top_k))
    whole = Ladder.fit(
        max_tokens, top_k, 1, max(experts, top_k), clusters=(-(-rows // 2) * top_k, rows * top_k), shared=False
    )
    own = -(-max_tokens // ffn_ranks) if shared else 0
    sizes = sorted({-(-bucket.routed // top_k) for bucket in whole.buckets})
    buckets = tuple(Bucket(size * top_k, min(size, own)) for size in sizes)
    return Ladder(buckets, max_tokens * top_k, own, whole.gate, whole.clusters)


def last_of_each(sizes: Sequence[int], kind: Callable[[int], object]) -> list[int]:
    """The largest size of every kind between two neighbours of ``sizes`` (ascending) that are of different kinds.

    A kind is that of a run of sizes: which routes are taken, say.
    """
    found: list[int] = []
    for low, high in pairwise(sizes):
        while kind(low) != kind(high):
            first, beyond = low, high
            while beyond - first > 1:
                middle = (first + beyond) // 2
                first, beyond = (middle, beyond) if kind(middle) == kind(low) else (first, middle)
            found.append(first)
            low = beyond
    return found
