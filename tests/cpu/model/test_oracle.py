"""transformers' own DeepSeek-V4 beside ours, on random models that no golden file holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import halma
from halma.models.deepseek_v4.checkpoint import LoadOptions, load_source
from halma.models.deepseek_v4.golden import EXACT_TOLERANCE, CaseModel, deviation, force
from halma.models.deepseek_v4.synthetic import SyntheticSource, small_config, synthetic_tensors

transformers = pytest.importorskip("transformers", reason="transformers, the oracle, needs Python 3.11")
pytestmark = pytest.mark.oracle

CONFIGS = {
    "every_layer": {},
    "window_and_wide_top_k": {"sliding_window": 24, "index_topk": 9, "num_experts_per_tok": 5, "num_hash_layers": 0},
    "heavy_first": {"compress_ratios": (16, 4, 0, 16, 0), "hc_sinkhorn_iters": 7, "routed_scaling_factor": 2.5},
    "three_streams": {"hc_mult": 3, "swiglu_limit": 0.7, "o_groups": 4, "num_hash_layers": 4},
}


def _pairwise() -> list[Any]:
    """Every configuration, replayed or eagerly in turns; the other half is the nightly row's."""
    product = [(name, graph, at % 2 == graph) for at, name in enumerate(CONFIGS) for graph in (False, True)]
    return [pytest.param(name, graph, marks=[] if now else [pytest.mark.nightly]) for name, graph, now in product]


@pytest.mark.parametrize(("name", "graph"), _pairwise())
def test_logits_equal_transformers(name, graph):
    from benchmarks.peers import transformers_model

    config = small_config(**CONFIGS[name])
    seed = sorted(CONFIGS).index(name) + 11
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, config.vocab_size, (2, 83), generator=generator)
    with torch.no_grad():
        expected = transformers_model(config, synthetic_tensors(config, seed))(input_ids=tokens).logits
    loaded = load_source(config, SyntheticSource(config, seed), LoadOptions(drafter=False))
    found = force(
        halma.backend("cpu"),
        CaseModel(loaded.config, loaded.weights),
        tokens,
        prefill=37,
        step=1 if graph else 3,
        graph=graph,
        arithmetic="exact",
        carrier=torch.float32,
        checked=True,
    )
    assert deviation(found, expected, float(expected.std())) <= EXACT_TOLERANCE
    assert torch.equal(found.argmax(-1), expected.argmax(-1))
