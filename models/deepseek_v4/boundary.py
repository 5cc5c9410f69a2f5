"""The boundary between two sublayers (mHC): one's output goes into all residual streams, a mix of them into the next.

In parts it is one all-reduce and three ops. Where the arithmetic is the shipping one and a channel can do it as a whole
it is one call (docs/collectives.md), which rounds in other places, as exact arithmetic may not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from halma.hal.collectives.contract import StreamMix
from halma.hal.collectives.mixing import HANDED, STREAMS
from halma.models.deepseek_v4.weights import HyperConnection

if TYPE_CHECKING:
    from halma.models.deepseek_v4.program import V4Model
    from halma.models.deepseek_v4.ranks import Mixer

Entrance = tuple[HyperConnection, torch.Tensor]
"""Into a sublayer: how the streams are mixed, and the weight [D] of that mix's norm."""


class Boundary(Protocol):
    """What a step keeps between sublayers. Each ``x`` [M, D] that it returns lives until the next one is made.

    Attributes:
        streams: [M, n, D], after the sublayers so far.
    """

    streams: torch.Tensor

    def enter(self, entrance: Entrance) -> torch.Tensor:
        """The step's first sublayer begins: its input."""
        ...

    def cross(self, y: torch.Tensor, entrance: Entrance) -> torch.Tensor:
        """A sublayer ends with this rank's part ``y`` [M, D] of its output, and the next begins: its input."""
        ...

    def leave(self, y: torch.Tensor) -> None:
        """The step's last sublayer ends."""
        ...


def boundary(model: V4Model, streams: torch.Tensor) -> Boundary:
    """The boundaries of a step over ``streams`` [M, n, D], which they write to; they take memory for all of it."""
    mixer = mixer_of(model, streams.shape[0])
    return InParts(model, streams) if mixer is None else AsAWhole(model, streams, mixer)


def mixer_of(model: V4Model, rows: int) -> Mixer | None:
    """What makes the boundaries of a step of ``rows`` rows as a whole; None where they go in parts."""
    config = model.config
    if model.arithmetic != "shipping" or config.hc_mult != STREAMS:
        return None
    return model.ranks.mixer(rows, config.hidden_size, model.carrier)


class InParts:
    """All-reduce, ``hc_post``, ``hc_pre``, ``rms_norm``. See :class:`Boundary`."""

    def __init__(self, model: V4Model, streams: torch.Tensor) -> None:
        rows, count, width = streams.shape
        take = model.workspace.take
        self.streams = streams
        self._model, self._other = model, take(streams.shape, streams.dtype)
        self._x = take((rows, width), streams.dtype)
        self._post = take((rows, count), model.accumulator)
        self._comb = take((rows, count, count), model.accumulator)

    def enter(self, entrance: Entrance) -> torch.Tensor:
        """See :meth:`Boundary.enter`."""
        model, (hc, norm) = self._model, entrance
        ops, config = model.ops, model.config
        with model.workspace.scope("enter"):
            mixed = model.workspace.take(self._x.shape, self._x.dtype)
            ops.hc_pre(
                self.streams, hc.fn, hc.base, hc.scale, config.rms_norm_eps, config.hc_eps, config.hc_sinkhorn_iters,
                out=(mixed, self._post, self._comb),
            )  # fmt: skip
            return ops.rms_norm(mixed, norm, config.rms_norm_eps, out=self._x)

    def cross(self, y: torch.Tensor, entrance: Entrance) -> torch.Tensor:
        """See :meth:`Boundary.cross`."""
        self.leave(y)
        return self.enter(entrance)

    def leave(self, y: torch.Tensor) -> None:
        """See :meth:`Boundary.leave`."""
        y = self._model.ranks.all_reduce(y)
        self._model.ops.hc_post(y, self.streams, self._post, self._comb, out=self._other)
        self.streams, self._other = self._other, self.streams


class AsAWhole:
    """One call a boundary; a step begins and ends with half of one. See :class:`Boundary`."""

    def __init__(self, model: V4Model, streams: torch.Tensor, mixer: Mixer) -> None:
        rows, _, width = streams.shape
        take = model.workspace.take
        self.streams = streams
        self._model, self._mixer = model, mixer
        self._x = take((rows, width), streams.dtype)
        self._mixes = take((rows, HANDED), model.accumulator)
        self._last = take(streams.shape, streams.dtype)
        self._here: HyperConnection | None = None
        """Of the sublayer that is running: its post and comb are still to come, of the mixes."""

    def enter(self, entrance: Entrance) -> torch.Tensor:
        """See :meth:`Boundary.enter`."""
        model, (hc, norm) = self._model, entrance
        ops, eps = model.ops, model.config.rms_norm_eps
        with model.workspace.scope("enter"):
            mixed = model.workspace.take(self._x.shape, self._x.dtype)
            out = (mixed, self._mixes)
            ops.hc_read(self.streams, hc.fn, hc.base, hc.scale, eps, model.config.hc_eps, out=out)
            ops.rms_norm(mixed, norm, eps, out=self._x)
        self._here = hc
        return self._x

    def cross(self, y: torch.Tensor, entrance: Entrance) -> torch.Tensor:
        """See :meth:`Boundary.cross`."""
        config, here, (hc, norm) = self._model.config, self._entered(), entrance
        mix = StreamMix(
            self.streams, self._mixes, here.base, here.scale, hc.fn, hc.base, hc.scale,
            config.hc_eps, config.hc_sinkhorn_iters,
        )  # fmt: skip
        self._mixer(y, mix, norm, eps=config.rms_norm_eps, out=self._x)
        self._here = hc
        return self._x

    def leave(self, y: torch.Tensor) -> None:
        """See :meth:`Boundary.leave`."""
        model, here = self._model, self._entered()
        config = model.config
        y = model.ranks.all_reduce(y)
        with model.workspace.scope("leave"):
            gates = (here.base, here.scale, config.hc_eps, config.hc_sinkhorn_iters)
            post, comb = model.ops.hc_gates(self._mixes, *gates)
            model.ops.hc_post(y, self.streams, post, comb, out=self._last)
        self.streams = self._last

    def _entered(self) -> HyperConnection:
        assert self._here is not None, "enter() comes first"
        return self._here
