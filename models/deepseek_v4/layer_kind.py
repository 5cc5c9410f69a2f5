"""Small parts of a configuration: what a layer is, and how its rope is stretched."""

from __future__ import annotations

from dataclasses import dataclass

CSA_RATIO = 4
"""The one ratio whose blocks overlap and are chosen by an indexer."""


@dataclass(frozen=True)
class LayerKind:
    """How a layer's attention reaches beyond its window; decided by the compression ratio alone.

    Attributes:
        ratio: tokens pooled into one compressed row; 0 = none (SWA), 4 = CSA, any other number = HCA.
    """

    ratio: int

    @property
    def name(self) -> str:
        """``SWA``, ``CSA`` or ``HCA``."""
        return "SWA" if self.ratio == 0 else "CSA" if self.ratio == CSA_RATIO else "HCA"

    @property
    def indexed(self) -> bool:
        """Whether an indexer chooses among the compressed rows (CSA)."""
        return self.ratio == CSA_RATIO

    @property
    def overlap(self) -> bool:
        """Whether a compressed row also pools the previous block (CSA)."""
        return self.ratio == CSA_RATIO

    @property
    def rope(self) -> str:
        """Which rope table serves everything in the layer: ``main`` (no YaRN) or ``compress``.

        One table for queries, window and compressed rows of a layer: mixing them is a known fault
        (huggingface/transformers#45910, Avarok-Cybersecurity/atlas#276).
        """
        return "compress" if self.ratio else "main"


@dataclass(frozen=True)
class RopeScaling:
    """YaRN of the compressed layers. Its amplitude is 1: nothing multiplies cos, sin or the softmax scale."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
