"""Which stored tensors make which weight: one walk over the model, whoever does the work.

:func:`assemble` is the only place that knows the published tensor names and shapes. It asks a
:class:`Builder` for every piece; one builder measures and checks without reading, the other loads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from halma.models.deepseek_v4.config import LayerKind, V4Config
from halma.models.deepseek_v4.weights import (
    AttentionWeights,
    CompressorWeights,
    FfnWeights,
    HyperConnection,
    IndexerWeights,
    LayerWeights,
    MtpWeights,
    V4Weights,
    no_weight,
)
from halma.ops.weight import Weight

LINEAR, EXPERT, DENSE = "linear", "expert", "dense"
ROWS, COLUMNS = "rows", "columns"


@dataclass(frozen=True)
class Part:
    """A stored matrix ``<stem>.weight`` with its logical number of rows."""

    stem: str
    rows: int


@dataclass(frozen=True)
class MatrixSpec:
    """A weight made of stored matrices.

    Attributes:
        groups: one tuple of parts per matrix of the result; a matrix is its parts' rows, one after another.
        columns: logical columns, equal for all parts.
        role: ``linear`` (fp8 as published), ``expert`` (fp4, or fp8 in Base checkpoints) or ``dense`` (bf16).
        rounds: whether the product rounds its input where the official code runs (rules Q1 and Q2).
        split: what tensor parallelism divides: each part's ``rows``, the ``columns``, or nothing.
        stacked: the result is [E, N, K].
    """

    groups: tuple[tuple[Part, ...], ...]
    columns: int
    role: str
    rounds: bool = False
    split: str | None = None
    stacked: bool = False


class Builder(Protocol):
    """Makes the pieces that :func:`assemble` asks for."""

    def matrix(self, spec: MatrixSpec) -> Weight:
        """The weight of ``spec``, prepared."""
        ...

    def vector(self, name: str, shape: tuple[int, ...], *, split: bool = False) -> torch.Tensor:
        """A floating tensor in the accumulator's dtype; ``split`` divides its first dimension."""
        ...

    def table(self, name: str, shape: tuple[int, ...], below: int) -> torch.Tensor:
        """An int64 tensor whose values lie in 0 .. below - 1."""
        ...


def assemble(
    config: V4Config, build: Builder, *, mtp: bool, experts: bool | tuple[int, int] = True
) -> V4Weights:
    """The whole model, with the MTP modules or without; without its experts, or with a part of them, where other ranks
    hold them.

    Experts are divided by their intermediate width, the shared one too. Whole experts a rank need as many all-reduces,
    but at batch 1 the busiest of 8 ranks then reads 2.2 of a token's 6 experts in place of 0.75; so routed experts stay
    whole where a part of them is asked for, and there alone.
    """
    vocab, width = config.vocab_size, config.hidden_size
    held = ((0, config.n_routed_experts) if experts else None) if isinstance(experts, bool) else experts
    walk = _Walk(config, build, held, whole=not isinstance(experts, bool))
    return V4Weights(
        embed=walk.matrix(width, ("embed", vocab), role=DENSE, split=ROWS),
        head=walk.matrix(width, ("head", vocab), role=DENSE, split=ROWS),
        norm=build.vector("norm.weight", (width,)),
        hc_head=walk.hyper_head(""),
        layers=tuple(
            walk.layer(f"layers.{index}", kind, config.hashed(index), index) for index, kind in enumerate(config.layers)
        ),
        mtp=tuple(walk.mtp(index, kind) for index, kind in enumerate(config.mtp_layers)) if mtp else (),
    )


def assemble_experts(
    config: V4Config, build: Builder, *, mtp: bool, first: int, last: int
) -> tuple[FfnWeights, ...]:
    """Experts ``first`` .. ``last`` - 1 of every layer, and the shared one: what an FFN rank holds.

    By number of the layer, with the MTP modules' behind those of the model.
    """
    walk = _Walk(config, build, (first, last))
    stems = [f"layers.{index}" for index in range(config.num_hidden_layers)]
    stems += [f"mtp.{index}" for index in range(config.num_mtp)] if mtp else []
    return tuple(
        FfnWeights(no_weight(), None, None, *walk.experts(f"{stem}.ffn"), layer=number)
        for number, stem in enumerate(stems)
    )


