"""What a step of DeepSeek-V4 is made of, written once: decode, prefill and verification differ by shapes alone.

Notation: M rows in the step (requests x tokens per request), D hidden size, n residual streams, H heads of
width d, V tokens, N ranks, each with its part of the weights (:mod:`halma.models.deepseek_v4.ranks`). Sections in
brackets refer to the model's published reference code (``inference/model.py``). The steps themselves, and the drafts:
:mod:`halma.models.deepseek_v4.steps`, :mod:`halma.models.deepseek_v4.draft`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from halma.hal.backend import Stream
from halma.hal.device_value import DeviceValue
from halma.hal.dispatch import Ops
from halma.hal.graph.descriptor import Descriptor
from halma.hal.workspace import Workspace
from halma.models.deepseek_v4.boundary import Boundary, Entrance, boundary
from halma.models.deepseek_v4.config import LayerKind, V4Config
from halma.models.deepseek_v4.experts import OWN_EXPERTS, Experts
from halma.models.deepseek_v4.ranks import ONE_RANK, Ranks
from halma.models.deepseek_v4.state import LayerState, V4State
from halma.models.deepseek_v4.weights import (
    AttentionWeights,
    CompressorWeights,
    HyperConnection,
    LayerWeights,
    V4Weights,
)

Tap = Callable[[str, torch.Tensor], None]


@dataclass(frozen=True, eq=False)
class V4Model:
    """A model ready to run on one device: what a program needs besides the step's own values.

    Attributes:
        side: the stream of work that runs beside the main one: the shared expert's.
        inv_freq: rope frequencies by theta: ``main`` for window layers, ``compress`` for the others [r/2].
        ranks: those that share the model; ``weights`` is this one's part.
        arithmetic: ``exact`` or ``shipping``, as the weights were loaded.
        tap: called with intermediate values where the eager runner watches them; never in a graph.
        experts: who does the feed-forward sublayers.
    """

    config: V4Config
    weights: V4Weights
    state: V4State
    ops: Ops
    workspace: Workspace
    side: Stream
    inv_freq: dict[str, torch.Tensor]
    carrier: torch.dtype
    ranks: Ranks = ONE_RANK
    tap: Tap | None = None
    arithmetic: str = "exact"
    experts: Experts = OWN_EXPERTS

    @property
    def accumulator(self) -> torch.dtype:
        """Dtype of products that must not lose bits: float32, or float64 with float64 carriers."""
        return torch.float64 if self.carrier is torch.float64 else torch.float32


@dataclass(frozen=True, eq=False)
class StepInputs:
    """Persistent inputs of a step, each at a fixed address.

    Attributes:
        tokens: int64 [R, T]; read by prefill only.
        slot, count: int64 [R]; the request's slot (0 = padding) and its real tokens in this step.
        temperature, top_p: float32 [R]; seed: int64 [R]; read by the ``sample`` variant only.
        after: int64 [R]; read by prefill only: the token of the prompt behind this piece of it, -1 where it ends.
    """

    tokens: torch.Tensor
    slot: torch.Tensor
    count: torch.Tensor
    temperature: torch.Tensor
    top_p: torch.Tensor
    seed: torch.Tensor
    after: torch.Tensor


@dataclass(frozen=True, eq=False)
class Step:
    """Values that all layers of one step share. Rows are request-major."""

    descriptor: Descriptor
    slot: DeviceValue
    start: DeviceValue
    count: DeviceValue
    tokens: DeviceValue
    positions: DeviceValue
    row_slot: DeviceValue
    angles: dict[str, torch.Tensor]
    every_block: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])


def choose(
    model: V4Model, inputs: StepInputs, descriptor: Descriptor, logits: torch.Tensor, position: torch.Tensor
) -> torch.Tensor:
    """Logits [P, V/N] -> the token of each row [P], drawn where the step is of the ``sample`` variant.

    P is R or a multiple of it, request-major. ``position`` [P]: where the chosen token will stand.
    """
    ops, ranks = model.ops, model.ranks
    if descriptor.variant != "sample":
        return ranks.best_token(ops, logits)
    how = (inputs.temperature, inputs.top_p, inputs.seed)
    each = logits.shape[0] // descriptor.num_requests
    if each > 1:
        how = tuple(ops.spread_rows(one, each) for one in how)
    return ops.sample_tokens(ranks.all_logits(ops, logits), *how, position)


def backbone(model: V4Model, step: Step) -> torch.Tensor:
    """The residual streams [M, n, D] behind the last layer."""
    ops, config, weights = model.ops, model.config, model.weights
    between = boundary(model, ops.expand_streams(embedded(model, step), config.hc_mult))
    entrances: list[Entrance] = [(layer.hc_attn, layer.attn_norm) for layer in weights.layers]
    x = between.enter(entrances[0])
    for index, (layer, kind) in enumerate(zip(weights.layers, config.layers, strict=True)):
        following = entrances[index + 1] if index + 1 < len(entrances) else None
        with model.workspace.scope("layer"):
            x = block(model, x, between, layer, kind, model.state.layers[index], step, following)
        if model.tap is not None:
            model.tap(f"layer{index}.streams", between.streams)
    return between.streams


def embedded(model: V4Model, step: Step) -> torch.Tensor:
    """The embeddings [M, D] of the step's tokens."""
    ranks = model.ranks
    return ranks.all_reduce(model.ops.embed(step.tokens, model.weights.embed, ranks.first_token))


