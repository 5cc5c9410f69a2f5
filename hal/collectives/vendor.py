"""What no channel does: the collectives of torch.distributed, and of one rank alone.

Never silently: whoever comes here has a reason, which the communicator records and logs.
"""

from __future__ import annotations

from typing import Any

import torch

from halma.hal.collectives.arithmetic import fused_norm
from halma.hal.collectives.contract import Call, Kind, Operands
from halma.hal.errors import CollectiveError
from halma.hal.graph.current import current_recorder, note_launch

NODE = "collective:vendor"


def run(call: Call, operands: Operands, group: Any, size: int) -> None:
    """Make a call with ``group``'s own collectives: recorded where the thread records, else now.

    Sums are the vendor's: equal on all ranks, but not bit by bit those of a channel.

    Raises:
        CollectiveError: the vendor's call failed; with its message.
    """
    work = lambda: _run(call, operands, group, size)  # noqa: E731
    recorder = current_recorder()
    if recorder is None:
        note_launch()
        work()
        return
    reads = [t for t in (operands.source, operands.residual, operands.weight) if t is not None]
    writes = [t for t in (operands.out, operands.norm_out, operands.scale_out) if t is not None]
    recorder.record_node(NODE, work, reads=reads, writes=writes, parameters=(("call", call.describe()),))


def _run(call: Call, operands: Operands, group: Any, size: int) -> None:
    import torch.distributed as distributed

    try:
        with torch.no_grad():
            if size == 1:
                _alone(call, operands)
            else:
                _together(distributed, call, operands, group)
    except (RuntimeError, ValueError) as error:
        raise CollectiveError(
            f"the collective of torch.distributed failed: {call.describe()}",
            asked=f"{size} ranks, group of backend {distributed.get_backend(group) if size > 1 else 'none'}",
            found=str(error).splitlines()[0],
            do="use a dtype that the group's backend knows, or shapes that a channel takes (see the decision's reason)",
        ) from error


def _alone(call: Call, operands: Operands) -> None:
    if call.kind is Kind.ALL_REDUCE_NORM:
        fused_norm(operands.source, operands)
    elif operands.out is not operands.source:
        operands.out.view(-1).copy_(operands.source.view(-1))


def _together(distributed: Any, call: Call, operands: Operands, group: Any) -> None:
    source, out = operands.source, operands.out
    if call.kind is Kind.ALL_REDUCE:
        if out is not source:
            out.copy_(source)
        distributed.all_reduce(out, group=group)
    elif call.kind is Kind.ALL_REDUCE_NORM:
        reduced = source.clone()
        distributed.all_reduce(reduced, group=group)
        fused_norm(reduced, operands)
    elif call.kind is Kind.ALL_GATHER:
        distributed.all_gather_into_tensor(out.view(-1), source.view(-1), group=group)
    elif call.kind is Kind.BROADCAST:
        distributed.broadcast(out, src=distributed.get_global_rank(group, call.root), group=group)
    else:
        distributed.barrier(group=group)
