"""What loading makes of stored tensors: options, the slices of a rank, and the format that results."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from halma.hal.errors import ModelError
from halma.models.deepseek_v4.config import V4Config
from halma.models.deepseek_v4.layout import COLUMNS, ROWS, MatrixSpec, Part
from halma.models.deepseek_v4.tensor_files import Entry
from halma.ops.weight import FP4_BLOCK, FP4_BLOCK32, FP8_BLOCK, FP8_BLOCK128, PLAIN, Weight

ARITHMETICS = ("exact", "shipping")
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class LoadOptions:
    """How weights are prepared.

    Args:
        carrier: dtype of plain matrices: float32, float64 or bfloat16. Other tensors are float32, or float64
            with a float64 carrier.
        arithmetic: ``exact``: no product rounds its input. ``shipping``: those products do that the official
            code rounds, which is every linear and expert *stored* in fp8 or fp4, except wo_a.
        dequantise: turn fp8 and fp4 into plain matrices (exact: the scales are powers of two, and bfloat16
            holds every e4m3 and e2m1 value). Off: they stay packed where their blocks allow it.
        device: where the weights go.
        rank, world: the part of a tensor-parallel rank: heads of wq_b, wo_a, wo_b and sinks, the intermediate
            width of routed and shared experts, and the vocabulary of embedding and head are divided; the rest,
            the indexer among it, is whole on every rank.
        drafter: load the MTP modules where there are any.
        experts: load the experts; off where FFN ranks hold them. A part, from, to: what this rank holds where the
            others have the rest; those experts are not divided, whatever ``world`` is. The shared one is.

    Raises:
        ModelError: values out of range.
    """

    carrier: torch.dtype = torch.float32
    arithmetic: str = "exact"
    dequantise: bool = True
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    rank: int = 0
    world: int = 1
    drafter: bool = True
    experts: bool | tuple[int, int] = True

    def __post_init__(self) -> None:
        problems: list[str] = []
        if self.carrier not in (torch.float32, torch.float64, torch.bfloat16):
            problems.append(f"carrier = {self.carrier}; must be float32, float64 or bfloat16")
        if self.arithmetic not in ARITHMETICS:
            problems.append(f"arithmetic = {self.arithmetic!r}; must be exact or shipping")
        if not (self.world >= 1 and 0 <= self.rank < self.world):
            problems.append(f"rank = {self.rank}, world = {self.world}; must be 0 <= rank < world")
        if problems:
            raise ModelError("the load options are out of range", found=problems, do="correct them")

    @property
    def accumulator(self) -> torch.dtype:
        """Dtype of everything that is not a matrix."""
        return torch.float64 if self.carrier is torch.float64 else torch.float32

    def cut(self, length: int, divided: bool) -> tuple[int, int]:
        """This rank's part of ``length``, as start and stop."""
        if not divided:
            return 0, length
        return self.rank * length // self.world, (self.rank + 1) * length // self.world


DIVIDED = ("num_attention_heads", "o_groups", "moe_intermediate_size", "vocab_size")
"""What tensor parallelism cuts: every one of them must divide evenly."""


def worlds(config: V4Config) -> list[int]:
    """Numbers of ranks that the model can be divided among, 1 included."""
    common = math.gcd(*(getattr(config, name) for name in DIVIDED))
    return [size for size in range(1, common + 1) if common % size == 0]


def check_world(config: V4Config, world: int) -> None:
    """Whether the model divides evenly.

    Raises:
        ModelError: naming every size that ``world`` does not divide, and the numbers of ranks that do.
    """
    wrong = [f"{name} = {getattr(config, name)}" for name in DIVIDED if getattr(config, name) % world]
    if wrong:
        raise ModelError(
            "the model cannot be divided among that many ranks",
            asked=f"{world} ranks",
            found=[f"{one}, which {world} does not divide" for one in wrong],
            do=f"numbers of ranks that divide all of them: {', '.join(map(str, worlds(config)))}",
        )


