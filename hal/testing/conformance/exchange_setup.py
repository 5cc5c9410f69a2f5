"""What a rank of a test of exchanges begins with, its routings, and an oracle that knows no slots and no drivers."""

# pyright: basic
from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as distributed

from halma.hal.backend import Backend
from halma.hal.collectives.exchange import Dispatched, Exchange
from halma.hal.collectives.group import Group
from halma.hal.device_value import unwrap
from halma.hal.registry import default_registry
from halma.hal.testing.conformance.capturing import captured, empty
from halma.hal.testing.conformance.collective_setup import PATIENT

HIDDEN: Final = 256
TOP_K: Final = 4
EXPERTS: Final = 20
"""Not a multiple of 8: uneven at 8 ranks."""
MOST: Final = 24
NAN: Final = float("nan")


class Experts:
    """Identity experts: parts [C, D] acc = row x weight; NaN in every slot without a row. Into memory of their own."""

    def __init__(self, backend: Backend, geometry: Any) -> None:
        self._backend, self._geometry = backend, geometry
        self._buffers: dict[int, Any] = {}

    def __call__(self, handed: Any) -> torch.Tensor:
        """Of rows, scales, index and weights."""
        geometry, slots = self._geometry, handed.index.shape[0]
        if slots not in self._buffers:
            sent, acc, empty = handed.rows.dtype, getattr(torch, geometry.accumulator), self._backend.memory.empty
            self._buffers[slots] = (
                empty((slots,), torch.int32), empty((slots, geometry.hidden), sent),
                empty((slots, geometry.hidden), acc), empty((slots,), torch.bool),
                empty((slots, max(geometry.groups, 1)), torch.float32), empty((1, 1), acc).fill_(NAN),
            )  # fmt: skip
        safe, rows, parts, gap, scales, nan = self._buffers[slots]
        torch.clamp(handed.index, min=0, out=safe)
        torch.index_select(_raw(handed.rows), 0, safe, out=_raw(rows))
        parts.copy_(rows)
        if handed.scales is not None:
            torch.index_select(handed.scales, 0, safe, out=scales)
            parts.view(slots, geometry.groups, -1).mul_(scales.unsqueeze(-1))
        parts.mul_(handed.weights.unsqueeze(1))
        torch.lt(handed.index, 0, out=gap)
        torch.where(gap.unsqueeze(1), nan, parts, out=parts)
        return parts


