"""The configuration of a DeepSeek-V4 model: read, checked once, then frozen.

Field names are those of the published ``config.json``. transformers writes the same facts under other names
(``layer_types``, ``rope_parameters`` ...); :mod:`halma.models.deepseek_v4.config_names` translates them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from halma.hal.errors import ModelError
from halma.models.deepseek_v4.config_fields import (
    FIXED,
    MODEL_TYPE,
    QUANTISATION,
    check_fixed,
    check_model_type,
    read_json_object,
    typed,
)
from halma.models.deepseek_v4.config_names import official_fields
from halma.models.deepseek_v4.config_ranges import out_of_range
from halma.models.deepseek_v4.layer_kind import LayerKind, RopeScaling

__all__ = ["LayerKind", "RopeScaling", "V4Config"]


@dataclass(frozen=True)
class V4Config:
    """A checked configuration. Names and meaning follow the published ``config.json``.

    Attributes:
        compress_ratios: one per layer, then one per MTP module (0 where the file leaves them out).
        quantised: linears are stored as fp8 with 128 x 128 blocks (``quantization_config`` is present).
        expert_dtype: format of the routed experts: ``fp4``, ``fp8`` (Base checkpoints) or ``plain``.
        drafter: ``mtp``; ``dspark`` (another draft module under the same tensor prefix, which halma does not
            run: the target model alone does); or None. The loader corrects it by the tensors it finds.

    Raises:
        ModelError: fields out of range; all of them are named with value and range.
    """

    vocab_size: int
    hidden_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    n_routed_experts: int
    num_experts_per_tok: int
    num_hash_layers: int
    routed_scaling_factor: float
    swiglu_limit: float
    sliding_window: int
    compress_ratios: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    rms_norm_eps: float
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: RopeScaling
    max_position_embeddings: int
    num_nextn_predict_layers: int = 0
    bos_token_id: int = 0
    eos_token_id: int = 1
    quantised: bool = False
    expert_dtype: str = "plain"
    drafter: str | None = None

    def __post_init__(self) -> None:
        problems = out_of_range(self)
        if problems:
            raise ModelError(
                "the configuration is out of range",
                found=problems,
                do="use the config.json that belongs to the checkpoint",
            )

    # -- derived ------------------------------------------------------------------------------------

    @property
    def layers(self) -> tuple[LayerKind, ...]:
        """The kind of every layer of the target model."""
        return tuple(LayerKind(ratio) for ratio in self.compress_ratios[: self.num_hidden_layers])

    @property
    def mtp_layers(self) -> tuple[LayerKind, ...]:
        """The kind of every MTP module's block; empty unless the drafter is MTP.

        Its own entry of ``compress_ratios``, never that of a target layer (antirez/ds4#411).
        """
        return tuple(LayerKind(ratio) for ratio in self.compress_ratios[self.num_hidden_layers :][: self.num_mtp])

    @property
    def num_mtp(self) -> int:
        """MTP modules that can be run."""
        return self.num_nextn_predict_layers if self.drafter == "mtp" else 0

    @property
    def nope_head_dim(self) -> int:
        """Channels of a head without rope; they come first."""
        return self.head_dim - self.qk_rope_head_dim

    def hashed(self, layer: int) -> bool:
        """Whether layer ``layer`` takes its experts from a table by token id."""
        return layer < self.num_hash_layers

    # -- reading ------------------------------------------------------------------------------------

    @staticmethod
    def from_dict(raw: Mapping[str, Any], source: str = "the configuration") -> V4Config:
        """Read official or transformers' names.

        Raises:
            ModelError: another architecture, a missing field, a value of the wrong type or out of range.
        """
        check_model_type(raw, source)
        official = official_fields(raw, source)
        check_fixed(official, source)
        arguments = typed(V4Config, official, source)
        try:
            return V4Config(**arguments)
        except ModelError as error:
            raise ModelError(error.what, asked=source, found=error.found, do=error.do) from None

    @staticmethod
    def from_file(path: str | Path) -> V4Config:
        """Read ``config.json`` (the file, or a directory that holds it).

        Raises:
            ModelError: no such file, bad JSON, or as :meth:`from_dict`.
        """
        path = Path(path)
        path = path / "config.json" if path.is_dir() else path
        return V4Config.from_dict(read_json_object(path, "the configuration"), str(path))

    def to_dict(self) -> dict[str, Any]:
        """The official ``config.json`` of this configuration."""
        raw: dict[str, Any] = {"architectures": ["DeepseekV4ForCausalLM"], "model_type": MODEL_TYPE, **FIXED}
        for field in fields(self):
            if field.name not in ("quantised", "drafter", "expert_dtype", "rope_scaling", "compress_ratios"):
                raw[field.name] = getattr(self, field.name)
        scaling = self.rope_scaling
        raw["compress_ratios"] = list(self.compress_ratios)
        raw["rope_scaling"] = {
            "type": "yarn",
            "factor": scaling.factor,
            "original_max_position_embeddings": scaling.original_max_position_embeddings,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
        }
        if self.drafter == "dspark":
            raw["dspark_block_size"] = 5
        if self.expert_dtype != "plain":
            raw["expert_dtype"] = self.expert_dtype
        if self.quantised:
            raw["quantization_config"] = dict(QUANTISATION)
        return raw
