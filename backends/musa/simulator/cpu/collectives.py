"""MCCL's part in the CPU simulator: torch.distributed's calls on tensors of the device go to gloo, over their memory.

torch hands a collective to the process group's library by the device of its tensors (torch/csrc/distributed/c10d/
Ops.cpp); here the device's half hands it on to the CPU's. In a capture it becomes a node.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import torch
import torch.distributed as distributed

from halma.backends.musa.simulator.cpu import capture as driver
from halma.backends.musa.simulator.cpu.blocks import block_of

NAMES = (
    "allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_", "allgather_", "_allgather_base_", "gather_",
    "scatter_", "reduce_scatter_", "_reduce_scatter_base_", "alltoall_", "alltoall_base_", "send", "recv_", "barrier",
)  # fmt: skip
_library: torch.library.Library | None = None


def install() -> None:
    """Once a process; nothing where this torch has no torch.distributed."""
    global _library
    if not distributed.is_available():
        return
    _library = torch.library.Library("c10d", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")  # that kernels are replaced: yes
        for name in NAMES:
            packet = getattr(torch.ops.c10d, name, None)
            if packet is not None:
                _library.impl(name, partial(_on_host, packet.default), "PrivateUse1", allow_override=True)


def _host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return block_of(value).alias(value) if not value.is_cpu else value
    if isinstance(value, (list, tuple)):
        return [_host(item) for item in value]
    return value


def _on_host(func: Any, *args: Any, **kwargs: Any) -> Any:
    host_args, host_kwargs = _host(args), {name: _host(value) for name, value in kwargs.items()}
    stream = driver.current_stream()
    if stream.capture is None:
        results = func(*host_args, **host_kwargs)
        _last_of(results).wait()  # the host does not wait for a device's; gloo's worker must not run behind our back
    else:
        stream.capture.add(stream, partial(_waited, func, host_args, host_kwargs))
        results = torch._C._distributed_c10d.FakeWork().boxed()  # pyright: ignore
        results = (None, results) if len(func._schema.returns) > 1 else results
    if len(func._schema.returns) == 1:
        return results
    return args[0], results[-1]  # the destinations, which these ops hand back, are their first argument


def _last_of(results: Any) -> Any:
    work = results[-1] if isinstance(results, (list, tuple)) else results
    return distributed.Work.unbox(work) if hasattr(distributed.Work, "unbox") else work


def _waited(func: Any, args: Any, kwargs: Any) -> None:
    _last_of(func(*args, **kwargs)).wait()
