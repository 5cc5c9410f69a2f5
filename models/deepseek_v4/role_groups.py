"""Attention ranks that share a model: each group of ``tp`` of them is one attention rank of the rings.

After every all-reduce the ranks of a group have the same rows (C1), so any of them can send them. The first one sends
them all and gets the replies; the others add rows of zeros, and the all-reduce that follows every sublayer anyway is
what gives them the reply. So a group sends one item a layer, and an FFN rank reads each expert's weights once for it;
were rows cut among the ranks of a group, it would read them up to ``tp`` times, and the host would see as many headers.

    roles = RoleRanks(attention=4, ffn=2, tp=2)
    rings among roles.rings; in each of roles.groups attending(...), and a runner with its ranks and its experts
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import torch

from halma.hal.collectives.group import Group
from halma.hal.collectives.ring_board import LOOK_SECONDS, Peers, open_boards
from halma.hal.collectives.rings import Rings
from halma.hal.errors import RankError
from halma.models.deepseek_v4.config import V4Config
from halma.models.deepseek_v4.experts import FarExperts
from halma.models.deepseek_v4.program import Step, V4Model
from halma.models.deepseek_v4.ranks import ManyRanks, divided
from halma.models.deepseek_v4.weights import FfnWeights

LAST_WORD: Final = 10.0
"""Seconds that a rank waits for what the first of its group is about to say; on a busy machine 2 were too few."""
OWN_LOOK: Final = 2 * LOOK_SECONDS
NAP: Final = 0.01


class GroupExperts:
    """The FFN ranks' experts as a group of attention ranks asks them. See :class:`FarExperts`.

    Args:
        rings: of the group's first rank; None on the others.
        peers: the ranks of the group.
        zeros: [most rows of a step, D] of the accumulator's dtype.
    """

    held: bool | tuple[int, int] = False
    even = False

    def __init__(self, rings: Rings | None, peers: Peers, zeros: torch.Tensor) -> None:
        self._far = None if rings is None else FarExperts(rings)
        self._peers, self._zeros = peers, zeros
        self.nbytes = 0 if rings is None else rings.nbytes

    def ffn(self, model: V4Model, x: torch.Tensor, w: FfnWeights, step: Step) -> torch.Tensor:
        """x [M, D] -> [M, D]: all of it on the group's first rank, zeros on the others."""
        if self._far is not None:
            return self._far.ffn(model, x, w, step)
        nothing = self._zeros[: x.shape[0]]
        return model.ops.add_rows(nothing, nothing, x.dtype)

    def begin_step(self) -> None:
        """FFN ranks take what comes."""

    def poll(self) -> None:
        """See :meth:`halma.models.deepseek_v4.experts.Experts.poll`.

        Raises:
            RankError: also where a rank of the group left or ended.
        """
        if self._far is not None:
            self._far.poll()
        self._peers.check()


@dataclass(frozen=True, eq=False)
class Attending:
    """A rank of a group: what its runner is made with."""

    ranks: ManyRanks
    experts: GroupExperts
    group: Group
    rings: Rings | None
    peers: Peers

    def finish(self) -> None:
        """This rank asks nothing more; until that holds for its group, and through its rings for everybody.

        Raises:
            RankError: a rank left or ended, or the device found a fault.
        """
        self.group.backend.device.synchronize()
        self.ranks.poll()
        if self.rings is not None:
            self.rings.finish()
        self.peers.say_done()
        self.peers.wait_done()


@contextmanager
def attending(
    config: V4Config, group: Group, rings: Rings | None, *, tokens: int, carrier: torch.dtype
) -> Iterator[Attending]:
    """A group of attention ranks, which share a model. All of them come, in and out.

    A rank that fails tells the group why (F16): the first one hears of FFN ranks, and the others from it.

    Args:
        rings: of the group's first rank, as ``roles.opened`` gives them; None on the others.
        tokens: most rows of a step.
        carrier: dtype of activations.

    Raises:
        ModelError: the model cannot be divided among so many.
        ArenaError, RankError: there is no memory for it, on every rank alike; or a rank did not come.
    """
    boards, processes = open_boards(group.ranks)
    peers = Peers(group.ranks, boards, processes, [f"{name} of an attention group" for name in group.ranks.names])
    acc = torch.float64 if carrier is torch.float64 else torch.float32
    zeros = group.backend.memory.empty((tokens, config.hidden_size), acc).zero_()
    try:
        with divided(config, group, tokens=tokens, carrier=carrier) as ranks:
            yield Attending(ranks, GroupExperts(rings, peers, zeros), group, rings, peers)
    except RankError as error:
        known = _known_better(rings, peers)
        peers.leave(str(known or error))
        if known is not None:
            raise known from error
        raise
    except BaseException as error:
        peers.leave(str(error) or type(error).__name__)
        raise
    for board in boards:
        board.close()


def _known_better(rings: Rings | None, peers: Peers) -> RankError | None:
    """Who is to blame, where this rank's error names another. A rank that waited for its group's first one in vain saw
    no more than that; the first one may have waited as long for an FFN rank, and is about to say so. What it knows from
    its rings is nearer to the cause than what ranks say that waited for it."""
    end = time.monotonic() + (LAST_WORD if rings is None else OWN_LOOK)
    while True:
        try:
            if rings is not None:
                rings.poll()
            peers.check()
        except RankError as error:
            return error
        if time.monotonic() >= end:
            return None
        time.sleep(NAP)
