"""Expert parallelism without roles: every rank attends for requests of its own, and holds a part of the experts.

A layer's rows go to the ranks that hold their experts, and sums come back (:mod:`halma.hal.collectives.exchange`). All
ranks take part in every exchange, so they make equally many steps: one that has nothing to do goes along with steps
that hold no request. How far each is, hosts see on boards; devices wait for one another inside of steps alone.

A step has an exchange for each layer, and with MTP one for each token that it drafts: with one number of drafts all
steps have equally many, whether they verify or feed a prompt.

Where groups of ranks are tensor parallel inside, the ranks of a group have the same rows. Each sends its share of them
and gets their sums back; the all-reduce behind the sublayer gives all of them to all.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

from halma.hal.collectives.exchange import Exchange
from halma.hal.collectives.group import Group
from halma.hal.collectives.ring_board import Peers, open_boards
from halma.hal.graph.forks import fork
from halma.models.deepseek_v4.config import V4Config
from halma.models.deepseek_v4.experts import choices, shared_expert
from halma.models.deepseek_v4.program import Step, V4Model
from halma.models.deepseek_v4.ranks import ONE_RANK, Ranks
from halma.models.deepseek_v4.runner import V4Runner
from halma.models.deepseek_v4.weights import FfnWeights

PAYLOADS: Final = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16"}
NAP: Final = 0.0005


class SpreadExperts:
    """See :class:`halma.models.deepseek_v4.experts.Experts`; :func:`spread` makes it.

    Args:
        ranks: that have the same rows.

    Attributes:
        steps: that this rank issued.
    """

    even = True

    def __init__(self, exchange: Exchange, peers: Peers, ranks: Ranks = ONE_RANK) -> None:
        geometry, rank = exchange.geometry, exchange.rank
        self.held: bool | tuple[int, int] = (geometry.first(rank), geometry.first(rank + 1))
        self.nbytes = geometry.places.end
        self.steps = 0
        self._exchange, self._peers, self._ranks = exchange, peers, ranks

    def ffn(self, model: V4Model, x: torch.Tensor, w: FfnWeights, step: Step) -> torch.Tensor:
        """x [M, D] -> this rank's part of [M, D]; the shared expert is made on a stream beside the exchange."""
        ops, limit, ws = model.ops, model.config.swiglu_limit, model.workspace
        own = slice(*share(x.shape[0], self._ranks))
        out = ws.take(tuple(x.shape), x.dtype)
        with fork(model.side, ws) as branch:
            with branch:
                shared_expert(model, x, w, out)
            ids, weights = choices(model, x, w, step)
            h = self._exchange.dispatch(x[own], ids[own], weights[own])
            counts, offsets = h.counts, h.offsets
            parts = ops.grouped_ffn(h.rows, h.scales, h.index, h.weights, counts, offsets, w.gate_up, w.down, limit)
            routed = self._exchange.combine(parts, h, out=ws.take(tuple(x[own].shape), model.accumulator))
            branch.join()
        if own.start < own.stop:
            ops.add_rows(routed, out[own], x.dtype, out=out[own])
        return out

    def begin_step(self) -> None:
        """Tell the others that there is one more, for which they are waited."""
        self.steps += 1
        self._peers.count(self.steps)

    def poll(self) -> None:
        """See :meth:`halma.models.deepseek_v4.experts.Experts.poll`.

        Raises:
            RankError: a rank left, ended, or did not do its part of an exchange in time.
        """
        self._exchange.poll()
        self._peers.check()

    def go_along(self, runner: V4Runner) -> None:
        """This rank has nothing more to do: make the steps that others still need, until all are done.

        Raises:
            RankError: as :meth:`poll`.
        """
        self._peers.say_done()
        drafts = runner.options.mtp
        empty = runner.verify_descriptor(1, drafts, 1, "greedy") if drafts else runner.decode_descriptor(1, 1, "greedy")
        while True:
            done = self._peers.all_done  # before the look at how far they are: whoever is done makes no step of its own
            if self.steps < self._peers.furthest:
                runner.inputs.fill([], [])
                runner.step(empty)
            elif done:
                break
            else:
                self.poll()
                time.sleep(NAP)
        runner.backend.device.synchronize()
        self.poll()

    def leave(self, reason: str) -> None:
        """This rank fails: the others hear why at their next look."""
        self._peers.leave(reason)


def share(rows: int, ranks: Ranks) -> tuple[int, int]:
    """Which of ``rows`` rows that several ranks have a rank sends, from, to; some send none where there are few.

    The first ranks send one more than the others, so that no rank sends more of fewer rows: steps take scratch for
    what they send, and the largest is planned for all (W1).
    """
    each, rest = divmod(rows, ranks.size)
    first = ranks.rank * each + min(ranks.rank, rest)
    return first, first + each + (ranks.rank < rest)


@contextmanager
def spread(
    config: V4Config, group: Group, *, tokens: int, carrier: torch.dtype, ranks: Ranks = ONE_RANK
) -> Iterator[SpreadExperts]:
    """The experts of a model over the ranks of a group. All ranks come, in and out.

    Args:
        tokens: most rows of a step.
        carrier: dtype of activations.
        ranks: those of the group that share this rank's attention and have its rows.

    Raises:
        CollectiveError: fewer experts than ranks, or ranks that differ.
        ArenaError, RankError: there is no memory for it, on every rank alike; or a rank did not come.
    """
    boards, processes = open_boards(group.ranks)
    peers = Peers(group.ranks, boards, processes, [f"rank {n} ({name})" for n, name in enumerate(group.ranks.names)])
    exchange = Exchange.open(
        group,
        max_tokens=-(-tokens // ranks.size),
        hidden=config.hidden_size,
        top_k=config.num_experts_per_tok,
        experts=config.n_routed_experts,
        payload=PAYLOADS[carrier],
    )
    try:
        yield SpreadExperts(exchange, peers, ranks)
    except BaseException as error:
        peers.leave(str(error) or type(error).__name__)
        raise
    exchange.close()
    for board in boards:
        board.close()
