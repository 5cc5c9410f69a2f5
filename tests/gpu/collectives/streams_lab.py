"""All-reduces into mixed residual streams for tests: inputs, a float64 reference, and bounds of the difference."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from halma.hal.collectives.contract import Call, Kind, Operands, StreamMix
from tests.gpu.collectives.lab import in_rank_order

STREAMS, MIXES, HANDED = 4, 24, 20
EPS = 1e-6
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Relative to a normal number, of one rounding to the carrier."""
TINY = {torch.bfloat16: 0.0, torch.float16: 2.0**-25}
"""Half of the smallest step near zero; that of bfloat16 is below all else here."""
F32 = 2.0**-24


@dataclass(frozen=True)
class Weights:
    """Of one sublayer, equal on all ranks: fn [24, 4 D], base [24], scale [3] float32, and its norm's weight [D]."""

    fn: torch.Tensor
    base: torch.Tensor
    scale: torch.Tensor
    norm: torch.Tensor


def weights_of(columns: int, seed: int, device: Any, *, dtype: torch.dtype = torch.float32) -> Weights:
    random = torch.Generator().manual_seed(seed)
    fn = torch.randn(MIXES, STREAMS * columns, generator=random) / (STREAMS * columns) ** 0.5
    base, scale = torch.randn(MIXES, generator=random), torch.randn(3, generator=random) * 2
    norm = torch.randn(columns, generator=random).to(dtype)
    return Weights(*(t.to(device) for t in (fn, base, scale, norm)))


class Problem:
    """One boundary on every rank. Every rank has its own copies of what is written; ``spare`` rows behind hold NaN.

    Args:
        cancel: the streams all but cancel in x: the norm comes from a Gram matrix with large terms.
    """

    def __init__(
        self,
        size: int,
        device: Any,
        rows: int,
        columns: int,
        dtype: torch.dtype,
        *,
        seed: int = 0,
        wide_weight: bool = True,
        iterations: int = 20,
        hc_eps: float = EPS,
        cancel: float = 0.0,
    ) -> None:
        random = torch.Generator().manual_seed(seed * 1_000_003 + rows * 10_007 + columns)
        self.rows, self.columns, self.dtype, self.size = rows, columns, dtype, size
        self.iterations, self.hc_eps = iterations, hc_eps
        self.here = weights_of(columns, seed + 1, device)
        self.next = weights_of(columns, seed + 2, device, dtype=torch.float32 if wide_weight else dtype)
        self.first_streams = torch.randn(rows, STREAMS, columns, generator=random)
        sources = torch.randn(size, rows, columns, generator=random)
        self.first_mixes = torch.randn(rows, HANDED, generator=random).to(device)
        if cancel:  # comb and post spread everything evenly, then pre takes about as much of each: sum them to little
            self.first_streams[:, 1::2] = -self.first_streams[:, ::2] * (1 + cancel * torch.randn(1, generator=random))
            sources *= cancel
            self.here = replace(self.here, base=_permuting(self.here.base), scale=torch.zeros_like(self.here.scale))
            even = torch.zeros_like(self.next.base)
            self.next = replace(self.next, base=even, scale=torch.zeros_like(self.next.scale))
        self.first_streams = self.first_streams.to(dtype).to(device)
        self.sources = [source.to(dtype).to(device) for source in sources]
        self.streams = [self._poisoned(rows + 1, STREAMS, columns) for _ in range(size)]
        self.mixes = [torch.full((rows + 1, HANDED), float("nan"), device=device) for _ in range(size)]
        self.norms = [self._poisoned(rows + 1, columns) for _ in range(size)]
        self.reset()
        self.call = Call(
            Kind.ALL_REDUCE_STREAMS,
            rows * columns * dtype.itemsize,
            str(dtype).removeprefix("torch."),
            detail=f"rows of {columns}, {iterations} rounds",
            row_length=columns,
        )

    def _poisoned(self, *shape: int) -> torch.Tensor:
        return torch.full(shape, float("nan"), device=self.here.fn.device).to(self.dtype)

    def reset(self) -> None:
        """Inputs as they were first, on every rank; outputs and the spare rows behind them NaN."""
        for streams, mixes, norm in zip(self.streams, self.mixes, self.norms, strict=True):
            for tensor in (streams, mixes, norm):
                tensor.fill_(float("nan"))
            streams[: self.rows] = self.first_streams
            mixes[: self.rows] = self.first_mixes

    def operands(self, rank: int) -> Operands:
        """In place on the rank's streams and mixes."""
        streams, mixes = self.streams[rank][: self.rows], self.mixes[rank][: self.rows]
        mix = StreamMix(
            streams, mixes, self.here.base, self.here.scale, self.next.fn, self.next.base, self.next.scale,
            self.hc_eps, self.iterations,
        )  # fmt: skip
        return Operands(
            self.sources[rank], streams, weight=self.next.norm, norm_out=self.norms[rank][: self.rows],
            eps=EPS, row_length=self.columns, mix=mix,
        )  # fmt: skip

    # -- what must come out -------------------------------------------------------------------------

    def wrong(self) -> list[str]:
        """What is not as it must be after one call; empty where all is."""
        found = [line for rank in range(self.size) for line in self._untouched(rank)]
        for name, tensors in self._written().items():
            for rank in range(1, self.size):  # C1
                if not torch.equal(tensors[0][: self.rows], tensors[rank][: self.rows]):
                    found.append(f"{name} of rank {rank} have other bits than rank 0's")
        results = (self.streams[0], self.mixes[0], self.norms[0])
        return found + compare(self, *results, self.first_streams, self.first_mixes)

    def _written(self) -> dict[str, list[torch.Tensor]]:
        return {"streams": self.streams, "mixes": self.mixes, "norm": self.norms}

    def _untouched(self, rank: int) -> list[str]:
        return [f"{name} of rank {rank}: a row behind the last was written"
                for name, tensors in self._written().items()
                if not bool(tensors[rank][self.rows :].isnan().all())]  # fmt: skip


