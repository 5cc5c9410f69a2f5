"""From JSON values to the arguments of a configuration: architecture, fixed choices, types."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from halma.hal.errors import ModelError
from halma.models.deepseek_v4.layer_kind import RopeScaling

MODEL_TYPE = "deepseek_v4"

FIXED: dict[str, Any] = {
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True,
    "topk_method": "noaux_tc",
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
"""What every published V4 checkpoint has and the programs take for granted."""

QUANTISATION: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "scale_fmt": "ue8m0",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}


def read_json_object(path: Path, what: str) -> dict[str, Any]:
    """A JSON file that holds an object.

    Raises:
        ModelError: it is missing, unreadable, no JSON, or no object.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(
            f"{what} is missing", asked=str(path), found="no such file", do="give the directory of a whole checkpoint"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{what} cannot be read", asked=str(path), found=str(error), do="check the file") from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise ModelError(
            f"{what} is not valid JSON", asked=str(path), found=str(error), do="download the file again"
        ) from error
    if not isinstance(raw, dict):
        raise ModelError(
            f"{what} is not a JSON object", asked=str(path), found=type(raw).__name__, do="download the file again"
        )
    return raw


def check_model_type(raw: Mapping[str, Any], source: str) -> None:
    found = raw.get("model_type")
    if found == MODEL_TYPE:
        return
    if isinstance(found, str) and found.startswith("deepseek_v41"):
        raise ModelError(
            "DeepSeek-V4.1 is a different architecture and is not supported",
            asked=source,
            found=f"model_type = {found!r}: shared KV layers, Engram tables, 32 x 32 weight blocks",
            do="use a DeepSeek-V4 checkpoint (V4-Flash, V4-Pro, their Base versions, or tiny-v4)",
        )
    raise ModelError(
        "not a DeepSeek-V4 model",
        asked=source,
        found="model_type is missing" if found is None else f"model_type = {found!r}",
        do=f"halma runs model_type {MODEL_TYPE!r} and no other",
    )


def _same(found: Any, expected: Any) -> bool:
    """Equal, and not the boolean that Python takes for 0 or 1."""
    return found == expected and isinstance(found, bool) == isinstance(expected, bool)


def check_fixed(raw: Mapping[str, Any], source: str) -> None:
    problems = [
        f"{name} = {raw[name]!r}; must be {expected!r}"
        for name, expected in FIXED.items()
        if raw.get(name) is not None and not _same(raw[name], expected)
    ]
    quantisation = raw.get("quantization_config")
    if isinstance(quantisation, Mapping):
        problems += [
            f"quantization_config.{name} = {quantisation[name]!r}; must be {expected!r}"
            for name, expected in QUANTISATION.items()
            if quantisation.get(name) is not None and quantisation[name] != expected
        ]
    elif quantisation is not None:
        problems.append(f"quantization_config = {quantisation!r}; must be an object")
    if problems:
        raise ModelError(
            "the configuration asks for something that DeepSeek-V4 does not have",
            asked=source,
            found=problems,
            do="use the config.json that belongs to the checkpoint",
        )


def typed(cls: type, raw: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Constructor arguments out of JSON values."""
    values: dict[str, Any] = {}
    problems: list[str] = []
    for field in fields(cls):
        if field.type not in ("int", "float"):
            continue
        value = raw.get(field.name)
        if value is None:
            if field.default is MISSING:
                problems.append(f"{field.name} is missing")
            continue
        _put_number(values, field.name, value, str(field.type), problems)
    values["rope_scaling"] = _rope_scaling(raw.get("rope_scaling"), problems)
    values["compress_ratios"] = ratios = _ratios(raw.get("compress_ratios"), problems)
    values["quantised"] = raw.get("quantization_config") is not None
    values["expert_dtype"] = raw.get("expert_dtype") or ("fp8" if values["quantised"] else "plain")
    if problems:
        raise ModelError(
            "the configuration cannot be read",
            asked=source,
            found=problems,
            do="use the config.json that belongs to the checkpoint",
        )
    layers, modules = values["num_hidden_layers"], values.get("num_nextn_predict_layers", 0)
    dspark = any(name.startswith("dspark_") for name in raw)
    values["drafter"] = "dspark" if dspark else "mtp" if modules else None
    if dspark:  # the entries beyond the layers belong to the drafter, which is not run
        values["num_nextn_predict_layers"] = modules = 0
        ratios = ratios[:layers]
    if len(ratios) == layers and 0 < modules < 1000:
        ratios = (*ratios, *([0] * modules))
    values["compress_ratios"] = ratios
    return values


def _put_number(values: dict[str, Any], name: str, value: Any, kind: str, problems: list[str]) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if kind == "int" and whole:
        values[name] = value
    elif kind == "float" and (whole or isinstance(value, float)):
        values[name] = float(value)
    else:
        problems.append(f"{name} = {value!r}; must be {'a whole number' if kind == 'int' else 'a number'}")


def _rope_scaling(raw: Any, problems: list[str]) -> RopeScaling | None:
    if not isinstance(raw, Mapping):
        problems.append("rope_scaling is missing" if raw is None else f"rope_scaling = {raw!r}; must be an object")
        return None
    kind = raw.get("type", raw.get("rope_type", "yarn"))
    if kind != "yarn":
        problems.append(f"rope_scaling.type = {kind!r}; must be 'yarn'")
    values: dict[str, Any] = {}
    for field in fields(RopeScaling):
        value = raw.get(field.name)
        if value is not None:
            _put_number(values, field.name, value, str(field.type), problems)
            if field.name not in values:
                problems[-1] = f"rope_scaling.{problems[-1]}"
                return None
        elif field.default is MISSING:
            problems.append(f"rope_scaling.{field.name} is missing")
            return None
    return RopeScaling(**values)


def _ratios(raw: Any, problems: list[str]) -> tuple[int, ...]:
    if raw is None:
        problems.append("compress_ratios is missing")
        return ()
    if not isinstance(raw, (list, tuple)) or any(not isinstance(r, int) or isinstance(r, bool) for r in raw):
        problems.append(f"compress_ratios = {raw!r}; must be a list of whole numbers")
        return ()
    return tuple(raw)