@dataclass(frozen=True)
class Piece:
    """What is read of one part: logical rows and columns kept, and the block-aligned cover that holds them."""

    part: Part
    rows: tuple[int, int]
    columns: tuple[int, int]
    cover_rows: tuple[int, int]
    cover_columns: tuple[int, int]

    @property
    def exact(self) -> bool:
        """Whether the cover is just what is kept, so that packed data can be copied as it is."""
        return self.rows == self.cover_rows and self.columns == self.cover_columns


@dataclass(frozen=True)
class MatrixPlan:
    """How a spec is prepared on this rank."""

    groups: tuple[tuple[Piece, ...], ...]
    stored: str
    format: str
    shape: tuple[int, ...]
    activation: str | None

    def empty(self, options: LoadOptions, *, fp4_dtype: torch.dtype = torch.int8, meta: bool = False) -> Weight:
        """The weight with memory not yet written."""
        device = torch.device("meta") if meta else options.device
        if self.format == PLAIN:
            return Weight(torch.empty(self.shape, dtype=options.carrier, device=device), activation=self.activation)
        scale = torch.empty(Weight.scale_shape(self.shape, self.format), dtype=torch.float8_e8m0fnu, device=device)
        if self.format == FP8_BLOCK128:
            data = torch.empty(self.shape, dtype=torch.float8_e4m3fn, device=device)
        else:
            data = torch.empty((*self.shape[:-1], self.shape[-1] // 2), dtype=fp4_dtype, device=device)
        return Weight(data, scale, self.format, self.activation)


def _cover(cut: tuple[int, int], block: int, length: int) -> tuple[int, int]:
    return cut[0] // block * block, min(-(-cut[1] // block) * block, length)


def plan_matrix(spec: MatrixSpec, stored: str, options: LoadOptions) -> MatrixPlan:
    """Decide slices and format; ``stored`` is the format of all parts."""
    row_block = FP8_BLOCK if stored == FP8_BLOCK128 else 1
    column_block = {FP8_BLOCK128: FP8_BLOCK, FP4_BLOCK32: FP4_BLOCK}.get(stored, 1)
    columns = options.cut(spec.columns, spec.split == COLUMNS)
    cover_columns = _cover(columns, column_block, spec.columns)
    fits, groups = True, []
    for group in spec.groups:
        offset, pieces = 0, []
        for part in group:
            rows = options.cut(part.rows, spec.split == ROWS)
            piece = Piece(part, rows, columns, _cover(rows, row_block, part.rows), cover_columns)
            # Packed rows can follow one another only where the earlier ones end on a block.
            fits = fits and piece.exact and offset % row_block == 0
            offset += rows[1] - rows[0]
            pieces.append(piece)
        groups.append(tuple(pieces))
    shape = (offset, columns[1] - columns[0])
    packed = stored != PLAIN and not options.dequantise and fits
    rounds = spec.rounds and options.arithmetic == "shipping" and stored != PLAIN
    return MatrixPlan(
        tuple(groups),
        stored,
        stored if packed else PLAIN,
        (len(groups), *shape) if spec.stacked else shape,
        "fp8" if rounds else None,
    )


def format_of(entry: Entry) -> str | None:
    """The weight format that a stored dtype means; None for one that no weight has."""
    if entry.dtype in FLOATS:
        return PLAIN
    if entry.dtype is torch.float8_e4m3fn:
        return FP8_BLOCK128
    return FP4_BLOCK32 if entry.dtype in (torch.int8, torch.uint8) else None


def stored_bytes(piece: Piece, stored: str, itemsize: int) -> tuple[int, ...]:
    """Bytes read for a piece: data, and scale where there is one."""
    rows = piece.cover_rows[1] - piece.cover_rows[0]
    columns = piece.cover_columns[1] - piece.cover_columns[0]
    if stored == FP8_BLOCK128:
        return rows * columns, -(-rows // FP8_BLOCK) * -(-columns // FP8_BLOCK)
    if stored == FP4_BLOCK32:
        return rows * columns // 2, rows * columns // FP4_BLOCK
    return (rows * columns * itemsize,)
