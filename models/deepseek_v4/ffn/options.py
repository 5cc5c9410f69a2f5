"""Switches and limits of an FFN program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from halma.hal.settings import GraphSwitch


@dataclass(frozen=True)
class FfnOptions:
    """Switches and limits of a program.

    Args:
        reply: dtype of what :meth:`FfnProgram.run` returns; the accumulator's where several ranks' replies are added.
        limit: ``swiglu_limit``.
        reserve: bytes of free memory that captures must leave; default: ``HALMA_FFN_GRAPH_RESERVE``.
        transport: bytes that the exchange of rows still has to take; left free beside the reserve (F10).
        budget: most bytes that workspace and graphs may take.
        switch: what may be captured; default: what the settings say.
        strict: an item that would run eagerly because it has no graph is an error.
        checked: poison the workspace's memory as it is freed.
        routes: op name to route name.
        by_layer: graphs of each layer's own even where one could serve all.
    """

    reply: torch.dtype
    limit: float
    reserve: int | None = None
    transport: int = 0
    budget: int | None = None
    switch: GraphSwitch | None = None
    strict: bool = False
    checked: bool = False
    routes: Mapping[str, str] | None = None
    by_layer: bool = False
