"""Items: what comes for the experts, the memory that it comes to, and what graphs read of it.

Notation: n rows of an item, R rows of the bucket that it runs in, k choices, D hidden, S shared rows of the bucket.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from halma.hal.backend import Backend, Stream
from halma.hal.device_value import DeviceValue
from halma.hal.errors import RequestError, StaleInputError
from halma.hal.graph.descriptor import Descriptor
from halma.hal.graph.inputs import InputSet


class ItemHeader(Protocol):
    """What the host knows of an item. ``shared`` of its rows, from ``shared_first`` on, are for the shared expert."""

    @property
    def layer(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def shared(self) -> int: ...
    @property
    def shared_first(self) -> int: ...


@dataclass(frozen=True)
class Item:
    """An :class:`ItemHeader`."""

    layer: int
    rows: int
    shared: int = 0
    shared_first: int = 0


@dataclass(frozen=True)
class ItemSizes:
    """The largest item, and what all of them have in common.

    Args:
        max_tokens: rows of the largest item.
        hidden: D.
        top_k: k.
        experts: experts of this rank, numbered from 0.
        layers: layers that items may name.
        max_shared: shared rows of the largest item; 0 without a shared expert.
        every_row_shared: every row of an item is a shared row too, as with one FFN rank; else any part of them may be.
        alignment: of an expert's first slot, as the route likes it.
    """

    max_tokens: int
    hidden: int
    top_k: int
    experts: int
    layers: int
    max_shared: int = 0
    alignment: int = 1
    every_row_shared: bool = False

    def __post_init__(self) -> None:
        if self.every_row_shared and self.max_shared != self.max_tokens:
            raise RequestError(
                "an item's rows cannot all be shared rows",
                asked=f"max_tokens={self.max_tokens}, max_shared={self.max_shared}, every_row_shared=True",
                do="max_shared=max_tokens, or every_row_shared=False",
            )

    def check(self, item: ItemHeader) -> None:
        """Refuse what is beyond the declared worst case, before anything of it is queued.

        Raises:
            RequestError: naming what does not fit.
        """
        wrong: list[str] = []
        if not 0 <= item.rows <= self.max_tokens:
            wrong.append(f"{item.rows} rows, at most {self.max_tokens}")
        if not 0 <= item.layer < self.layers:
            wrong.append(f"layer {item.layer} of {self.layers}")
        if not 0 <= item.shared <= min(self.max_shared, item.rows):
            wrong.append(f"{item.shared} shared of {item.rows} rows, at most {self.max_shared}")
        elif self.every_row_shared and item.shared != item.rows:
            wrong.append(f"{item.shared} of {item.rows} rows are shared, here all of them are")
        elif not 0 <= item.shared_first <= item.rows - item.shared:
            wrong.append(f"shared rows {item.shared_first} to {item.shared_first + item.shared} of {item.rows}")
        if wrong:
            raise RequestError(
                "an item does not fit what this rank was made for",
                asked=f"layer {item.layer}: {item.rows} rows, {item.shared} shared from {item.shared_first}",
                found=wrong,
                do="declare the largest step of all attention ranks (max_tokens), or split the step",
            )


def check_counts(counts: Sequence[int], rows: int, top_k: int) -> None:
    """Counts by expert that a host brings must be those of ``rows`` rows: too few lose pairs, too many read padding.

    Raises:
        RequestError: a negative count, or a sum that ``rows`` rows cannot have.
    """
    if min(counts, default=0) < 0 or not rows <= sum(counts) <= rows * top_k:
        raise RequestError(
            "the counts of an item do not sum to its rows",
            asked=f"{rows} rows with 1 to {top_k} experts each",
            found=f"counts sum to {sum(counts)}, the least is {min(counts, default=0)}",
            do="count the pairs that were sent to this rank",
        )


def check_hash_tokens(tokens: Sequence[int], table: torch.Tensor) -> None:
    """Tokens that a hash-routed layer looks up must be rows of its table [V, k]; on the host, before they are sent.

    Raises:
        RequestError: naming the first that are not.
    """
    wrong = [token for token in tokens if not 0 <= token < table.shape[0]]
    if wrong:
        raise RequestError(
            "tokens outside of the table that routes them",
            asked=f"{wrong[:5]}{' and more' if len(wrong) > 5 else ''}",
            found=f"the table has {table.shape[0]} tokens",
            do="tokens of this model's vocabulary",
        )


class ItemBuffers:
    """Where an item's payload comes to, the same for all items; any part may be given, such as a transport's staging.

    Attributes:
        rows: [max_tokens, D] carrier.
        ids: int64 [max_tokens, k], experts of this rank from 0, -1 for none.
        weights: [max_tokens, k] acc.
        layer, shared_count: int32 [1] on the device; shared_index: int32 [S], the rows of the shared expert.
    """

    def __init__(
        self,
        backend: Backend,
        sizes: ItemSizes,
        *,
        carrier: torch.dtype,
        acc: torch.dtype,
        rows: torch.Tensor | None = None,
        ids: torch.Tensor | None = None,
        weights: torch.Tensor | None = None,
    ) -> None:
        self.sizes = sizes

        def memory(shape: tuple[int, ...], dtype: torch.dtype, given: torch.Tensor | None = None) -> torch.Tensor:
            if given is None:
                return backend.memory.empty(shape, dtype).zero_()
            if tuple(given.shape) != shape or given.dtype is not dtype or not given.is_contiguous():
                raise RequestError(
                    "staging of an item does not fit",
                    asked=f"{dtype}{list(shape)}, contiguous",
                    found=f"{given.dtype}{list(given.shape)}",
                )
            return given

        most, shared = sizes.max_tokens, max(sizes.max_shared, 1)
        self.rows = memory((most, sizes.hidden), carrier, rows)
        self.ids = memory((most, sizes.top_k), torch.int64, ids)
        self.weights = memory((most, sizes.top_k), acc, weights)
        self.layer = memory((1,), torch.int32)
        self.shared_count = memory((1,), torch.int32)
        self.shared_index = memory((shared,), torch.int32)
        self.shared_offsets = memory((2,), torch.int32)
        self.ones = memory((shared,), acc)
        span = max(most + shared, sizes.layers) + 1
        # Device-to-device copies from here instead of uploads: a host far ahead overwrites no staging.
        self._numbers = torch.arange(span, dtype=torch.int32).to(self.rows.device)
        self._each = self._numbers.split(1)
        self.ones.fill_(1)
        self.shared_index.copy_(self._numbers[:shared])
        self.shared_offsets[1:].fill_(shared)

    @property
    def layer_value(self) -> DeviceValue:
        """The layer, for ops that look weights up."""
        return DeviceValue(self.layer, bound=self.sizes.layers, name="layer")

    def set(self, item: ItemHeader, bucket_rows: int) -> None:
        """Queue what the device must know of ``item`` before it runs on ``bucket_rows`` rows; the payload is there."""
        self.layer.copy_(self._each[item.layer])
        if item.rows < bucket_rows:
            self.ids[item.rows : bucket_rows].fill_(-1)  # padding rows choose nobody (G13)
        if self.sizes.max_shared:
            self.shared_count.copy_(self._each[item.shared])
            if not self.sizes.every_row_shared:
                begin = item.shared_first
                self.shared_index.copy_(self._numbers[begin : begin + self.shared_index.shape[0]])

    def spread(self, rows: int, shared: int) -> None:
        """Work for warm-ups and captures: ``rows`` rows spread evenly over all experts (F7).

        All rows on one expert would leave a route's scratch for the others' padding untouched.
        """
        k, experts = self.sizes.top_k, self.sizes.experts
        count = self.sizes.max_tokens * k
        even = torch.arange(count, dtype=torch.int64).remainder_(experts).view(-1, k)
        self.ids.copy_(even)
        self.ids[rows:].fill_(-1)
        self.weights.fill_(1.0 / k)
        self.rows.fill_(0.25)
        self.layer.zero_()
        self.shared_count.fill_(shared)
        self.shared_index.copy_(self._numbers[: self.shared_index.shape[0]])


class ItemInputs(InputSet):
    """What graphs of a bucket read: fresh for one item, so that none is replayed on another's rows (G12)."""

    def __init__(self, buffers: ItemBuffers, rows: int, shared: int) -> None:
        super().__init__()
        self.buffers, self._rows, self._shared = buffers, rows, shared
        self.fresh = False

    def check(self, step: object = None) -> None:
        """As :meth:`InputSet.check`."""
        if not self.fresh:
            raise StaleInputError(
                "the item was not set since the last replay",
                asked=None if step is None else f"to replay {step}",
                do="run items through FfnProgram.run(), which sets them",
            )

    def consume(self, stream: Stream | None = None) -> None:
        """A replay takes the item."""
        self.fresh = False

    def valid_work(self) -> None:
        """Work spread over all experts, as a full item of the bucket brings."""
        self.buffers.spread(self._rows, self._shared)
        self.fresh = False


def descriptor_of(rows: int, shared: int, layer: int | None = None, *, whoever: bool = False) -> Descriptor:
    """What a graph of items with ``rows`` rows is captured for; with ``layer``: of this layer alone; with ``whoever``:
    of items that the graph takes and answers by itself."""
    of = "" if layer is None else f", layer {layer}"
    return Descriptor("ffn", rows, variant=f"{shared} shared{of}{', whoever sends it' if whoever else ''}")
