"""The ranks that share one model: what a step asks of them, and what the host checks with them.

Tensor parallelism cuts every matrix of a sublayer, so each rank makes a partial sum of its output: one all-reduce
after attention, one after the experts. The vocabulary is cut too: one all-reduce for the embedding, one gather for
the choice. Everything else (compressors, indexer, router, streams) is done whole on every rank, of equal inputs, so
it is equal to the bit (M11): an all-reduce gives the same bits on every rank (C1).
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final, Protocol, TypeVar

import torch

from halma.hal.arena.arena import Arena
from halma.hal.arena.consensus import RanksAgreement
from halma.hal.arena.plan import plan_channels
from halma.hal.collectives.communicator import Communicator
from halma.hal.collectives.contract import StreamMix
from halma.hal.collectives.group import Group, NoArena
from halma.hal.dispatch import Ops
from halma.hal.errors import CollectiveError
from halma.hal.graph.agreement import Agreement
from halma.hal.graph.arenas import SharedArena
from halma.hal.graph.descriptor import Descriptor
from halma.models.deepseek_v4.config import V4Config
from halma.models.deepseek_v4.preparation import check_world

T = TypeVar("T")


class Mixer(Protocol):
    """See :meth:`halma.hal.collectives.communicator.Communicator.all_reduce_streams`."""

    def __call__(
        self, x: torch.Tensor, mix: StreamMix, weight: torch.Tensor, *, eps: float, out: torch.Tensor
    ) -> torch.Tensor: ...


class Ranks(Protocol):
    """The ranks of one model.

    Attributes:
        first_token: where this rank's part of the vocabulary begins; None where it holds all of it.
        arenas: where their messages go; sessions settle with all ranks what a capture took of them.
        agreement: the ranks that capture together; None: there is one.
    """

    rank: int
    size: int
    first_token: int | None
    arenas: Sequence[SharedArena]
    agreement: Agreement | None
    nbytes: int
    """Of the arenas, on this rank."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Partial sums -> their sum, in place."""
        ...

    def mixer(self, rows: int, width: int, carrier: torch.dtype) -> Mixer | None:
        """What adds partial sums [rows, width] up into the residual streams and makes the next sublayer's input of
        them, in one call; None where that goes in parts. The same on every rank."""
        ...

    def best_token(self, ops: Ops, logits: torch.Tensor) -> torch.Tensor:
        """This rank's logits [R, V/N] -> int64 [R]: the token with the largest logit of all."""
        ...

    def all_logits(self, ops: Ops, logits: torch.Tensor) -> torch.Tensor:
        """This rank's logits [R, V/N] -> [R, V]."""
        ...

    def step(self, descriptor: Descriptor) -> AbstractContextManager[None]:
        """Eager calls inside belong to ``descriptor``, in reports."""
        ...

    def poll(self) -> None:
        """Look for a fault; waits for nothing.

        Raises:
            RankError: a rank did not do its part of a call: what was computed since means nothing.
        """
        ...

    def values(self, what: str, value: T) -> list[T]:
        """Each rank's host value, by rank; every rank asks. Not for a step: it waits for all."""
        ...

    def require_same(self, what: str, values: Sequence[object]) -> None:
        """Whether the values are equal on all ranks; every rank asks.

        Raises:
            CollectiveError: they are not; names the ranks and the first value that differs.
        """
        ...

    def from_first(self, what: str, value: T) -> T:
        """Rank 0's value, on every rank: what each of them measured is not equal. Every rank asks."""
        ...


class OneRank:
    """A model that one rank holds whole."""

    rank = 0
    size = 1
    first_token: int | None = None
    arenas: Sequence[SharedArena] = ()
    agreement: Agreement | None = None
    nbytes = 0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """``x``."""
        return x

    def mixer(self, rows: int, width: int, carrier: torch.dtype) -> Mixer | None:
        """There is nothing to sum."""
        return None

    def best_token(self, ops: Ops, logits: torch.Tensor) -> torch.Tensor:
        """The largest logit's token."""
        return ops.argmax_tokens(logits)

    def all_logits(self, ops: Ops, logits: torch.Tensor) -> torch.Tensor:
        """``logits``."""
        return logits

    def step(self, descriptor: Descriptor) -> AbstractContextManager[None]:
        """There are no calls."""
        return nullcontext()

    def poll(self) -> None:
        """There are no faults."""

    def values(self, what: str, value: T) -> list[T]:
        """Its own."""
        return [value]

    def require_same(self, what: str, values: Sequence[object]) -> None:
        """They are."""

    def from_first(self, what: str, value: T) -> T:
        """Its own."""
        return value


ONE_RANK: Final[Ranks] = OneRank()