def _permuting(base: torch.Tensor) -> torch.Tensor:
    """post 1 and comb a permutation, so that each new stream is an old one plus the sum."""
    made = torch.zeros_like(base)
    made[8:] = torch.eye(STREAMS, device=base.device).flatten() * 40 - 20
    return made


def gates_of(problem: Problem, mixes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 post [M, 4] and comb [M, 4, 4] of raw mixes, by the formula of the model's published code."""
    base, scale = problem.here.base.double(), problem.here.scale.double()
    mixes, eps = mixes.double(), problem.hc_eps
    post = 2 * torch.sigmoid(mixes[:, :4] * scale[1] + base[4:8])
    comb = torch.softmax((mixes[:, 4:] * scale[2] + base[8:]).view(-1, 4, 4), -1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(problem.iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return post, comb


def compare(
    problem: Problem,
    streams: torch.Tensor,
    mixes: torch.Tensor,
    norm: torch.Tensor,
    old_streams: torch.Tensor,
    old_mixes: torch.Tensor,
) -> list[str]:
    """What lies beyond its bound, of one rank's results.

    Each step is compared with float64 on what really went into it, so that bounds do not pile up:

    * streams: one rounding, and 64 units of fp32 of the terms (Sinkhorn's 39 divisions by approximate reciprocals are
      most of them);
    * mixes: 64 units of fp32 of the sum of the terms' magnitudes, as a sum of 4 D terms in a tree has;
    * norm: two roundings (x, then the norm of it), and 32 units times (sum of |pre_i| |h_i|)^2 / |x|^2, with |.| the
      length over columns: how the Gram matrix' errors come through (backends/simt/kernels/streams.cu); and what an
      error of pre, that of its mix through a sigmoid, moves.
    """
    rows, dtype, width = problem.rows, problem.dtype, problem.columns
    unit, tiny = ROUNDING[dtype], TINY[dtype]
    found: list[str] = []

    def look(name: str, got: torch.Tensor, wanted: torch.Tensor, bound: torch.Tensor) -> None:
        error = (got.double() - wanted).abs()
        bad = ~(error <= bound)  # a NaN is bad
        if bool(bad.any()):
            worst = (error / bound).nan_to_num(float("inf")).max()
            found.append(f"{name}: {int(bad.sum())} of {bad.numel()} beyond the bound, worst {float(worst):.2f} of it")

    post, comb = gates_of(problem, old_mixes[:rows])
    y, old = in_rank_order(problem.sources).double(), old_streams[:rows].double()
    wanted = post[:, :, None] * y[:, None] + torch.einsum("mjk,mjd->mkd", comb, old)
    terms = post[:, :, None] * y[:, None].abs() + torch.einsum("mjk,mjd->mkd", comb, old.abs())
    look("streams", streams[:rows], wanted, unit * wanted.abs() + 64 * F32 * terms + tiny)

    h, fn = streams[:rows].double(), problem.next.fn.double()
    flat = h.flatten(1)
    inverse = torch.rsqrt(flat.square().mean(1, keepdim=True) + EPS)
    raw = flat @ fn.t() * inverse
    size = flat.abs() @ fn.abs().t() * inverse
    look("mixes", mixes[:rows], raw[:, 4:], 64 * F32 * size[:, 4:])

    pre = torch.sigmoid(raw[:, :4] * problem.next.scale[0].double() + problem.next.base[:4].double()) + problem.hc_eps
    x = torch.einsum("mi,mid->md", pre, h)
    root = torch.rsqrt(x.square().mean(1, keepdim=True) + EPS)
    lengths = (pre * h.square().sum(2).sqrt()).sum(1, keepdim=True)
    spread = lengths.square() / (x.square().sum(1, keepdim=True) + width * EPS)
    weight = problem.next.norm.double()
    wanted = x * root * weight
    terms = torch.einsum("mi,mid->md", pre, h.abs()) * root * weight.abs()
    of_pre = 64 * F32 * size[:, :4].max() * problem.next.scale[0].double().abs()  # mixes' bound, through a sigmoid
    bound = (2.01 * unit + 32 * F32 * (1 + spread)) * wanted.abs() + (16 * F32 + of_pre) * terms * (1 + spread.sqrt())
    look("norm", norm[:rows], wanted, bound + tiny * (1 + root * weight.abs()))
    return found
