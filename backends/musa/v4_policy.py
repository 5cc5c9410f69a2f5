"""What others calibrated for DeepSeek-V4 on Moore Threads GPUs, as data: for which model, device and steps it is.

No such device was available to this project, so nothing here was measured by us: every entry says who reported it. The
guards are exact. One field of the model's identity that differs turns every guarded route off, and the route's reason
names it (:mod:`halma.hal.policy`).
"""

from __future__ import annotations

from typing import Final

from halma.backends.simt.gemv_tiles import S5000
from halma.hal.arena.plan import SLOT_LIMIT, ArenaPlan, plan_slots
from halma.hal.graph.descriptor import Descriptor
from halma.hal.policy import Guard, Headroom, OneOf

_PROFILE: Final = "reported by vllm-musa: MooreThreads/vllm-musa vllm_musa/runtime_plan/profiles/deepseek_v4.json"

IDENTITY: Final = Guard(
    (
        ("model.architecture", "DeepseekV4ForCausalLM"),
        ("model.type", "deepseek_v4"),
        ("model.dtype", "bfloat16"),
        ("model.quantization", "fp8"),
        ("model.block_rows", 128),
        ("model.block_columns", 128),
        ("model.hidden_size", 4096),
        ("model.layers", 43),
        ("model.heads", 64),
        ("model.kv_heads", 1),
        ("model.head_dim", 512),
        ("model.vocab_size", 129280),
        ("model.experts", 256),
        ("model.experts_per_token", 6),
        ("model.shared_experts", 1),
        ("model.expert_inner", 2048),
        ("model.expert_dtype", "fp8"),
        ("model.activation", "silu"),
        ("model.swiglu_limit", 10.0),
        ("model.index_topk", 512),
    ),
    _PROFILE,
)
"""DeepSeek-V4-Flash-Base, field by field."""

DEVICE: Final = Guard((("device.arch", "mp_31"), ("device.multiprocessors", OneOf(S5000))), _PROFILE)
"""The S5000 parts."""

EXECUTION: Final = Guard(
    (
        ("execution.tensor_parallel", 8),
        ("execution.experts", "own"),
        ("execution.cache", "kv_fp8"),
        ("execution.decode", "captured"),
        ("execution.prefill", "eager"),
    ),
    _PROFILE,
)
"""How the model was run when it was calibrated, where halma could run it otherwise: eight ranks that share every
matrix, the packed cache of 584 bytes a row, whole decode steps as graphs and prefill as none. The profile's further
fields (one pipeline stage, no compile mode) have nothing here that could differ."""

ROUTES: Final = IDENTITY.and_also(EXECUTION).and_also(DEVICE)
"""What the guarded routes are for: tiles and launches were chosen for an eighth of each matrix."""

# -- MTP: the seven steps that are captured, and the two known outcomes -----------------------------------------

REQUESTS: Final = (1, 2, 4, 8, 16, 32, 64)
TOKENS_A_REQUEST: Final = 5
"""One of the target and four drafts."""
CALLS: Final = 2 * 43 + 1
"""All-reduces of a captured step: two a layer and the last."""
BYTES_A_TOKEN: Final = 2 * 4096
MOST_EAGER_TOKENS: Final = 8195

DESCRIPTORS: Final = tuple(Descriptor("verify", requests, TOKENS_A_REQUEST) for requests in REQUESTS)

OUTCOMES: Final = {
    # name: (descriptors in the arena, who reported it)
    "all": (
        DESCRIPTORS,
        "reported by MooreThreads/vllm-musa#178: a batch of 64 stalled in the standard collective inside its graph",
    ),
    "narrow": (
        DESCRIPTORS[:5],
        "reported by MooreThreads/vllm-musa#177: the two widest stay on the standard collective, whose launch grid is "
        "the proven one",
    ),
}
"""The reports contradict one another, and neither refutes the other (their bases differ), so both can be said."""


def arena_plan(outcome: str = "narrow", *, size: int | None = None, limit: int = SLOT_LIMIT) -> ArenaPlan:
    """The plan of slots in which every captured all-reduce of the covered steps has memory of its own.

    ``all`` needs exactly 512 MiB a buffer; ``narrow`` 184 MiB, and
    :func:`halma.hal.arena.coverage.check_ladder` with ``policy="fall back"`` then names the two widest steps.

    Args:
        outcome: a name of ``OUTCOMES``.
        size, limit: as for :func:`halma.hal.arena.plan.plan_slots`.
    """
    return plan_slots(
        OUTCOMES[outcome][0],
        calls_per_descriptor=CALLS,
        bytes_per_token=BYTES_A_TOKEN,
        max_batched_tokens=MOST_EAGER_TOKENS,
        size=size,
        limit=limit,
    )


# -- sparse prefill -----------------------------------------------------------------------------------------


def prefill_headroom(tokens: int, *, heads: int = 64, head_dim: int = 512, arena_bytes: int = 0) -> int:
    """Bytes to keep free beside the KV cache, for the output of a sparse prefill: bf16 [tokens, heads, head_dim].

    Reported by vllm-musa (tests/test_deepseek_v4_runtime_plan.py): 537,067,520 for 8,195 tokens.

    Args:
        arena_bytes: of the collectives' arena, where it is allocated later.
    """
    return tokens * heads * head_dim * 2 + arena_bytes


HEADROOM: Final = (Headroom("sparse prefill", ROUTES, prefill_headroom),)
"""What the backend wants free beside weights, state and workspace. The collectives' arena is made before all of these,
so free memory is without it and it is not counted once more."""

NOT_HERE: Final = {
    "inverse rotation with fp8 output in chunks of 128": "the rotation ends before grouped_linear, which takes its "
    "input unrounded, as published: an op of both with fp8 output would take the chunks; rope turns 64 of 512 "
    "channels, all pairs side by side, and has nothing to cut",
    "sparse prefill into the caller's buffer": "every op writes to the buffer that its caller gave",
    "rounding inside SwiGLU after sigmoid, silu and product": "swiglu_fp8 rounds once, as the published model and the "
    "pair that it stands for do; a NaN stays a NaN and is no least number",
}
"""Other options of that profile, and why no route here carries their guard."""
