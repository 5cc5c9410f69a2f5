"""Imports every op family, so that the op table is complete: ``import halma.ops.families``.

``halma.ops`` itself stays light; whoever runs a model, lists ops or checks routes imports this.
"""

from __future__ import annotations

from halma.ops import (
    attention,
    cache,
    compressor,
    experts,
    grouped,
    hyper_connection,
    indexer,
    linear,
    norm,
    quant,
    rope,
    routing,
    rows,
    sampling,
    speculation,
    vocabulary,
)

FAMILIES = (
    rows,
    norm,
    linear,
    quant,
    rope,
    hyper_connection,
    cache,
    compressor,
    indexer,
    attention,
    routing,
    experts,
    grouped,
    sampling,
    speculation,
    vocabulary,
)
"""The modules in the order in which a step meets them."""
