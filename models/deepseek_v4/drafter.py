"""Which draft module a checkpoint holds, and whether it can be run."""

from __future__ import annotations

from dataclasses import replace

from halma.hal.errors import ModelError
from halma.models.deepseek_v4.config import V4Config
from halma.models.deepseek_v4.sources import TensorSource


def with_drafter(config: V4Config, source: TensorSource) -> tuple[V4Config, list[str]]:
    """The configuration with ``drafter`` as the tensors have it, and what to tell the user.

    Later checkpoints keep another draft module under ``mtp.*`` (vllm-project/vllm#41834, #52165): an MTP
    module is told by its two input norms, never by the prefix.
    """
    present = [name for name in source.names() if name.startswith("mtp.")]
    real = any(source.entry(f"mtp.0.{norm}.weight") is not None for norm in ("enorm", "hnorm"))
    if config.drafter == "dspark" or (present and not real):
        note = "the tensors under mtp. are a DSpark drafter, not MTP: the target model runs alone"
        return _without_mtp(config, "dspark"), [note] if present else []
    if config.drafter == "mtp" and not present:
        return _without_mtp(config, None), ["the configuration promises an MTP module, the checkpoint holds none"]
    if config.drafter is None and present:
        return config, ["the checkpoint holds an MTP module that its configuration does not mention; it is ignored"]
    return config, []


def _without_mtp(config: V4Config, drafter: str | None) -> V4Config:
    ratios = config.compress_ratios[: config.num_hidden_layers]
    return replace(config, drafter=drafter, num_nextn_predict_layers=0, compress_ratios=ratios)


def require_mtp(config: V4Config) -> None:
    """Whether speculative decoding with MTP is possible.

    Raises:
        ModelError: another drafter, or none; says that the target alone still runs.
    """
    if config.num_mtp:
        return
    found = {
        "dspark": "a DSpark drafter under mtp.* (no enorm, no hnorm): another module, which halma does not run",
        None: "no MTP module in this checkpoint",
    }
    raise ModelError(
        "MTP is not available for this model",
        asked="speculative decoding with MTP",
        found=found.get(config.drafter, "the MTP module was not loaded"),
        do="generate without MTP: the target model alone runs; or use a first-release V4-Flash or V4-Pro checkpoint",
    )