def target_logits(model: V4Model, streams: torch.Tensor) -> torch.Tensor:
    """Streams behind the last layer [P, n, D] -> [P, V/N]."""
    return logits_of(model, streams, model.weights.hc_head, model.weights.norm)


def logits_of(model: V4Model, streams: torch.Tensor, head: HyperConnection, norm: torch.Tensor) -> torch.Tensor:
    """Streams [P, n, D] -> logits [P, V/N], through the one output matrix that target and draft share."""
    ops, config = model.ops, model.config
    x = ops.hc_head(streams, head.fn, head.base, head.scale, config.rms_norm_eps, config.hc_eps)
    return ops.linear(ops.rms_norm(x, norm, config.rms_norm_eps), model.weights.head, model.accumulator)


def prepare(
    model: V4Model,
    descriptor: Descriptor,
    tokens: torch.Tensor,
    start: torch.Tensor,
    count: torch.Tensor,
    slot: torch.Tensor,
    *,
    kinds: tuple[LayerKind, ...] | None = None,
) -> Step:
    """Everything that depends on the step but not on the layer.

    Args:
        tokens: [R, T'], at positions ``start`` [R] .., of which ``count`` [R] are real: all of them, where it is more.
        kinds: of the layers that it is for; the target's by default.
    """
    ops, plan = model.ops, model.state.plan
    kinds = model.config.layers if kinds is None else kinds
    rows, positions, row_slot = ops.step_rows(tokens, start, count, slot)
    angles = {
        rope: ops.rope_angles(positions, model.inv_freq[rope])
        for rope in sorted({kind.rope for kind in kinds}, reverse=True)
    }
    every = {
        ratio: ops.all_blocks(positions, ratio, descriptor.context_capacity // ratio)
        for ratio in sorted({kind.ratio for kind in kinds if kind.ratio})
    }
    slots, context = plan.slots + 1, plan.max_context + plan.drafts  # drafts may stand behind the end
    return Step(
        descriptor,
        DeviceValue(slot, bound=slots, name="slot"),
        DeviceValue(start, bound=context, name="start"),
        DeviceValue(count, bound=descriptor.query_len + 1, name="count"),
        DeviceValue(rows, bound=model.config.vocab_size, name="tokens"),
        DeviceValue(positions, bound=context, name="positions"),
        DeviceValue(row_slot, bound=slots, name="row_slot"),
        angles,
        every,
    )


def block(
    model: V4Model,
    x: torch.Tensor,
    between: Boundary,
    layer: LayerWeights,
    kind: LayerKind,
    state: LayerState,
    step: Step,
    following: Entrance | None,
) -> torch.Tensor:
    """One layer, its input x [M, D] -> that of the following one: what a sublayer makes goes through a boundary."""
    with model.workspace.scope("attention"):
        y = attention(model, x, layer.attn, kind, state, step)
        x = between.cross(y, (layer.hc_ffn, layer.ffn_norm))
    with model.workspace.scope("ffn"):
        y = model.experts.ffn(model, x, layer.ffn, step)
        if following is not None:
            return between.cross(y, following)
        between.leave(y)  # the last layer
        return x


def attention(
    model: V4Model, x: torch.Tensor, w: AttentionWeights, kind: LayerKind, state: LayerState, step: Step
) -> torch.Tensor:
    """x [M, D] -> this rank's part of [M, D]: queries over the window and the chosen compressed rows.

    Keys are their own values.
    """
    ops, config = model.ops, model.config
    angles, eps = step.angles[kind.rope], config.rms_norm_eps
    heads, width = config.num_attention_heads // model.ranks.size, config.head_dim
    groups = config.o_groups // model.ranks.size
    both = ops.linear(x, w.wq_a_wkv)
    qr = ops.rms_norm(both[:, : config.q_lora_rank], w.q_norm, eps)
    q = ops.rms_norm(ops.linear(qr, w.wq_b).view(-1, heads, width), None, eps)
    kv = ops.rms_norm(both[:, config.q_lora_rank :], w.kv_norm, eps)
    ops.rope(q, angles, False)
    ops.rope(kv, angles, False)
    ops.window_insert(kv, step.positions, step.row_slot, state.window)
    chosen = compressed_keys(model, x, qr, w, kind, state, step)
    o = ops.attend(
        q,
        state.window,
        step.positions,
        step.row_slot,
        w.sink,
        config.sliding_window,
        width**-0.5,
        state.compressed,
        model.state.page_table,
        chosen,
    )
    ops.rope(o, angles, True)  # values carry rope, so the output is turned back at the query's position
    grouped = ops.grouped_linear(o.view(-1, groups, heads // groups * width), w.wo_a)
    return ops.linear(grouped, w.wo_b)


def compressed_keys(
    model: V4Model,
    x: torch.Tensor,
    qr: torch.Tensor,
    w: AttentionWeights,
    kind: LayerKind,
    state: LayerState,
    step: Step,
) -> torch.Tensor | None:
    """Write the blocks that this step completes; say which blocks each row attends to [M, K], -1 for none."""
    if w.compressor is None:
        return None
    compress(model, x, w.compressor, kind, state, step)
    if w.indexer is None or state.index is None:
        return step.every_block[kind.ratio]
    compress(model, x, w.indexer.compressor, kind, state, step, index=True)
    config, capacity = model.config, step.descriptor.context_capacity // kind.ratio
    if capacity <= config.index_topk:  # the shape cannot hold more blocks than may be chosen
        return step.every_block[kind.ratio]
    ops, width = model.ops, config.index_head_dim
    q = ops.linear(qr, w.indexer.wq_b).view(-1, config.index_n_heads, width)
    ops.rope(q, step.angles[kind.rope], False)
    q = ops.round_index(q, model.state.formats.index)
    scale = width**-0.5 * config.index_n_heads**-0.5
    scores = ops.index_scores(
        q,
        ops.linear(x, w.indexer.weights_proj, model.accumulator),
        scale,
        state.index,
        step.positions,
        step.row_slot,
        model.state.page_table,
        kind.ratio,
        capacity,
    )
    if model.tap is not None:
        model.tap("index_scores", scores)
    return ops.top_blocks(scores, config.index_topk)


def compress(
    model: V4Model,
    x: torch.Tensor,
    w: CompressorWeights,
    kind: LayerKind,
    state: LayerState,
    step: Step,
    *,
    index: bool = False,
) -> None:
    """Keep each token's value and gate; pool every block that is complete now into one row and store it."""
    ops, config = model.ops, model.config
    partial, store = (state.index_compressor, state.index) if index else (state.compressor, state.compressed)
    width = w.norm.shape[0] * (2 if kind.overlap else 1)
    both = ops.linear(x, w.wkv_wgate, model.accumulator)
    ops.compressor_insert(both[:, :width], both[:, width:], w.ape, step.positions, step.row_slot, partial)
    pooled, blocks = ops.compressor_pool(
        partial,
        step.start,
        step.count,
        step.slot,
        kind.ratio,
        kind.overlap,
        step.descriptor.query_len,
        model.carrier,
    )
    rows = ops.rms_norm(pooled, w.norm, config.rms_norm_eps)
    # A compressed row stands at the position of its first token, not at its block number.
    ops.rope(rows, ops.rope_angles(ops.block_positions(blocks, kind.ratio), model.inv_freq[kind.rope]), False)
    if index:
        rows = ops.round_index(rows, model.state.formats.index)
    ops.block_insert(rows, blocks, step.slot, model.state.page_table, store)
