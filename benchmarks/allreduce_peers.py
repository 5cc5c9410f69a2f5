"""Other people's all-reduces in one process a GPU, each as a function that queues one call on the current stream.

A peer that cannot be set up here is left out with its reason. Multicast is never used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.ranks import gather


@dataclass(frozen=True)
class Queued:
    """One call: ``queue`` puts it on the current stream. ``out`` must hold ``value`` once it has run on inputs of ones;
    None: it adds up in place, so that its values overflow in a chain, and it is timed alone."""

    queue: Callable[[], Any]
    out: torch.Tensor | None = None
    value: float = 0.0

    def right(self) -> bool:
        """Whether the last call's result is the sum."""
        return self.out is None or bool((self.out == self.value).all())


def _nothing() -> None:
    """A graph needs nothing more."""


@dataclass(frozen=True)
class Peer:
    """Ways of one peer.

    Attributes:
        plain: input -> call. fused: (x, residual, weight, eps) -> one all-reduce + residual + RMSNorm.
        settle: what all ranks do between a capture and its first replay.
        eager: whether it can be called outside of a graph too.
    """

    plain: Callable[[torch.Tensor], Queued]
    fused: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], Queued] | None = None
    settle: Callable[[], None] = _nothing
    eager: bool = True


LARGEST = 16 << 20
VLLM_BLOCKS = 36
"""The most that its kernel takes."""


def nccl() -> Peer:
    """In place."""
    return Peer(lambda x: Queued(lambda: dist.all_reduce(x)))


def symm_mem(kind: str) -> Peer:
    """torch's symmetric memory, ``one_shot`` or ``two_shot``; its input lies in symmetric memory already."""
    import torch.distributed._symmetric_memory as symmetric

    group = dist.group.WORLD
    assert group is not None
    memory = symmetric.empty(LARGEST // 2, dtype=torch.bfloat16, device="cuda")
    symmetric.rendezvous(memory, group.group_name)

    def plain(x: torch.Tensor) -> Queued:
        part = memory[: x.numel()]
        part.copy_(x.flatten())
        if kind == "one_shot":
            out = torch.empty_like(part)
            queue = lambda: torch.ops.symm_mem.one_shot_all_reduce_out(part, "sum", group.group_name, out)  # noqa: E731
            return Queued(queue, out, dist.get_world_size())
        return Queued(lambda: torch.ops.symm_mem.two_shot_all_reduce_(part, "sum", group.group_name))

    return Peer(plain)


def vllm(*, registered: bool) -> Peer:
    """vLLM's kernel as FlashInfer ships it.

    A captured call reads its peers' addresses from a table that is written after the capture, when the ranks have told
    each other their inputs (``register_graph_buffers``); so the graph needs ``settle`` before its first replay.

    Args:
        registered: the peers read the input where it lies, as vLLM's own graphs do. Else each call copies it into the
            buffer that was registered beforehand, as eager calls must.
    """
    from flashinfer.comm import cuda_ipc, vllm_ar

    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    meta = cuda_ipc.create_shared_buffer(vllm_ar.meta_size() + LARGEST, group)
    buffer = cuda_ipc.create_shared_buffer(LARGEST, group)
    records = torch.empty(8 << 20, dtype=torch.uint8, device="cuda")
    handle = vllm_ar.init_custom_ar(meta, records, rank, True)
    vllm_ar.register_buffer(handle, buffer)
    kept: list[torch.Tensor] = [records]  # what peers were told of lives as long as the table does

    def plain(x: torch.Tensor) -> Queued:
        out = torch.empty_like(x)
        kept.append(x)

        def queue() -> None:
            own = registered and torch.cuda.is_current_stream_capturing()
            vllm_ar.all_reduce(handle, x, out, 0 if own else buffer[rank], LARGEST, VLLM_BLOCKS)

        return Queued(queue, out, size)

    def settle() -> None:
        told = gather(vllm_ar.get_graph_buffer_ipc_meta(handle))
        handles, offsets = ([list(one[at]) for one in told] for at in range(2))
        vllm_ar.register_graph_buffers(handle, handles, offsets)

    return Peer(plain, settle=settle, eager=not registered)


def trtllm(hidden: int) -> Peer:
    """TensorRT-LLM's Lamport one-shot as FlashInfer ships it, dependent launch with the early trigger; and fused."""
    from flashinfer.comm import trtllm_ar

    rank, size = dist.get_rank(), dist.get_world_size()
    tokens = LARGEST // (2 * hidden)
    made = trtllm_ar.trtllm_create_ipc_workspace_for_all_reduce_fusion(
        rank, size, tokens, hidden, group=dist.group.WORLD
    )
    pointers = made[1]
    pattern = trtllm_ar.AllReduceFusionPattern

    def call(x: torch.Tensor, code: Any, **tensors: Any) -> Callable[[], Any]:
        names = ("allreduce_out", "residual_in", "residual_out", "norm_out", "quant_out", "scale_out", "rms_gamma")
        given = {name: tensors.get(name) for name in (*names, "rms_eps", "scale_factor", "layout_code")}
        rows = x.numel() // hidden

        def queue() -> Any:
            return trtllm_ar.trtllm_allreduce_fusion(
                allreduce_in=x.view(rows, hidden),
                world_size=size,
                world_rank=rank,
                token_num=rows,
                hidden_dim=hidden,
                workspace_ptrs=pointers,
                launch_with_pdl=True,
                trigger_completion_at_end=False,
                fp32_acc=True,
                pattern_code=code,
                use_oneshot=True,
                **given,
            )

        return queue

    def plain(x: torch.Tensor) -> Queued:
        out = torch.empty_like(x)
        return Queued(call(x, pattern.kAllReduce, allreduce_out=out), out, size)

    def fused(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> Queued:
        outs = {"residual_out": torch.empty_like(x), "norm_out": torch.empty_like(x)}
        queue = call(x, pattern.kARResidualRMSNorm, residual_in=residual, rms_gamma=weight, rms_eps=eps, **outs)
        return Queued(queue, outs["residual_out"], size + 1)

    return Peer(plain, fused)


def peers(hidden: int) -> Iterator[tuple[str, Peer | None, str]]:
    """(name, peer, why not). Setting up is collective: every rank gets the same list, or none of it."""
    yield "NCCL", nccl(), ""
    for name, make in (
        ("torch symm_mem one-shot", lambda: symm_mem("one_shot")),
        ("torch symm_mem two-shot", lambda: symm_mem("two_shot")),
        ("vLLM, input registered (FlashInfer)", lambda: vllm(registered=True)),
        ("vLLM, input copied (FlashInfer)", lambda: vllm(registered=False)),
        ("TensorRT-LLM one-shot, early trigger (FlashInfer)", lambda: trtllm(hidden)),
    ):
        made: Peer | None = None
        reason = ""
        try:
            made = make()
        except Exception as error:  # whatever a stranger's set-up raises is its reason
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:160]
        reason = next((found for found in gather(reason) if found), "")
        yield name, None if reason else made, reason