@dataclass(frozen=True)
class _Walk:
    config: V4Config
    build: Builder
    held: tuple[int, int] | None
    """Routed experts of this rank, from, to; None: others hold all experts."""
    whole: bool = False
    """Tensor parallelism leaves the routed experts as they are."""

    def matrix(
        self, columns: int, *parts: tuple[str, int], role: str = LINEAR, rounds: bool = False, split: str | None = None
    ) -> Weight:
        group = tuple(Part(stem, rows) for stem, rows in parts)
        return self.build.matrix(MatrixSpec((group,), columns, role, rounds, split))

    def hyper(self, prefix: str) -> HyperConnection:
        n = self.config.hc_mult
        return self._hyper(prefix, n * (n + 2), 3)

    def hyper_head(self, prefix: str) -> HyperConnection:
        return self._hyper(f"{prefix}hc_head", self.config.hc_mult, 1)

    def _hyper(self, prefix: str, rows: int, scales: int) -> HyperConnection:
        width = self.config.hc_mult * self.config.hidden_size
        return HyperConnection(
            fn=self.build.vector(f"{prefix}_fn", (rows, width)),
            base=self.build.vector(f"{prefix}_base", (rows,)),
            scale=self.build.vector(f"{prefix}_scale", (scales,)),
        )

    def layer(self, prefix: str, kind: LayerKind, hashed: bool, number: int) -> LayerWeights:
        width = (self.config.hidden_size,)
        return LayerWeights(
            attn_norm=self.build.vector(f"{prefix}.attn_norm.weight", width),
            ffn_norm=self.build.vector(f"{prefix}.ffn_norm.weight", width),
            hc_attn=self.hyper(f"{prefix}.hc_attn"),
            hc_ffn=self.hyper(f"{prefix}.hc_ffn"),
            attn=self.attention(f"{prefix}.attn", kind),
            ffn=self.ffn(f"{prefix}.ffn", hashed, number),
        )

    def attention(self, prefix: str, kind: LayerKind) -> AttentionWeights:
        c = self.config
        per_group = c.num_attention_heads // c.o_groups * c.head_dim
        latent = c.o_groups * c.o_lora_rank
        return AttentionWeights(
            wq_a_wkv=self.matrix(
                c.hidden_size, (f"{prefix}.wq_a", c.q_lora_rank), (f"{prefix}.wkv", c.head_dim), rounds=True
            ),
            q_norm=self.build.vector(f"{prefix}.q_norm.weight", (c.q_lora_rank,)),
            wq_b=self.matrix(
                c.q_lora_rank, (f"{prefix}.wq_b", c.num_attention_heads * c.head_dim), rounds=True, split=ROWS
            ),
            kv_norm=self.build.vector(f"{prefix}.kv_norm.weight", (c.head_dim,)),
            # Stored as fp8, but the official code converts it to bf16 at load: its input is never rounded.
            wo_a=self.matrix(per_group, (f"{prefix}.wo_a", latent), split=ROWS),
            wo_b=self.matrix(latent, (f"{prefix}.wo_b", c.hidden_size), rounds=True, split=COLUMNS),
            sink=self.build.vector(f"{prefix}.attn_sink", (c.num_attention_heads,), split=True),
            compressor=self.compressor(f"{prefix}.compressor", c.head_dim, kind) if kind.ratio else None,
            indexer=self.indexer(f"{prefix}.indexer", kind) if kind.indexed else None,
        )

    def compressor(self, prefix: str, width: int, kind: LayerKind) -> CompressorWeights:
        rows = width * (2 if kind.overlap else 1)
        return CompressorWeights(
            wkv_wgate=self.matrix(
                self.config.hidden_size, (f"{prefix}.wkv", rows), (f"{prefix}.wgate", rows), role=DENSE
            ),
            ape=self.build.vector(f"{prefix}.ape", (kind.ratio, rows)),
            norm=self.build.vector(f"{prefix}.norm.weight", (width,)),
        )

    def indexer(self, prefix: str, kind: LayerKind) -> IndexerWeights:
        c = self.config
        return IndexerWeights(
            wq_b=self.matrix(c.q_lora_rank, (f"{prefix}.wq_b", c.index_n_heads * c.index_head_dim), rounds=True),
            weights_proj=self.matrix(c.hidden_size, (f"{prefix}.weights_proj", c.index_n_heads), role=DENSE),
            compressor=self.compressor(f"{prefix}.compressor", c.index_head_dim, kind),
        )

    def ffn(self, prefix: str, hashed: bool, number: int) -> FfnWeights:
        c = self.config
        count, width = c.n_routed_experts, c.hidden_size
        table_shape = (c.vocab_size, c.num_experts_per_tok)
        return FfnWeights(
            self.matrix(width, (f"{prefix}.gate", count), role=DENSE),
            None if hashed else self.build.vector(f"{prefix}.gate.bias", (count,)),
            self.build.table(f"{prefix}.gate.tid2eid", table_shape, count) if hashed else None,
            *self.experts(prefix),
            layer=number,
        )

    def experts(self, prefix: str) -> tuple[Weight, Weight, Weight, Weight]:
        """``gate_up``, ``down``, ``shared_gate_up``, ``shared_down``."""
        if self.held is None:
            return no_weight(), no_weight(), no_weight(), no_weight()
        width, inner = self.config.hidden_size, self.config.moe_intermediate_size
        shared = f"{prefix}.shared_experts"
        held = range(*self.held)
        across, along = (None, None) if self.whole else (ROWS, COLUMNS)
        up = tuple((Part(f"{prefix}.experts.{e}.w1", inner), Part(f"{prefix}.experts.{e}.w3", inner)) for e in held)
        down = tuple((Part(f"{prefix}.experts.{e}.w2", width),) for e in held)
        return (
            self.build.matrix(MatrixSpec(up, width, EXPERT, True, across, True)),
            self.build.matrix(MatrixSpec(down, inner, EXPERT, True, along, True)),
            self.matrix(width, (f"{shared}.w1", inner), (f"{shared}.w3", inner), rounds=True, split=ROWS),
            self.matrix(inner, (f"{shared}.w2", width), rounds=True, split=COLUMNS),
        )

    def mtp(self, index: int, kind: LayerKind) -> MtpWeights:
        prefix, number = f"mtp.{index}", self.config.num_hidden_layers + index
        width = self.config.hidden_size
        vector = self.build.vector
        return MtpWeights(
            e_proj=self.matrix(width, (f"{prefix}.e_proj", width), rounds=True),
            h_proj=self.matrix(width, (f"{prefix}.h_proj", width), rounds=True),
            enorm=vector(f"{prefix}.enorm.weight", (width,)),
            hnorm=vector(f"{prefix}.hnorm.weight", (width,)),
            norm=vector(f"{prefix}.norm.weight", (width,)),
            hc_head=self.hyper_head(f"{prefix}."),
            # Scored even where the target's first layers are hashed.
            block=self.layer(prefix, kind, hashed=False, number=number),
        )
