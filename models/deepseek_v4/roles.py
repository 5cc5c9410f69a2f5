"""Attention and FFN ranks of one model: who is which, and what they must agree on.

    with opened(group, geometry_of(source.config, attention=1, ffn=1, ...)) as rings:
    attention ranks   load_v4(..., experts=FarExperts(rings)), and an engine on it; then rings.finish()
    FFN ranks         expert_server(rings, held, backend).serve()

Attention ranks have requests of their own and are alike to nobody: they neither capture nor step together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from halma.hal.backend import Backend
from halma.hal.collectives.common_terms import split_experts
from halma.hal.collectives.group import Group
from halma.hal.collectives.ring_contract import RingStaging
from halma.hal.collectives.ring_plan import RingGeometry
from halma.hal.collectives.rings import Rings
from halma.hal.errors import CaptureError
from halma.models.deepseek_v4.config import V4Config
from halma.models.deepseek_v4.expert_loading import ExpertLayers
from halma.models.deepseek_v4.ffn.items import ItemBuffers, ItemSizes
from halma.models.deepseek_v4.ffn.ladder import item_ladder
from halma.models.deepseek_v4.ffn.options import FfnOptions
from halma.models.deepseek_v4.ffn.program import FfnProgram
from halma.models.deepseek_v4.headerless import NextItems, without_headers
from halma.models.deepseek_v4.role_ranks import ItemsChoice
from halma.models.deepseek_v4.serving import EagerItems, ExpertServer, staging_of


def geometry_of(
    config: V4Config,
    *,
    attention: int,
    ffn: int,
    max_tokens: int,
    carrier: torch.dtype,
    arithmetic: str,
    mtp: bool = False,
    experts: tuple[int, ...] = (),
    depth: int = 2,
) -> RingGeometry:
    """The geometry of roles for a model.

    Args:
        max_tokens: most rows of an attention rank's step.
        experts: bounds of the FFN ranks' parts; by default as even as they can be.

    Raises:
        CollectiveError: more FFN ranks than experts, or no such parts.
    """
    wide = torch.float64 if carrier is torch.float64 else torch.float32
    return RingGeometry(
        attention,
        ffn,
        max_tokens,
        config.hidden_size,
        config.num_experts_per_tok,
        experts or split_experts(config.n_routed_experts, ffn, "FFN ranks"),
        config.num_hidden_layers + (config.num_mtp if mtp else 0),
        depth,
        payload=_name(carrier),
        weights=_name(wide),
        # The one reply of a token is rounded where one rank would round it. Several are added up first.
        reply=_name(carrier if ffn == 1 else wide),
        model=(
            ("arithmetic", arithmetic),
            ("moe_intermediate_size", config.moe_intermediate_size),
            ("swiglu_limit", config.swiglu_limit),
            ("expert_dtype", config.expert_dtype),
        ),
    )


@contextmanager
def opened(group: Group, geometry: RingGeometry) -> Iterator[Rings]:
    """The rings of all ranks, from start to end; an exception of this rank is told to the others, with its text.

    Raises:
        CollectiveError, ArenaError, RankError: as :meth:`Rings.open` and :meth:`Rings.close`.
    """
    rings = Rings.open(group, geometry)
    try:
        yield rings
    except BaseException as error:
        rings.leave(str(error) or type(error).__name__)
        raise
    rings.close()


@dataclass(frozen=True)
class ServingOptions:
    """How an FFN rank serves.

    Args:
        graph: from a ladder of graphs, each item by measured cost; off: eagerly, by the very ops of one process.
        strict: an item that would run eagerly because it has no graph is an error.
        checked: poison the workspace's memory as it is freed.
        routes: op name to route name, from the environment.
        measure: time the ladder before serving; off: replay what the padding gate lets.
        items: read headers, serve without them by one graph of the worst case, or whichever was measured to cost less.
    """

    graph: bool = True
    strict: bool = False
    checked: bool = False
    routes: Mapping[str, str] | None = None
    measure: bool = True
    items: ItemsChoice = "headers"


def expert_server(
    rings: Rings, held: ExpertLayers, backend: Backend, options: ServingOptions | None = None
) -> ExpertServer | NextItems:
    """An FFN rank, ready: memory planned, graphs captured. Attention ranks wait for it no longer than a wait's bound,
    so they begin behind it.

    Raises:
        CaptureError: the ladder cannot be captured; or one graph for all items was asked for, and cannot be.
    """
    options = options or ServingOptions()
    staging = staging_of(backend, rings.geometry)
    if not options.graph and options.items == "worst-case":
        raise CaptureError(
            "one graph of the worst case needs graphs",
            asked="--items worst-case",
            found="FFN ranks run eagerly",
            do="--items headers; or --graph, and no HALMA_GRAPH=0",
        )
    if not options.graph:
        items = EagerItems(held, backend, rings.geometry, checked=options.checked, routes=options.routes)
        items.prepare(staging)
        return ExpertServer(rings, items, staging, backend)
    program = ladder_of(rings, held, backend, staging, options)
    program.prepare(measure=options.measure and options.items != "worst-case")
    headerless, why = without_headers(program, options.items)
    if headerless:
        return NextItems(rings, program, staging, backend, why)
    return ExpertServer(rings, program, staging, backend, statistics=program.statistics, close=program.close, why=why)


def ladder_of(
    rings: Rings, held: ExpertLayers, backend: Backend, staging: RingStaging, options: ServingOptions
) -> FfnProgram:
    """The program of an FFN rank's items, on the rings' staging; not prepared."""
    g = rings.geometry
    experts, shared = held.last - held.first, -(-g.max_tokens // g.ffn)
    sizes = ItemSizes(
        g.max_tokens, g.hidden, g.top_k, experts, g.layers, max_shared=shared, every_row_shared=g.ffn == 1
    )
    carrier, acc, reply = (getattr(torch, name) for name in (g.payload, g.weights, g.reply))
    buffers = ItemBuffers(
        backend, sizes, carrier=carrier, acc=acc, rows=staging.rows, ids=staging.ids, weights=staging.weights
    )
    ladder = item_ladder(g.max_tokens, g.top_k, g.ffn, g.experts[-1])
    if options.items == "worst-case":
        ladder = replace(ladder, buckets=ladder.buckets[-1:])
    return FfnProgram(
        held.layers,
        backend,
        buffers,
        ladder,
        FfnOptions(reply, held.config.swiglu_limit, strict=options.strict, checked=options.checked),
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
