"""Other people's all-reduces in one process a GPU, each as a function that queues one call on the current stream.

A peer that cannot be set up here is left out with its reason. Multicast is never used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

Queue = Callable[[], Any]
Peer = Callable[[torch.Tensor], Queue]
Fused = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], Queue]
"""(x, residual, weight, eps) -> one all-reduce + residual + RMSNorm."""

LARGEST = 16 << 20
VLLM_BLOCKS = 36
"""The most that its kernel takes."""


def nccl(x: torch.Tensor) -> Queue:
    """In place, so that its values overflow in a chain: timed, not checked."""
    return lambda: dist.all_reduce(x)


def symm_mem(kind: str) -> Peer:
    """torch's symmetric memory, ``one_shot`` or ``two_shot``; its input lies in symmetric memory already."""
    import torch.distributed._symmetric_memory as symmetric

    group = dist.group.WORLD
    assert group is not None
    memory = symmetric.empty(LARGEST // 2, dtype=torch.bfloat16, device="cuda")
    symmetric.rendezvous(memory, group.group_name)

    def peer(x: torch.Tensor) -> Queue:
        part = memory[: x.numel()]
        part.copy_(x.flatten())
        if kind == "one_shot":
            out = torch.empty_like(part)
            return lambda: torch.ops.symm_mem.one_shot_all_reduce_out(part, "sum", group.group_name, out)
        return lambda: torch.ops.symm_mem.two_shot_all_reduce_(part, "sum", group.group_name)

    return peer


def vllm() -> Peer:
    """vLLM's kernel as FlashInfer ships it, copying its input into its registered buffer."""
    from flashinfer.comm import cuda_ipc, vllm_ar

    group, rank = dist.group.WORLD, dist.get_rank()
    meta = cuda_ipc.create_shared_buffer(vllm_ar.meta_size() + LARGEST, group)
    buffer = cuda_ipc.create_shared_buffer(LARGEST, group)
    records = torch.empty(8 << 20, dtype=torch.uint8, device="cuda")
    handle = vllm_ar.init_custom_ar(meta, records, rank, True)
    vllm_ar.register_buffer(handle, buffer)

    def peer(x: torch.Tensor) -> Queue:
        out = torch.empty_like(x)
        kept = records  # lives as long as the calls do
        return lambda: (vllm_ar.all_reduce(handle, x, out, buffer[rank], LARGEST, VLLM_BLOCKS), kept)

    return peer


def trtllm(hidden: int) -> tuple[Peer, Fused]:
    """TensorRT-LLM's Lamport one-shot as FlashInfer ships it, dependent launch with the early trigger; and fused."""
    from flashinfer.comm import trtllm_ar

    rank, size = dist.get_rank(), dist.get_world_size()
    tokens = LARGEST // (2 * hidden)
    made = trtllm_ar.trtllm_create_ipc_workspace_for_all_reduce_fusion(
        rank, size, tokens, hidden, group=dist.group.WORLD
    )
    pointers = made[1]
    pattern = trtllm_ar.AllReduceFusionPattern

    def call(x: torch.Tensor, code: Any, **tensors: Any) -> Queue:
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

    def plain(x: torch.Tensor) -> Queue:
        return call(x, pattern.kAllReduce, allreduce_out=torch.empty_like(x))

    def fused(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> Queue:
        outs = {"residual_out": torch.empty_like(x), "norm_out": torch.empty_like(x)}
        code = pattern.kARResidualRMSNorm
        return call(x, code, residual_in=residual, rms_gamma=weight, rms_eps=eps, **outs)

    return plain, fused


def peers(hidden: int) -> Iterator[tuple[str, Peer | None, Fused | None, str]]:
    """(name, plain, fused, why not). Setting up is collective: every rank gets the same list, or none of it."""
    yield "NCCL", nccl, None, ""
    for name, make in (
        ("torch symm_mem one-shot", lambda: (symm_mem("one_shot"), None)),
        ("torch symm_mem two-shot", lambda: (symm_mem("two_shot"), None)),
        ("vLLM (FlashInfer)", lambda: (vllm(), None)),
        ("TensorRT-LLM one-shot, early trigger (FlashInfer)", lambda: trtllm(hidden)),
    ):
        made: tuple[Peer | None, Fused | None] = (None, None)
        reason = ""
        try:
            made = make()
        except Exception as error:  # whatever a stranger's set-up raises is its reason
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:160]
        reasons: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(reasons, reason)
        reason = next((found for found in reasons if found), "")
        yield name, None if reason else made[0], None if reason else made[1], reason
