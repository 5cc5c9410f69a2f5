"""halma: DeepSeek-V4's decode, MTP and FFN paths, written once, over a hardware abstraction layer.

The layer's graph capture can be used alone, for functions of one's own; these names are all it takes::

    backend = halma.backend("cpu")
    x = halma.persistent_input("x", (8, 64), torch.float32, backend=backend)
    with halma.session(backend=backend, inputs=[x]) as session:
        for descriptor in halma.ladder(decode=[1, 2, 4, 8]):
            session.capture(descriptor, program_of(descriptor))  # a function without arguments
    y = session.replay(halma.fit(session.descriptors, role="decode", num_requests=3), x=rows)

``README.md`` has a whole example. Nothing here imports torch before it is used.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from halma.hal.backend import Backend
    from halma.hal.collectives.group import Group
    from halma.hal.graph.breakable import CaptureMode as CaptureMode
    from halma.hal.graph.breaks import break_point as break_point
    from halma.hal.graph.breaks import eager_break as eager_break
    from halma.hal.graph.cells import Cell as Cell
    from halma.hal.graph.descriptor import Descriptor as Descriptor
    from halma.hal.graph.forks import fork as fork
    from halma.hal.graph.inputs import InputSet, Number, Per, PersistentInput
    from halma.hal.graph.ladder import fit as fit
    from halma.hal.graph.ladder import ladder as ladder
    from halma.hal.graph.session import CaptureSession
    from halma.hal.workspace import Workspace

__version__ = "0.1.0"

_HOMES = {
    "CaptureMode": "breakable",
    "Cell": "cells",
    "Descriptor": "descriptor",
    "break_point": "breaks",
    "eager_break": "breaks",
    "fit": "ladder",
    "fork": "forks",
    "ladder": "ladder",
}
"""Names of the layer's graphs that are fetched when they are first used: name -> module of halma.hal.graph."""

__all__ = [
    "CaptureMode",
    "Cell",
    "Descriptor",
    "__version__",
    "backend",
    "break_point",
    "collectives",
    "eager_break",
    "fit",
    "fork",
    "ladder",
    "persistent_input",
    "session",
]


def backend(name: str | None = None) -> Backend:
    """The backend called ``name``, else ``HALMA_BACKEND``, else the one usable accelerator.

    Raises:
        BackendError: none, several or an unusable one; the message lists every reason.
    """
    from halma.hal.registry import default_registry

    return default_registry().select(name)


def session(
    kind: str = "persistent",
    *,
    backend: Backend | str | None = None,
    workspace: Workspace | None = None,
    inputs: Sequence[PersistentInput] | InputSet = (),
    breaks: bool = False,
    **options: Any,
) -> CaptureSession:
    """A session that captures programs into graphs on one workspace; :class:`CaptureSession` tells the rest.

    Args:
        kind: ``persistent`` keeps its graphs, ``scratch`` gives everything back when its block ends.
        backend: one from :func:`backend`, or its name; by default the one that :func:`backend` chooses.
        workspace: what programs take their memory from; by default a new one, ``session.workspace``, with the
            checks of ``HALMA_CHECKED``.
        inputs: what programs read at fixed addresses, from :func:`persistent_input`; replays want them fresh.
        breaks: programs may have a :func:`break_point`; otherwise one is refused.
        options: the other arguments of :class:`CaptureSession`, such as ``budget``, ``reserve`` and ``strict``.

    Raises:
        BackendError: as :func:`backend`.
        CaptureError: no such kind; a budget that is not positive; two inputs of one name.
    """
    from halma.hal.graph.breakable import CaptureMode
    from halma.hal.graph.inputs import InputSet
    from halma.hal.graph.session import CaptureSession
    from halma.hal.settings import settings
    from halma.hal.workspace import Workspace

    device = _chosen(backend)
    if workspace is None:
        workspace = Workspace(device.device.torch_device, checked=settings().checked)
    return CaptureSession(
        device,
        workspace,
        kind,
        mode=CaptureMode.PIECEWISE if breaks else CaptureMode.FULL,
        inputs=inputs if isinstance(inputs, InputSet) else InputSet(inputs),
        **options,
    )


def persistent_input(
    name: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    *,
    pad: Number = 0,
    null: Number | None = None,
    per: Per = "token",
    backend: Backend | str | None = None,
) -> PersistentInput:
    """An input of captured programs: memory [capacity, ...] at one address, fresh rows at every replay.

    Args:
        name: for messages, and the keyword that brings its rows: ``session.replay(descriptor, x=rows)``.
        shape: the most rows a step can bring, then the shape of a row.
        dtype: of rows; others are refused, not converted.
        pad: what rows behind a step's own hold.
        null: what all rows hold during capture, where padding would make the program skip its work.
        per: what a row stands for, ``token``, ``request`` or the whole ``step``: more rows than a replay's descriptor
            has are refused.
        backend: as for :func:`session`.

    Raises:
        BackendError: as :func:`backend`.
        CaptureError: ``pad`` or ``null`` is no value of ``dtype``.
    """
    from halma.hal.graph.inputs import persistent_input as make

    return make(_chosen(backend), name, shape, dtype, pad=pad, null=null, per=per)


def collectives(*, world: Any, backend: Backend | str | None = None) -> Group:
    """The ranks of a torch.distributed group, as those that share an arena and make collectives together.

    Args:
        world: a process group, such as ``torch.distributed.group.WORLD``: never the world by default. None: this
            process alone.
        backend: one from :func:`backend`, or its name; by default the one that :func:`backend` chooses.

    Raises:
        BackendError: as :func:`backend`.
        CollectiveError: this process is no member of the group, or ranks came with different backends or settings.
        RankError: a rank did not come.
    """
    from halma.hal.collectives.group import Group

    return Group(world, _chosen(backend))


def _chosen(named: Backend | str | None) -> Backend:
    return backend(named) if named is None or isinstance(named, str) else named


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"halma.hal.graph.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
