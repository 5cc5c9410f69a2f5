"""``halma generate --ep N``: requests by turns to N ranks, each of which holds a part of the experts."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

from halma.cli.generate_report import result_of, run_engine
from halma.cli.output import emit_json, print_table
from halma.cli.team import Team
from halma.hal.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from halma.hal.backend import Backend
    from halma.models.deepseek_v4.engine import Request
    from halma.models.deepseek_v4.load import ModelSource
    from halma.models.deepseek_v4.runner import RunnerOptions

EP_HELP = "Ranks that each attend for requests of their own and hold a part of the experts, as torchrun starts them."


def refuse_beside_ep(ep: int, tp: int, mtp: object, stop: object) -> None:
    """What does not go with ``--ep``.

    Raises:
        RequestError: naming the options.
    """
    beside = [name for name, value in (("--tp", tp != 1), ("--mtp", mtp), ("--stop", stop)) if value]
    if ep > 1 and beside:
        raise RequestError(
            "these options do not go with --ep yet",
            asked=f"--ep {ep} with {', '.join(beside)}",
            found="ranks of --ep hold whole matrices, and make equally many exchanges a step",
            do="leave them out; --tp N divides every matrix, the experts' too",
        )


def generate_spread(
    team: Team,
    source: ModelSource,
    backend: Backend,
    options: RunnerOptions,
    requests: list[Request],
    *,
    json: bool,
) -> None:
    """Every rank's part of the command; rank 0 prints."""
    import torch.distributed as distributed

    import halma
    from halma.models.deepseek_v4.engine import Engine
    from halma.models.deepseek_v4.load import default_carrier, load_v4
    from halma.models.deepseek_v4.spread import spread

    group = team.together("the group", lambda: halma.collectives(world=distributed.group.WORLD, backend=backend))
    carrier = default_carrier(backend, options.arithmetic)
    with contextlib.ExitStack() as held:
        manager = spread(source.config, group, tokens=options.most_rows, carrier=carrier)
        experts = team.together("the exchange", lambda: held.enter_context(manager))
        loaded = team.together("loading", lambda: load_v4(source, backend, options, experts=experts))
        engine = Engine(loaded.runner)
        mine = requests[team.rank :: team.size]
        generations = [engine.submit(request) for request in mine]
        # The same ladder on every rank: where a dry run works for real, it exchanges rows with the others'.
        variants = sorted({"sample" if request.temperature > 0 else "greedy" for request in requests})
        team.together("capturing", lambda: loaded.runner.prepare(loaded.runner.descriptors(variants)))
        result: dict[str, Any] = {"generations": [], "memory_bytes": {"weights": loaded.weight_bytes}}
        if generations:
            result = result_of(loaded, engine, generations, run_engine(engine))
        experts.go_along(loaded.runner)
        result["memory_bytes"]["exchange"] = experts.nbytes
        result["experts"] = experts.held
        result["steps"] = experts.steps
        everybody = team.ranks.exchange("the report", result)
        loaded.runner.close()
    if not team.speaks:
        return
    merged = {
        **everybody[0],
        "generations": by_turns([one["generations"] for one in everybody], len(requests)),
        "tokens_per_second": sum(one.get("tokens_per_second", 0.0) for one in everybody),
        "expert_parallel": [{name: one[name] for name in ("experts", "steps", "memory_bytes")} for one in everybody],
    }
    if json:
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
