"""The ranks that share one model: what a step asks of them, and what the host checks with them.

Tensor parallelism cuts every matrix of a sublayer, so each rank makes a partial sum of its output: one all-reduce
after attention, one after the experts. The vocabulary is cut too: one all-reduce for the embedding, one gather for
the choice. Everything else (compressors, indexer, router, streams) is done whole on every rank, of equal inputs, so
it is equal to the bit (M11): an all-reduce gives the same bits on every rank (C1).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Final, Protocol

import torch

from halma.hal.dispatch import Ops
from halma.hal.errors import CollectiveError
from halma.hal.graph.agreement import Agreement
from halma.hal.graph.arenas import SharedArena
from halma.models.deepseek_v4.config import V4Config
from halma.models.deepseek_v4.preparation import check_world


class Communicator(Protocol):
    """What a step needs of a communicator: calls that are captured where a capture is open, and run elsewhere."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in place; the same bits on every rank."""
        ...

    def all_gather(self, x: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        """Every rank's x [...] -> out [N, ...]."""
        ...


class Group(Protocol):
    """What the host needs of the ranks."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def exchange(self, stage: str, value: Any) -> list[Any]:
        """Every rank's value, by rank."""
        ...


class Ranks(Protocol):
    """The ranks of one model.

    Attributes:
        first_token: where this rank's part of the vocabulary begins; None where it holds all of it.
        arenas: where their messages go; sessions settle with all ranks what a capture took of them.
        agreement: with whom graphs are captured, where there are no arenas that know it.
    """

    rank: int
    size: int
    first_token: int | None
    arenas: Sequence[SharedArena]
    agreement: Agreement | None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Partial sums -> their sum, in place."""
        ...

    def best_token(self, ops: Ops, logits: torch.Tensor) -> torch.Tensor:
        """This rank's logits [R, V/N] -> int64 [R]: the token with the largest logit of all."""
        ...

    def all_logits(self, ops: Ops, logits: torch.Tensor) -> torch.Tensor:
        """This rank's logits [R, V/N] -> [R, V]."""
        ...

    def require_same(self, what: str, values: Sequence[object]) -> None:
        """Whether the values are equal on all ranks; every rank asks.

        Raises:
            CollectiveError: they are not; names the ranks and the first value that differs.
        """
        ...


class OneRank:
    """A model that one rank holds whole."""

    rank = 0
    size = 1
    first_token: int | None = None
    arenas: Sequence[SharedArena] = ()
    agreement: Agreement | None = None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """``x``."""
        return x

    def best_token(self, ops: Ops, logits: torch.Tensor) -> torch.Tensor:
        """The largest logit's token."""
        return ops.argmax_tokens(logits)

    def all_logits(self, ops: Ops, logits: torch.Tensor) -> torch.Tensor:
        """``logits``."""
        return logits

    def require_same(self, what: str, values: Sequence[object]) -> None:
        """They are."""


ONE_RANK: Final[Ranks] = OneRank()


class ManyRanks:
    """A model that is divided among the ranks of a group.

    Args:
        group: for what the host says.
        communicator: for what a step does; one stream at a time.
        arenas, agreement: see :class:`Ranks`.
        largest: bytes of the largest message that the communicator moves at once.

    Raises:
        ModelError: the model cannot be divided among so many.
    """

    def __init__(
        self,
        config: V4Config,
        group: Group,
        communicator: Communicator,
        *,
        largest: int,
        arenas: Sequence[SharedArena] = (),
        agreement: Agreement | None = None,
    ) -> None:
        check_world(config, group.size)
        self.rank, self.size = group.rank, group.size
        self.first_token: int | None = group.rank * config.vocab_size // group.size
        self.arenas, self.agreement = arenas, agreement
        self._vocabulary = config.vocab_size
        self._group = group
        self._communicator = communicator
        self._largest = largest

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Partial sums -> their sum, in place."""
        return self._communicator.all_reduce(x)

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

    def require_same(self, what: str, values: Sequence[object]) -> None:
        """See :meth:`Ranks.require_same`; 8 bytes a value are exchanged."""
        own = [hashlib.sha256(repr(value).encode()).digest()[:8] for value in values]
        found = self._group.exchange(f"comparing {what}", own)
        for rank, other in enumerate(found):
            if other != found[0]:
                pairs = enumerate(zip(found[0], other, strict=False))
                place = next((i for i, (a, b) in pairs if a != b), min(len(found[0]), len(other)))
                raise CollectiveError(
                    f"ranks differ in {what}",
                    found=(
                        f"rank {rank} differs from rank 0 first at {place}, of {len(found[0])} and {len(other)}",
                        f"rank {self._group.rank} has {values[place]!r}" if place < len(values) else "",
                    ),
                    do="run every rank with the same halma, torch, settings and model on machines of one kind",
                )
