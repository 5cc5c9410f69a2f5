"""Ranks over gloo alone: an oracle for the steps of a divided model that needs no arena and no channel.

Sums are taken in float32 (float64 for float64), in the order of the ranks, then rounded once: the arithmetic that
every all-reduce of the layer has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from halma.hal.graph.current import current_recorder


class GlooGroup:
    def __init__(self, group: Any) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def exchange(self, stage: str, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, (stage, value), group=self.group)
        assert {one[0] for one in found} == {stage}
        return [one[1] for one in found]


class GlooCommunicator:
    """Host work; inside a capture a node of its own."""

    def __init__(self, group: Any) -> None:
        self.group, self.size = group, dist.get_world_size(group)
        self.calls: list[tuple[str, int]] = []

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        def run() -> None:
            parts = [torch.empty_like(x) for _ in range(self.size)]
            dist.all_gather(parts, x, group=self.group)
            total = parts[0].to(torch.promote_types(x.dtype, torch.float32))
            for part in parts[1:]:
                total = total + part
            x.copy_(total)

        return self._call("all_reduce", run, x, x)

    def all_gather(self, x: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        def run() -> None:
            dist.all_gather(list(out.unbind(0)), x, group=self.group)

        return self._call("all_gather", run, x, out)

    def _call(self, name: str, run: Callable[[], None], x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        assert x.is_contiguous() and out.is_contiguous()
        self.calls.append((name, x.nbytes))
        recorder = current_recorder()
        if recorder is None:
            run()
        else:
            recorder.record_node(name, run, reads=[x], writes=[out])
        return out
