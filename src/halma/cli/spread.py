"""``halma generate --ep N``: requests by turns to N ranks, each of which holds a part of the experts.

With ``--tp T`` inside, T ranks share the attention of their requests: N / T groups, each with requests of its own.
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from halma.cli.generate_report import result_of, run_engine
from halma.cli.output import emit_json, print_table
from halma.cli.team import Team
from halma.hal.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from halma.hal.backend import Backend
    from halma.models.deepseek_v4.engine import Engine, Generation, Request
    from halma.models.deepseek_v4.load import ModelSource
    from halma.models.deepseek_v4.runner import RunnerOptions

EP_HELP = (
    "Ranks that each hold a part of the experts, as torchrun starts them. Each attends for requests of its own; with "
    "--tp T, T of them together."
)


EACH = ("experts", "steps", "memory_bytes", "mtp")
"""What is reported of each rank."""


@dataclass(frozen=True)
class Serving:
    """How to serve: ranks that share the attention, the engine's options, and whether one JSON object is printed."""

    tp: int
    drafts: int | str | None
    ahead: int
    json: bool


def check_parallel(ep: int, tp: int, drafts: int | str | None) -> tuple[int, str]:
    """How many groups of ranks ``--ep`` and ``--tp`` make, each with requests of its own, and the options in words.

    Raises:
        RequestError: experts over a part of the ranks that share the attention, or drafts whose number changes where
            groups exchange rows; the legal values are named.
    """
    if ep == 1:
        return 1, ""
    asked = f"--ep {ep}" if tp == 1 else f"--ep {ep} --tp {tp}"
    if ep % tp:
        legal = [str(one) for one in range(1, ep + 1) if ep % one == 0]
        raise RequestError(
            "these numbers of ranks do not go together",
            asked=asked,
            found=f"{ep} ranks hold the experts, and they are no whole number of groups of {tp}",
            do=f"with --ep {ep}: --tp {', '.join(legal[:-1])} or {legal[-1]}; or --tp {tp} alone",
        )
    if ep > tp and drafts == "auto":
        raise RequestError(
            "ranks that exchange rows need one number of drafts",
            asked=f"{asked} --mtp auto",
            found="each token that a step drafts is an exchange, and all ranks' steps have equally many",
            do=f"--mtp 1 to 8, or --ep {ep} --tp {ep}, where ranks have the same requests and exchange no rows",
        )
    return ep // tp, asked


def generate_spread(
    team: Team,
    source: ModelSource,
    backend: Backend,
    options: RunnerOptions,
    requests: list[Request],
    how: Serving,
) -> None:
    """Every rank's part of the command; rank 0 prints."""
    import torch.distributed as distributed

    import halma
    from halma.models.deepseek_v4.engine import Engine
    from halma.models.deepseek_v4.load import default_carrier, load_v4
    from halma.models.deepseek_v4.spread import spread

    group = team.together("the group", lambda: halma.collectives(world=distributed.group.WORLD, backend=backend))
    carrier = default_carrier(backend, options.arithmetic)
    groups = team.size // how.tp
    with contextlib.ExitStack() as held:
        ranks = held.enter_context(team.divided(backend, source.config, options.most_rows, carrier, how.tp))
        manager = spread(source.config, group, tokens=options.most_rows, carrier=carrier, ranks=ranks)
        experts = team.together("the exchange", lambda: held.enter_context(manager))
        loaded = team.together("loading", lambda: load_v4(source, backend, options, ranks=ranks, experts=experts))
        decoder = None if loaded.codec is None else loaded.codec.decode

        def ready() -> tuple[Engine, list[Generation]]:
            made = Engine(loaded.runner, ahead=how.ahead, drafts=how.drafts, decoder=decoder)
            return made, [made.submit(request) for request in requests[team.rank // how.tp :: groups]]

        engine, generations = team.together("the requests", ready)
        # The same ladder on every rank: where a dry run works for real, it exchanges rows with the others'.
        variants = sorted({"sample" if request.temperature > 0 else "greedy" for request in requests})
        team.together("capturing", lambda: loaded.runner.prepare(loaded.runner.descriptors(variants)))
        result: dict[str, Any] = {"generations": [], "memory_bytes": {"weights": loaded.weight_bytes}}
        if generations:
            result = result_of(loaded, engine, generations, run_engine(engine))
        experts.go_along(loaded.runner)
        tokens = [(generation.tokens, generation.finish) for generation in generations]
        team.together("the tokens", lambda: ranks.require_same("their tokens", tokens))
        result["mtp"] = engine.drafting()
        result["memory_bytes"]["exchange"] = experts.nbytes
        result["experts"] = experts.held
        result["steps"] = experts.steps
        everybody = team.ranks.exchange("the report", result)
        loaded.runner.close()
    if not team.speaks:
        return
    merged = {
        **everybody[0],
        "generations": by_turns([one["generations"] for one in everybody[:: how.tp]], len(requests)),
        "tokens_per_second": sum(one.get("tokens_per_second", 0.0) for one in everybody[:: how.tp]),
        "expert_parallel": [{name: one[name] for name in EACH} for one in everybody],
        **({"tensor_parallel": {"size": how.tp, "groups": groups}} if how.tp > 1 else {}),
    }
    del merged["mtp"]  # each group has drafts of its own
    if how.json:
        emit_json(merged)
        return
    print_texts(source, requests, merged["generations"])
    if sys.stdout.isatty():
        rows = [
            (f"rank {number}", f"experts {one['experts'][0]} to {one['experts'][1] - 1}, {one['steps']} steps")
            for number, one in enumerate(merged["expert_parallel"])
        ]
        print_table(("", ""), [*rows, ("tokens/s", f"{merged['tokens_per_second']:.1f}")])


def by_turns(parts: Sequence[Sequence[Any]], count: int) -> list[Any]:
    """What went to several ranks by turns, in its own order again."""
    return [parts[number % len(parts)][number // len(parts)] for number in range(count)]


def print_texts(source: ModelSource, requests: Sequence[Request], generations: Sequence[dict[str, Any]]) -> None:
    """Each prompt with its answer, a line each, or token ids where there is no tokenizer."""
    codec = source.codec_or_none
    for request, generation in zip(requests, generations, strict=True):
        tokens = [*request.prompt, *generation["token_ids"]]
        print(generation["token_ids"] if codec is None else codec.decode(tokens))
