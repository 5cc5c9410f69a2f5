"""``--mtp``: what may be asked, what a runner must then hold, and what a report says of it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from halma.hal.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from halma.models.deepseek_v4.config import V4Config
    from halma.models.deepseek_v4.runner import RunnerOptions

MTP_HELP = "Draft so many tokens a step with the model's MTP module: 1 to 8, or auto."
AHEAD_HELP = "Steps that the host runs ahead of the device: 1 to 4."
PUBLISHED = {
    "drafts": 4,
    "mean_accepted_length": [3.18, 3.36],
    "model": "V4-Flash",
    "source": "MooreThreads/vllm-musa#178",
    "text": "length: MooreThreads/vllm-musa#178 reports 3.18 to 3.36 for V4-Flash with 4 drafts "
    "(another model and other text: docs/mtp.md says what can be compared)",
}
"""The one published figure for this architecture on the other vendor's GPUs, printed beside ours."""


def drafts_of(text: str | None) -> int | str | None:
    """``--mtp`` as the engine takes it.

    Raises:
        RequestError: neither a number from 1 to 8 nor ``auto``.
    """
    if text is None or text == "auto":
        return text
    try:
        number = int(text)
    except ValueError:
        number = 0
    from halma.models.deepseek_v4.runner import MAX_DRAFTS

    if not 1 <= number <= MAX_DRAFTS:
        raise RequestError(
            f"--mtp takes a number of drafts from 1 to {MAX_DRAFTS}, or auto",
            asked=f"--mtp {text}",
            do="--mtp 4, or --mtp auto; leave it out to generate without MTP",
        )
    return number


def with_mtp(options: RunnerOptions, drafts: int | str | None, config: V4Config, longest: int) -> RunnerOptions:
    """Options of a runner that drafts so many tokens.

    Args:
        longest: tokens of the longest prompt.

    Raises:
        ModelError: the model has no MTP module.
        RequestError: more drafts than the context has room for behind that prompt: none of the last could ever be
            accepted.
    """
    from halma.models.deepseek_v4.drafter import require_mtp
    from halma.models.deepseek_v4.engine_drafts import auto_lengths
    from halma.models.deepseek_v4.runner import MAX_DRAFTS

    if drafts is None:
        return options
    require_mtp(config)
    left = options.max_context - longest
    most = min(MAX_DRAFTS, max(left, 1)) if isinstance(drafts, str) else drafts
    if most > left:
        raise RequestError(
            "more drafts than the context has left",
            asked=f"--mtp {drafts}",
            found=f"{options.max_context} tokens of context, {longest} of them prompt: {left} left",
            do=f"--mtp {left} or fewer, a shorter prompt, or a higher --max-tokens or --context"
            if left > 0
            else "a shorter prompt, or a longer --context",
        )
    return replace(options, mtp=most, mtp_lengths=auto_lengths(most) if isinstance(drafts, str) else (most,))


def mtp_rows(report: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """Rows of a summary; none without MTP."""
    if report is None:
        return []
    each = ", ".join(f"{ratio:.3f}" for ratio in report["acceptance"]) or "nothing judged"
    length, tokens = report["mean_accepted_length"], report["tokens_per_step"]
    rows = [
        ("mtp", f"{report['asked']} drafts, {report['verified']} verified steps of a request"),
        ("acceptance", f"{each} by position"),
        ("accepted length", "-" if length is None else f"{length:.3f} tokens a step with all drafts judged"),
        *((("", PUBLISHED["text"]),) if report["asked"] == PUBLISHED["drafts"] else ()),
        ("tokens/step", "-" if tokens is None else f"{tokens:.3f} a request"),
    ]
    if report["choices"]:
        last = report["choices"][-1]
        chosen = f"{last['drafts']} for {last['requests']} requests, {len(report['choices'])} choices"
        rows.append(("drafts chosen", chosen))
    share = report["time_share"]
    shown = share["reason"] if share["draft"] is None else f"{share['verify']:.0%} verify, {share['draft']:.0%} draft"
    return [*rows, ("time", shown)]
