"""From a model's name to a runner: find it, check that it fits, load it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from halma.hal.backend import Backend
from halma.hal.errors import RequestError
from halma.hal.policy import headroom_for
from halma.models.deepseek_v4.checkpoint import LoadOptions, Progress, load_checkpoint
from halma.models.deepseek_v4.config import V4Config
from halma.models.deepseek_v4.engine import Request
from halma.models.deepseek_v4.expert_loading import ExpertLayers, load_experts
from halma.models.deepseek_v4.experts import OWN_EXPERTS, Experts
from halma.models.deepseek_v4.identity import program_facts
from halma.models.deepseek_v4.preparation import ARITHMETICS
from halma.models.deepseek_v4.presets import model_directory
from halma.models.deepseek_v4.program import Tap
from halma.models.deepseek_v4.ranks import ONE_RANK, Ranks
from halma.models.deepseek_v4.runner import RunnerOptions, V4Runner
from halma.models.deepseek_v4.sizing import MemoryLimit, host_limits
from halma.models.deepseek_v4.state import RowFormats, StatePlan, build_state
from halma.models.deepseek_v4.tokenizer import TextCodec


@dataclass(frozen=True)
class ModelSource:
    """A model that was found and whose configuration was read; nothing is loaded yet."""

    name: str
    path: Path
    config: V4Config

    @cached_property
    def codec(self) -> TextCodec:
        """The model's tokenizer. Raises ModelError where there is none."""
        return TextCodec(self.path, bos=self.config.bos_token_id, vocab_size=self.config.vocab_size)

    @property
    def codec_or_none(self) -> TextCodec | None:
        """The tokenizer, or None where the directory holds none."""
        return self.codec if (self.path / "tokenizer.json").is_file() else None

    def requests(
        self,
        prompts: Sequence[tuple[int, ...]],
        *,
        max_tokens: int,
        temperature: float,
        top_p: float,
        seed: int,
        ignore_eos: bool,
    ) -> list[Request]:
        """One request a prompt, with seeds ``seed``, ``seed + 1``, ..."""
        stop = frozenset() if ignore_eos else frozenset({self.config.eos_token_id})
        return [
            Request(prompt, max_tokens, temperature, top_p, seed + number, stop)
            for number, prompt in enumerate(prompts)
        ]


def resolve_model(name: str) -> ModelSource:
    """The model called ``name``: a built-in one, or a checkpoint directory.

    Raises:
        ModelError: no such model, or a configuration that halma cannot run.
    """
    path = model_directory(name)
    return ModelSource(name, path, V4Config.from_file(path / "config.json"))


def default_arithmetic(backend: Backend, asked: str | None) -> str:
    """``asked``, else exact on a plain CPU and shipping elsewhere.

    Raises:
        RequestError: no such arithmetic.
    """
    if asked is None:
        return "exact" if backend.device.torch_device.type == "cpu" else "shipping"
    if asked not in ARITHMETICS:
        raise RequestError(
            f'no arithmetic called "{asked}"',
            found="exact (weights dequantised, nothing rounded) and shipping (the official roundings)",
            do="--arithmetic exact, or --arithmetic shipping",
        )
    return asked


def default_carrier(backend: Backend, arithmetic: str) -> torch.dtype:
    """Activations' dtype: float32 on the CPU and wherever nothing may be rounded, else bfloat16."""
    exact = arithmetic == "exact" or backend.device.torch_device.type == "cpu"
    return torch.float32 if exact else torch.bfloat16


@dataclass(frozen=True, eq=False)
class Loaded:
    """A model on a device. ``codec`` is None where the directory holds no tokenizer."""

    name: str
    config: V4Config
    runner: V4Runner
    codec: TextCodec | None
    weight_bytes: int
    notes: tuple[str, ...] = ()


