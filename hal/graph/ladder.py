"""Ladders: the descriptors that a program is captured for, made so that nothing reachable falls between them.

A ladder is a plain tuple. Its largest descriptor is exactly the largest step there can be (G16): a grid of sizes
that stops short of it leaves the fullest batches without a graph, and only load shows it
(vllm-project/vllm#54933).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from halma.hal.errors import CaptureError
from halma.hal.graph.descriptor import Descriptor


def doubling(smallest: int, largest: int) -> tuple[int, ...]:
    """smallest, twice that, ... up to and always including ``largest``.

    Raises:
        CaptureError: it starts below 1, or above its end.
    """
    if not 1 <= smallest <= largest:
        raise CaptureError(
            "these sizes cannot be doubled",
            asked=f"sizes from {smallest} to {largest}",
            do="start at 1 or more, and end no lower",
        )
    sizes = [smallest]
    while sizes[-1] < largest:
        sizes.append(min(sizes[-1] * 2, largest))
    return tuple(sizes)


def decode_ladder(
    max_requests: int,
    *,
    sizes: Sequence[int] | None = None,
    query_lens: Sequence[int] = (1,),
    context_capacities: Sequence[int] = (0,),
    role: str = "decode",
    variants: Sequence[str] = ("",),
    limit: int | None = None,
) -> tuple[Descriptor, ...]:
    """Every descriptor of a uniform step: each number of requests with each width, context and variant.

    Args:
        max_requests: the widest step; always in the ladder, whatever ``sizes`` says.
        sizes: numbers of requests; by default 1, 2, 4, ... up to the maximum.
        query_lens: tokens a request that can occur: (1,), or every width that speculation can reach.
        context_capacities: context lengths that shapes are made for.
        role, variants: as in :class:`Descriptor`.
        limit: requests that the program's state holds.

    Raises:
        CaptureError: nothing to make one of; a size below 1, above ``max_requests`` or above ``limit``; a duplicate.
    """
    if max_requests < 1 or not (query_lens and context_capacities and variants):
        raise CaptureError(
            f"the ladder of {role} is empty",
            asked=f"max_requests={max_requests}, query_lens={list(query_lens)}, "
            f"context_capacities={list(context_capacities)}, variants={list(variants)}",
            do="give at least one request, and one value of each",
        )
    chosen = list(doubling(1, max_requests) if sizes is None else sizes)
    if max_requests not in chosen:
        chosen.append(max_requests)
    made = tuple(
        Descriptor(role, size, query_len, capacity, variant)
        for capacity in context_capacities
        for variant in variants
        for query_len in query_lens
        for size in chosen
    )
    refuse_unfit(made, limit=max_requests if limit is None else min(limit, max_requests))
    return made


def ladder(
    *,
    limit: int | None = None,
    query_lens: Sequence[int] = (1,),
    context_capacities: Sequence[int] = (0,),
    variants: Sequence[str] = ("",),
    **roles: int | Sequence[int],
) -> tuple[Descriptor, ...]:
    """Ladders of several roles: ``ladder(decode=[1, 2, 4, 8], verify=8, query_lens=(1, 2))``.

    A number is the role's maximum, a list its sizes, of which the largest is the maximum.

    Raises:
        CaptureError: as :func:`decode_ladder`; a role without sizes.
    """
    made: list[Descriptor] = []
    for role, sizes in roles.items():
        if not isinstance(sizes, int) and not sizes:
            raise CaptureError(f"the ladder of {role} is empty", asked=f"{role}=[]", do="name at least one size")
        made += decode_ladder(
            sizes if isinstance(sizes, int) else max(sizes),
            sizes=None if isinstance(sizes, int) else sizes,
            query_lens=query_lens,
            context_capacities=context_capacities,
            role=role,
            variants=variants,
            limit=limit,
        )
    return tuple(made)


def refuse_unfit(descriptors: Iterable[Descriptor], *, limit: int | None = None) -> None:
    """Refuse a ladder that cannot be captured as it stands.

    Raises:
        CaptureError: a descriptor occurs twice, holds nothing, or has more requests than ``limit``; it is named.
    """
    seen: set[Descriptor] = set()
    for one in descriptors:
        if one.num_requests < 1 or one.query_len < 1:
            raise CaptureError(
                f"{one} holds nothing",
                asked=f"num_requests={one.num_requests}, query_len={one.query_len}",
                found=f"{one.num_requests} requests of {one.query_len} tokens",
                do="sizes and widths of a ladder start at 1",
            )
        if limit is not None and one.num_requests > limit:
            raise CaptureError(
                f"{one} is wider than what it runs on",
                asked=f"{one.num_requests} requests",
                found=f"the state holds {limit}",
                do=f"leave out sizes above {limit}, or make the state for {one.num_requests} requests",
            )
        if one in seen:
            raise CaptureError(
                f"{one} is in the ladder twice",
                do="every descriptor of a ladder is captured once; drop the duplicate",
            )
        seen.add(one)


def fit(
    descriptors: Iterable[Descriptor],
    *,
    role: str,
    num_requests: int,
    query_len: int = 1,
    context: int = 0,
    variant: str = "",
) -> Descriptor | None:
    """The smallest descriptor that holds a step, or None where none does; the step is then padded up to it.

    Smallest by rows, then by context. Pad before anything is built from the step's shape.
    """
    return min(
        (
            one
            for one in descriptors
            if one.num_requests >= num_requests
            and one.query_len >= query_len
            and one.context_capacity >= context
            and one.role == role
            and one.variant == variant
        ),
        key=_size,
        default=None,
    )


def _size(one: Descriptor) -> tuple[int, int, int]:
    return (one.num_tokens, one.context_capacity, one.num_requests)


def largest_of(descriptors: Sequence[Descriptor]) -> Descriptor:
    """One descriptor as large as all of them in every direction; it need not be among them."""
    return replace(
        descriptors[0],
        num_requests=max(one.num_requests for one in descriptors),
        query_len=max(one.query_len for one in descriptors),
        context_capacity=max(one.context_capacity for one in descriptors),
    )
