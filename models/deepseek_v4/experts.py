"""Who does the feed-forward sublayer of a step: this rank, or FFN ranks that it sends rows to.

The router is always this rank's. Notation as in :mod:`halma.models.deepseek_v4.program`; k choices a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

import torch

from halma.hal.collectives.rings import Rings
from halma.hal.dispatch import Ops
from halma.hal.graph.forks import fork
from halma.models.deepseek_v4.weights import FfnWeights

if TYPE_CHECKING:
    from halma.models.deepseek_v4.program import Step, V4Model


class Experts(Protocol):
    """The experts of a model, wherever they are.

    Attributes:
        held: which routed experts' weights this rank loads: all, none, or some, from, to.
        nbytes: of memory that is shared with other ranks for their sake, on this rank.
        even: ranks with other requests take part in every sublayer, so all steps must have equally many.
    """

    held: bool | tuple[int, int]
    nbytes: int
    even: bool

    def ffn(self, model: V4Model, x: torch.Tensor, w: FfnWeights, step: Step) -> torch.Tensor:
        """x [M, D] -> this rank's part of [M, D]: the chosen experts, weighted, and the shared one."""
        ...

    def begin_step(self) -> None:
        """A step is about to be issued, eager or replayed."""
        ...

    def poll(self) -> None:
        """Look for a fault; waits for nothing.

        Raises:
            RankError: a rank did not do its part: what was computed since means nothing.
        """
        ...


class OwnExperts:
    """This rank's own; the shared one on a stream beside the chosen ones."""

    held: bool | tuple[int, int] = True
    nbytes = 0
    even = False

    def ffn(self, model: V4Model, x: torch.Tensor, w: FfnWeights, step: Step) -> torch.Tensor:
        """See :meth:`Experts.ffn`."""
        ops, config = model.ops, model.config
        with fork(model.side, model.workspace) as branch:
            with branch:
                shared = shared_expert(model, x, w)
            ids, weights = choices(model, x, w, step)
            routed = ops.expert_ffn(x, ids, weights, w.gate_up, w.down, config.swiglu_limit)
            branch.join()
            return ops.add_rows(routed, shared, x.dtype)

    def begin_step(self) -> None:
        """Nobody else takes part."""

    def poll(self) -> None:
        """Nobody else takes part."""


OWN_EXPERTS: Final[Experts] = OwnExperts()


class FarExperts:
    """Those of FFN ranks: rows go there and their sum comes back, in one step and without the host."""

    held: bool | tuple[int, int] = False
    even = False

    def __init__(self, rings: Rings) -> None:
        self._rings = rings
        self.nbytes = rings.nbytes

    def ffn(self, model: V4Model, x: torch.Tensor, w: FfnWeights, step: Step) -> torch.Tensor:
        """See :meth:`Experts.ffn`."""
        ids, weights = choices(model, x, w, step)
        self._rings.submit(w.layer, x, ids, weights)
        return self._rings.collect(model.workspace.take(tuple(x.shape), x.dtype))

    def begin_step(self) -> None:
        """FFN ranks take what comes."""

    def poll(self) -> None:
        """See :meth:`Experts.poll`."""
        self._rings.poll()


def shared_expert(model: V4Model, x: torch.Tensor, w: FfnWeights, out: torch.Tensor | None = None) -> torch.Tensor:
    """x [M, D] -> this rank's part of the shared expert [M, D]."""
    return shared_rows(model.ops, x, w, model.config.swiglu_limit, out)


def shared_rows(
    ops: Ops, x: torch.Tensor, w: FfnWeights, limit: float, out: torch.Tensor | None = None
) -> torch.Tensor:
    """x [M, D] through the shared expert -> [M, D]. Where ``down`` rounds its input it is given the codes: SwiGLU and
    the rounding are one op then, and may be one launch."""
    hidden = ops.linear(x, w.shared_gate_up)
    if w.shared_down.activation is None:
        return ops.linear(ops.swiglu(hidden, limit), w.shared_down, out=out)
    codes, scales = ops.swiglu_fp8(hidden, limit)
    return ops.linear_fp8(codes, scales, w.shared_down, x.dtype, out=out)


def choices(model: V4Model, x: torch.Tensor, w: FfnWeights, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
    """x [M, D] -> the experts that each row chooses, int64 [M, k], and their weights [M, k]."""
    ops, config = model.ops, model.config
    scores = ops.route_scores(x, w.gate)
    scale = config.routed_scaling_factor
    if w.tid2eid is not None:
        ids, weights = ops.lookup_experts(scores, w.tid2eid, step.tokens, scale)
    else:
        ids, weights = ops.select_experts(scores, w.bias, config.num_experts_per_tok, scale)
    if model.tap is not None:
        model.tap("route_ids", ids)
        model.tap("route_weights", weights)
    return ids, weights