class ManyRanks:
    """A model that is divided among the ranks of a group; :func:`divided` makes it.

    Args:
        communicator: on ``arena``; one stream at a time.
        largest: bytes of the largest message that it gathers at once.

    Raises:
        ModelError: the model cannot be divided among so many.
    """

    def __init__(
        self, config: V4Config, group: Group, communicator: Communicator, arena: Arena | NoArena, *, largest: int
    ) -> None:
        check_world(config, group.size)
        self.rank, self.size = group.rank, group.size
        self.first_token: int | None = group.rank * config.vocab_size // group.size
        self.arenas: Sequence[SharedArena] = () if isinstance(arena, NoArena) else (arena,)
        self.agreement: Agreement | None = RanksAgreement(group.ranks)
        self.nbytes = 0 if isinstance(arena, NoArena) else arena.plan.nbytes
        self._vocabulary = config.vocab_size
        self._ranks = group.ranks
        self._communicator = communicator
        self._largest = largest

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Partial sums -> their sum, in place."""
        return self._communicator.all_reduce(x)

    def mixer(self, rows: int, width: int, carrier: torch.dtype) -> Mixer | None:
        """Where the communicator's channel can do it; its reason is in the decision record (``halma explain``)."""
        communicator = self._communicator
        return communicator.all_reduce_streams if communicator.why_not_streams(rows, width, carrier) is None else None

    def best_token(self, ops: Ops, logits: torch.Tensor) -> torch.Tensor:
        """Eight bytes a row and rank are exchanged: each rank's largest logit and its token."""
        own = ops.own_best(logits, self.first_token)
        return ops.best_of_all(self._gathered(ops, own), self._vocabulary)

    def all_logits(self, ops: Ops, logits: torch.Tensor) -> torch.Tensor:
        """For sampling alone. A nucleus is cut by the mass of everything more probable, so whether a token is in it
        depends on every logit: a scheme with candidates is exact only with a second round for the rows that the
        first one did not settle, and a graph has no such branch. Of V4-Flash at 8 ranks a row is 64,640 bytes a rank,
        a message like any other; what is larger than a message goes in several, cut by rows.
        """
        rows, width = logits.shape
        piece = max(1, self._largest // (width * logits.dtype.itemsize))
        out = ops.workspace.take((rows, width * self.size), logits.dtype)
        for begin in range(0, rows, piece):
            end = min(begin + piece, rows)
            ops.join_columns(self._gathered(ops, logits[begin:end]), out=out[begin:end])
        return out

    def _gathered(self, ops: Ops, x: torch.Tensor) -> torch.Tensor:
        parts = ops.workspace.take((self.size, *x.shape), x.dtype)
        self._communicator.all_gather(x, out=parts)
        return parts

    def step(self, descriptor: Descriptor) -> AbstractContextManager[None]:
        """See :meth:`Ranks.step`."""
        return self._communicator.step(descriptor)

    def poll(self) -> None:
        """See :meth:`Ranks.poll`."""
        self._communicator.poll()

    def values(self, what: str, value: T) -> list[T]:
        """See :meth:`Ranks.values`."""
        return self._ranks.exchange(what, value)

    def require_same(self, what: str, values: Sequence[object]) -> None:
        """See :meth:`Ranks.require_same`; 8 bytes a value are exchanged."""
        own = [hashlib.sha256(repr(value).encode()).digest()[:8] for value in values]
        found = self._ranks.exchange(f"comparing {what}", own)
        for rank, other in enumerate(found):
            if other != found[0]:
                pairs = enumerate(zip(found[0], other, strict=False))
                place = next((i for i, (a, b) in pairs if a != b), min(len(found[0]), len(other)))
                raise CollectiveError(
                    f"ranks differ in {what}",
                    found=(
                        f"rank {rank} differs from rank 0 first at {place}, of {len(found[0])} and {len(other)}",
                        f"rank {self.rank} has {values[place]!r}" if place < len(values) else "",
                    ),
                    do="run every rank with the same halma, torch, settings and model on machines of one kind",
                )

    def from_first(self, what: str, value: T) -> T:
        """See :meth:`Ranks.from_first`."""
        return self._ranks.exchange(f"{what}, from rank 0", value)[0]


@contextmanager
def divided(config: V4Config, group: Group, *, tokens: int, carrier: torch.dtype) -> Generator[ManyRanks]:
    """The ranks of a group with the memory that their messages need. All ranks come, in and out.

    After an exception nothing is exchanged any more (G26): the memory goes with the process, or with its last peer.

    Args:
        tokens: most rows of a step; a ladder with a wider one is refused before anything of it is captured.
        carrier: dtype of activations.

    Raises:
        ModelError: the model cannot be divided among so many.
        ArenaError, RankError: there is no such memory, on every rank alike; or a rank did not come.
    """
    check_world(config, group.size)
    wide = 8 if carrier is torch.float64 else 4
    row = config.vocab_size // group.size * wide
    each = config.hidden_size * carrier.itemsize
    largest = max(tokens * each, row)
    arena = group.arena(plan_channels(largest=largest, bytes_per_token=each))
    communicator = group.communicator(arena)
    yield ManyRanks(config, group, communicator, arena, largest=_gathered_at_once(arena, largest))
    communicator.close()
    arena.close()


def _gathered_at_once(arena: Arena | NoArena, largest: int) -> int:
    """Bytes of a rank's message that a channel gathers; the vendor takes any."""
    if isinstance(arena, NoArena):
        return largest
    layout = arena.layout()
    lanes = (layout.words, layout.sentinel, layout.staging)
    return max((lane.largest for lane in lanes if lane is not None), default=largest)
