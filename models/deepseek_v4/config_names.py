"""Two vocabularies for one configuration: the published ``config.json`` and transformers' own names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from halma.hal.errors import ModelError

if TYPE_CHECKING:
    from halma.models.deepseek_v4.config import V4Config

SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
HASHED, SCORED = "hash_moe", "moe"


def official_fields(raw: Mapping[str, Any], source: str) -> dict[str, Any]:
    """``raw`` in official names; what is official already passes unchanged.

    Raises:
        ModelError: transformers' fields that have no official counterpart.
    """
    official = dict(raw)
    if "compress_ratios" in raw or "layer_types" not in raw:
        return official
    try:
        official["compress_ratios"] = _ratios(raw)
        official["num_hash_layers"] = _hash_layers(raw)
        official.setdefault("num_hidden_layers", len(raw["layer_types"]))
        official.update(_rope(raw))
    except (KeyError, TypeError, ValueError) as error:
        found = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
        raise ModelError(
            "the configuration has transformers' names, but cannot be understood",
            asked=source,
            found=found,
            do="give layer_types, compress_rates, mlp_layer_types and rope_parameters, or an official config.json",
        ) from error
    return official


def _ratios(raw: Mapping[str, Any]) -> list[int]:
    rates = {SLIDING: 0, **raw["compress_rates"]}
    if rates.get(SPARSE, 4) != 4:
        raise ValueError(f"compress_rates.{SPARSE} = {rates[SPARSE]}; must be 4")
    if rates.get(HEAVY) == 4:
        raise ValueError(f"compress_rates.{HEAVY} = 4; must differ from the sparse layers' 4")
    unknown = sorted(set(raw["layer_types"]) - {SLIDING, SPARSE, HEAVY})
    if unknown:
        raise ValueError(f"layer_types holds {unknown}; must be {SLIDING}, {SPARSE} or {HEAVY}")
    return [rates[kind] for kind in raw["layer_types"]]


def _hash_layers(raw: Mapping[str, Any]) -> int:
    kinds: Sequence[str] = raw["mlp_layer_types"]
    count = sum(1 for kind in kinds if kind == HASHED)
    if list(kinds) != [HASHED] * count + [SCORED] * (len(kinds) - count):
        raise ValueError(f"mlp_layer_types = {list(kinds)}; must be {HASHED} layers first, then {SCORED}")
    return count


def _rope(raw: Mapping[str, Any]) -> dict[str, Any]:
    main, compress = raw["rope_parameters"]["main"], raw["rope_parameters"]["compress"]
    width = raw["head_dim"] * main.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    if width != round(width):
        raise ValueError(f"head_dim * partial_rotary_factor = {width}; must be a whole number")
    if compress.get("attention_factor", 1.0) not in (None, 1, 1.0):
        raise ValueError(f"rope_parameters.compress.attention_factor = {compress['attention_factor']}; must be 1")
    return {
        "qk_rope_head_dim": round(width),
        "rope_theta": main["rope_theta"],
        "compress_rope_theta": compress["rope_theta"],
        "rope_scaling": compress,
    }


def transformers_fields(config: V4Config) -> dict[str, Any]:
    """Keyword arguments of transformers' ``DeepseekV4Config`` for the same model (without MTP, which it lacks).

    Raises:
        ModelError: HCA layers of several ratios, which transformers cannot say.
    """
    heavy = sorted({kind.ratio for kind in config.layers if kind.name == "HCA"})
    if len(heavy) > 1:
        raise ModelError(
            "transformers knows one HCA ratio a model",
            found=f"compress_ratios {heavy}",
            do="use a configuration with one HCA ratio",
        )
    raw = config.to_dict()
    for name in ("compress_ratios", "num_hash_layers", "rope_scaling", "quantization_config", "expert_dtype"):
        raw.pop(name, None)
    partial = config.qk_rope_head_dim / config.head_dim
    scaling = config.rope_scaling
    raw.update(
        layer_types=[{"SWA": SLIDING, "CSA": SPARSE, "HCA": HEAVY}[kind.name] for kind in config.layers],
        compress_rates={SPARSE: 4, HEAVY: heavy[0] if heavy else 128},
        mlp_layer_types=[HASHED if config.hashed(i) else SCORED for i in range(config.num_hidden_layers)],
        partial_rotary_factor=partial,
        rope_parameters={
            "main": {
                "rope_type": "default",
                "rope_theta": config.rope_theta,
                "partial_rotary_factor": partial,
            },
            "compress": {
                "rope_type": "yarn",
                "rope_theta": config.compress_rope_theta,
                "partial_rotary_factor": partial,
                "factor": scaling.factor,
                "beta_fast": scaling.beta_fast,
                "beta_slow": scaling.beta_slow,
                "original_max_position_embeddings": scaling.original_max_position_embeddings,
                "attention_factor": 1.0,
            },
        },
    )
    return raw
