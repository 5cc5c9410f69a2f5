"""Expert parallelism without roles: every rank attends for requests of its own, and holds a part of the experts.

A layer's rows go to the ranks that hold their experts, and sums come back (:mod:`halma.hal.collectives.exchange`). All
ranks take part in every exchange, so they make equally many steps: one that has nothing to do goes along with steps
that hold no request. How far each is, hosts see on boards; devices wait for one another inside of steps alone.
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
from halma.models.deepseek_v4.experts import choices
from halma.models.deepseek_v4.program import Step, V4Model
from halma.models.deepseek_v4.runner import V4Runner
from halma.models.deepseek_v4.weights import FfnWeights

PAYLOADS: Final = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16"}
NAP: Final = 0.0005


class SpreadExperts:
    """See :class:`halma.models.deepseek_v4.experts.Experts`; :func:`spread` makes it.

    Attributes:
        steps: that this rank issued.
    """

    def __init__(self, exchange: Exchange, peers: Peers) -> None:
        geometry, rank = exchange.geometry, exchange.rank
        self.held: bool | tuple[int, int] = (geometry.first(rank), geometry.first(rank + 1))
        self.nbytes = geometry.places.end
        self.steps = 0
        self._exchange, self._peers = exchange, peers

    def ffn(self, model: V4Model, x: torch.Tensor, w: FfnWeights, step: Step) -> torch.Tensor:
        """x [M, D] -> [M, D]; the shared expert is this rank's own, on a stream beside the exchange."""
        ops, limit, ws = model.ops, model.config.swiglu_limit, model.workspace
        with fork(model.side, ws) as branch:
            with branch:
                shared = ops.swiglu(ops.linear(x, w.shared_gate_up), limit)
                shared = ops.linear(shared, w.shared_down)
            ids, weights = choices(model, x, w, step)
            h = self._exchange.dispatch(x, ids, weights)
            counts, offsets = h.counts, h.offsets
            parts = ops.grouped_ffn(h.rows, h.scales, h.index, h.weights, counts, offsets, w.gate_up, w.down, limit)
            routed = self._exchange.combine(parts, h, out=ws.take(tuple(x.shape), model.accumulator))
            branch.join()
            return ops.add_rows(routed, shared, x.dtype)

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
        empty = runner.decode_descriptor(1, 1, "greedy")
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


@contextmanager
def spread(config: V4Config, group: Group, *, tokens: int, carrier: torch.dtype) -> Iterator[SpreadExperts]:
    """The experts of a model over the ranks of a group. All ranks come, in and out.

    Args:
        tokens: most rows of a step.
        carrier: dtype of activations.

    Raises:
        CollectiveError: fewer experts than ranks, or ranks that differ.
        ArenaError, RankError: there is no memory for it, on every rank alike; or a rank did not come.
    """
    boards, processes = open_boards(group.ranks)
    peers = Peers(group.ranks, boards, processes, [f"rank {n} ({name})" for n, name in enumerate(group.ranks.names)])
    exchange = Exchange.open(
        group,
        max_tokens=tokens,
        hidden=config.hidden_size,
        top_k=config.num_experts_per_tok,
        experts=config.n_routed_experts,
        payload=PAYLOADS[carrier],
    )
    try:
        yield SpreadExperts(exchange, peers)
    except BaseException as error:
        peers.leave(str(error) or type(error).__name__)
        raise
    exchange.close()
    for board in boards:
        board.close()
