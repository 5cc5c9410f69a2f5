"""Expert parallelism over the ranks of tensor parallelism: every rank has the same rows, and a part of the experts.

Nothing is exchanged for it. A rank runs the (row, choice) pairs that fall to its experts and adds its part of the
shared expert; the all-reduce that follows every feed-forward sublayer adds the ranks up (docs/exchange.md has the
bytes). Attention, the shared expert and the vocabulary are divided as without (:mod:`halma.models.deepseek_v4.ranks`).
"""

from __future__ import annotations

from typing import Final

import torch

from halma.hal.collectives.common_terms import split_experts
from halma.hal.errors import ModelError
from halma.hal.graph.forks import fork
from halma.models.deepseek_v4.config import V4Config
from halma.models.deepseek_v4.experts import choices, shared_expert
from halma.models.deepseek_v4.program import Step, V4Model
from halma.models.deepseek_v4.ranks import Ranks
from halma.models.deepseek_v4.weights import FfnWeights

ALIGNMENT: Final = 1
"""Of an expert's first slot: the grouped products walk offsets, so gaps would be slots that nobody uses."""


class PartedExperts:
    """See :class:`halma.models.deepseek_v4.experts.Experts`; the ranks may have unequally many.

    Args:
        ranks: of tensor parallelism, which are those of the experts too.

    Raises:
        ModelError: fewer experts than ranks.
    """

    nbytes = 0
    even = False

    def __init__(self, config: V4Config, ranks: Ranks) -> None:
        check_parts(config, ranks.size)
        bounds = split_experts(config.n_routed_experts, ranks.size)
        self.held: bool | tuple[int, int] = (bounds[ranks.rank], bounds[ranks.rank + 1])
        self._first, self._count = bounds[ranks.rank], bounds[ranks.rank + 1] - bounds[ranks.rank]

    def ffn(self, model: V4Model, x: torch.Tensor, w: FfnWeights, step: Step) -> torch.Tensor:
        """x [M, D], the same on every rank -> this rank's part of [M, D].

        A row none of whose experts is here gets zeros, and its part of the shared expert.
        """
        ops, limit = model.ops, model.config.swiglu_limit
        with fork(model.side, model.workspace) as branch:
            with branch:
                shared = shared_expert(model, x, w)
            ids, weights = choices(model, x, w, step)
            laid = ops.expert_layout(ids, weights, self._first, self._count, ALIGNMENT)
            index, slot_weights, counts, offsets, slots = laid
            parts = ops.grouped_ffn(x, None, index, slot_weights, counts, offsets, w.gate_up, w.down, limit)
            routed = ops.expert_sum(parts, slots)
            branch.join()
            return ops.add_rows(routed, shared, x.dtype)

    def begin_step(self) -> None:
        """The ranks make the same steps anyway."""

    def poll(self) -> None:
        """What the ranks exchange is the model's own all-reduce, which is looked at for it."""


def check_parts(config: V4Config, ranks: int) -> None:
    """Whether every rank can have an expert.

    Raises:
        ModelError: there are fewer; says how many ranks there may be.
    """
    if ranks > config.n_routed_experts:
        raise ModelError(
            "there are more ranks than experts",
            asked=f"{ranks} ranks with a part of the experts each",
            found=f"{config.n_routed_experts} routed experts a layer",
            do=f"--ep 1 to {config.n_routed_experts}",
        )