@dataclass
class Side:
    """One rank's side of a test."""

    backend: Backend
    group: Group
    exchange: Exchange
    toys: Experts

    @property
    def device(self) -> torch.device:
        return self.backend.device.torch_device

    def capture(self, program: Callable[[Any], Any]) -> Any:
        return captured(self.backend, program, empty(self.backend))

    def done(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on the host, once the device is done."""
        self.backend.device.synchronize()
        return tensor.detach().cpu().clone()

    def poison(self, byte: int = 0xFF) -> None:
        """One byte, by default NaN, in all of this rank's landing rows and scales; between two calls."""
        self.group.ranks.exchange("nobody sends", None)
        for name in ("rows", "scales"):
            memory = getattr(self.exchange, f"_{name}")
            if memory is not None:
                memory.view(torch.uint8).fill_(byte)
        self.backend.device.synchronize()
        self.group.ranks.exchange("poisoned", None)

    def experts(self, handed: Dispatched) -> torch.Tensor:
        """What :class:`Experts` make of it."""
        return self.toys(handed)


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor


@contextmanager
def exchange_set_up(
    backend: str,
    *,
    payload: str = "bf16",
    alignment: int = 1,
    bound: float = PATIENT,
    first_epoch: int = 0,
    environment: Mapping[str, str] | None = None,
    **geometry: Any,
) -> Generator[Side]:
    """An exchange among all ranks, its landing rows poisoned; closed with the other ranks unless the block raises."""
    os.environ.update(environment or {})
    try:
        group = Group(distributed.group.WORLD, default_registry().select(backend))
        asked = {"max_tokens": MOST, "hidden": HIDDEN, "top_k": TOP_K, "experts": EXPERTS, **geometry}
        exchange = Exchange.open(group, payload=payload, alignment=alignment, first_epoch=first_epoch, **asked)
        exchange.set_bound(bound)
        side = Side(group.backend, group, exchange, Experts(group.backend, exchange.geometry))
        side.poison()
        yield side
        exchange.wait()
        exchange.close()
    finally:
        for name in environment or {}:
            del os.environ[name]


@dataclass(frozen=True)
class Item:
    """What one rank sends: x [M, D] carrier, ids int64 [M, k], weights acc [M, k]; on the host."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor

    def on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.x.to(device), self.ids.to(device), self.weights.to(device)


def item(geometry: Any, rank: int, tokens: int, seed: int, routing: str = "random") -> Item:
    """A rank's tokens. The first two columns say which rank and token it is, so that no swap goes unseen.

    Args:
        routing: ``random``, ``idle`` (no expert at all), ``one`` (all choices the first expert), ``last``,
            ``one rank`` (all choices on the last rank), ``holes`` (some choices and some whole rows have none).
    """
    generator = torch.Generator().manual_seed(100_000 * seed + 100 * rank + tokens)
    shape = (tokens, geometry.top_k)
    x = torch.randn((tokens, geometry.hidden), generator=generator) * torch.rand((tokens, 1), generator=generator) * 8
    x[:, 0] = rank + 1
    x[:, 1] = torch.arange(tokens) + 1
    noise = torch.rand((tokens, geometry.experts), generator=generator)
    ids = noise.argsort(1)[:, : geometry.top_k].contiguous()
    weights = torch.rand(shape, generator=generator) + 0.25
    if routing == "idle":
        ids.fill_(-1)
    elif routing in ("one", "last"):
        ids.fill_(0 if routing == "one" else geometry.experts - 1)
    elif routing == "one rank":
        first = geometry.first(geometry.ranks - 1)
        ids = ids % geometry.local(geometry.ranks - 1) + first
    elif routing == "holes":
        ids[torch.rand(shape, generator=generator) < 0.4] = -1
        ids[::3] = -1
        x[::3] = NAN  # a row without an expert is not read
    carrier, acc = getattr(torch, geometry.given), getattr(torch, geometry.accumulator)
    return Item(x.to(carrier), ids, weights.to(acc))


def rounded(geometry: Any, x: torch.Tensor) -> tuple[np.ndarray, np.ndarray | None]:
    """Rows as they arrive, as raw bytes [M, bytes], and scales; fp8 by numpy's frexp, not by the bits we use."""
    if geometry.payload != "fp8":
        return x.contiguous().view(torch.uint8).numpy().reshape(x.shape[0], geometry.row_bytes), None
    groups = x.double().view(x.shape[0], geometry.groups, 128)
    largest = np.float32(groups.abs().amax(-1).clamp_min(1e-4).numpy()) * np.float32(1.0 / 448.0)
    mantissa, exponent = np.frexp(largest)
    scales = np.exp2(np.where(mantissa == 0.5, exponent - 1, exponent)).astype(np.float32)
    scales = np.where(np.isnan(largest), np.float32(NAN), scales)
    fp8 = (groups / torch.from_numpy(scales).double().unsqueeze(-1)).float().to(torch.float8_e4m3fn)
    return fp8.view(torch.uint8).numpy().reshape(x.shape[0], geometry.row_bytes), scales


def expert_runs(geometry: Any) -> list[list[int]]:
    """Each rank's experts: as even as can be, the first ranks one more. Not by the arithmetic that is tested."""
    return [run.tolist() for run in np.array_split(np.arange(geometry.experts), geometry.ranks)]


def identity_sums(geometry: Any, mine: Item) -> torch.Tensor:
    """What identity experts give back for a rank's tokens, in acc: the definition, token by token and rank by rank."""
    acc, carrier = getattr(torch, geometry.accumulator), getattr(torch, geometry.given)
    runs = expert_runs(geometry)
    raw, scales = rounded(geometry, mine.x)
    out = torch.zeros(mine.x.shape, dtype=acc)
    if not len(raw):
        return out
    data = torch.from_numpy(raw.copy()).view(getattr(torch, geometry.sent)).to(acc)
    if scales is not None:
        data = (data.view(data.shape[0], -1, 128) * torch.from_numpy(scales).unsqueeze(-1)).view(data.shape)
    for token in range(mine.x.shape[0]):
        for rank in range(geometry.ranks):
            part, any_here = torch.zeros(geometry.hidden, dtype=acc), False
            for choice in range(geometry.top_k):
                expert = int(mine.ids[token, choice])
                if expert in runs[rank]:
                    part, any_here = part + data[token] * mine.weights[token, choice], True
            if any_here:
                out[token] += part.to(carrier).to(acc)
    return out


def wrong_slots(side: Side, handed: Dispatched, items: Sequence[Item]) -> list[str]:
    """What of a dispatch is not as it must be, by plain loops over every rank's tokens."""
    geometry, me = side.exchange.geometry, side.exchange.rank
    mine = expert_runs(geometry)[me]
    first, experts = mine[0], len(mine)
    lists: list[list[tuple[int, float, int, int]]] = [[] for _ in range(experts)]
    wrong: list[str] = []
    rows = side.done(handed.rows.view(torch.uint8)).view(geometry.landing, geometry.row_bytes).numpy()
    scales = None if handed.scales is None else side.done(handed.scales).numpy()
    slots = side.done(handed.slots).numpy()
    for rank, one in enumerate(items):
        wanted, wanted_scales = rounded(geometry, one.x)
        for token in range(one.x.shape[0]):
            row = rank * geometry.max_tokens + token
            here = False
            for choice in range(geometry.top_k):
                expert = int(one.ids[token, choice]) - first
                if 0 <= expert < experts:
                    lists[expert].append((row, float(one.weights[token, choice]), rank, choice))
                    here = True
                elif slots[row, choice] != -1:
                    wrong.append(f"slot of ({rank}, {token}, {choice}) is {slots[row, choice]}")
            if here and not np.array_equal(rows[row], wanted[token]):
                wrong.append(f"row of ({rank}, {token})")
            if not here or scales is None or wanted_scales is None:
                continue
            if not np.array_equal(scales[row], wanted_scales[token]):
                wrong.append(f"scales of ({rank}, {token})")
    index, weights = side.done(handed.index).numpy(), side.done(handed.weights).numpy()
    counts, offsets = side.done(unwrap(handed.counts)).tolist(), side.done(unwrap(handed.offsets)).tolist()
    start, wanted_index = 0, np.full(index.shape, -1)
    for expert, found in enumerate(lists):
        if counts[expert] != len(found) or offsets[expert] != start:
            wrong.append(f"expert {expert}: {counts[expert]} from {offsets[expert]}; {len(found)} from {start}")
            return wrong
        for place, (row, weight, _, choice) in enumerate(found):
            wanted_index[start + place] = row
            if slots[row, choice] != start + place or weights[start + place] != np.array(weight, weights.dtype):
                wrong.append(f"slot {start + place} of row {row}, choice {choice}")
        start += -(-len(found) // geometry.alignment) * geometry.alignment
    if offsets[experts] != start or side.done(unwrap(handed.total)).item() != sum(counts):
        wrong.append(f"end {offsets[experts]} and total, not {start} and {sum(counts)}")
    if not np.array_equal(index, wanted_index):
        wrong.append("index")
    return wrong