def load_v4(
    model: str | ModelSource,
    backend: Backend,
    options: RunnerOptions,
    *,
    carrier: torch.dtype | None = None,
    ranks: Ranks = ONE_RANK,
    experts: Experts = OWN_EXPERTS,
    tap: Tap | None = None,
    progress: Progress | None = None,
) -> Loaded:
    """Load a model for ``backend``, or of several ranks this one's part, which is all that is read.

    Args:
        carrier: see :func:`default_carrier`.
        experts: who does the feed-forward sublayers; where it is not this rank, their weights are not read.

    Raises:
        ModelError: the checkpoint is broken, or does not fit; nothing stays allocated.
    """
    source = resolve_model(model) if isinstance(model, str) else model
    carrier = carrier or default_carrier(backend, options.arithmetic)
    facts = program_facts(source.config, backend, options, carrier, ranks, experts)
    checkpoint = load_checkpoint(
        source.path,
        LoadOptions(
            carrier=carrier,
            arithmetic=options.arithmetic,
            dequantise=_on_cpu(backend),
            device=backend.device.torch_device,
            rank=ranks.rank,
            world=ranks.size,
            drafter=options.mtp > 0,
            experts=experts.held,
        ),
        limits=_limits(backend, ranks.size),
        state_bytes=lambda config: state_bytes(config, options, carrier),
        kept_free={one.name: one.nbytes for one in headroom_for(backend, facts, options.most_rows)},
        progress=progress,
    )
    config, weights = checkpoint.config, checkpoint.weights
    runner = V4Runner(config, weights, backend, options, carrier=carrier, ranks=ranks, experts=experts, tap=tap)
    return Loaded(source.name, config, runner, source.codec_or_none, weights.nbytes, checkpoint.notes)


def load_expert_part(
    source: ModelSource,
    backend: Backend,
    options: RunnerOptions,
    part: tuple[int, int],
    *,
    ranks: int,
    carrier: torch.dtype | None = None,
    progress: Progress | None = None,
) -> ExpertLayers:
    """Experts from, to of a model: what an FFN rank holds, and all that is read.

    Args:
        options: of the attention ranks; their arithmetic, and whether there are drafts.
        ranks: processes of this machine that load at the same time.

    Raises:
        ModelError: as :func:`load_v4`.
    """
    load = LoadOptions(
        carrier=carrier or default_carrier(backend, options.arithmetic),
        arithmetic=options.arithmetic,
        dequantise=_on_cpu(backend),
        device=backend.device.torch_device,
        drafter=options.mtp > 0,
    )
    return load_experts(source.path, load, part, limits=_limits(backend, ranks), progress=progress)


def _on_cpu(backend: Backend) -> bool:
    return backend.device.torch_device.type == "cpu"


def _limits(backend: Backend, ranks: int) -> list[MemoryLimit]:
    """What may still be taken. The ranks of a CPU load at the same time into the same memory."""
    if _on_cpu(backend):
        return [MemoryLimit(limit.name, limit.free // ranks) for limit in host_limits()]
    return [MemoryLimit("free device memory", backend.device.memory_info().free)]


def state_bytes(config: V4Config, options: RunnerOptions, carrier: torch.dtype) -> int:
    """Bytes that a runner's state will take, without allocating it."""
    plan = StatePlan.of(
        config,
        slots=options.max_requests,
        max_context=options.max_context,
        max_query_len=options.chunk,
        pages=options.pages,
        drafts=options.mtp,
    )
    formats = RowFormats.of(options.arithmetic, options.index_format)
    return build_state(config, plan, formats, dtype=carrier, device=torch.device("meta")).nbytes


def with_need(options: RunnerOptions, need: int, config: V4Config) -> RunnerOptions:
    """Options with a context of ``need`` tokens.

    Raises:
        RequestError: longer than the model allows.
    """
    if need > config.max_position_embeddings:
        raise RequestError(
            "the prompt is longer than the context",
            asked=f"{need} tokens, prompt and answer together",
            found=f"the model allows {config.max_position_embeddings}",
            do="shorten the prompt, or lower --max-tokens",
        )
    return replace(options, max_context=need)
