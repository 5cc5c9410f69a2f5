"""What ``halma generate`` reports: one JSON object, and the table at the end."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from halma.cli.mtp import mtp_rows
from halma.cli.output import print_table

if TYPE_CHECKING:
    from halma.cli.team import Team
    from halma.models.deepseek_v4.engine import Engine, Generation
    from halma.models.deepseek_v4.load import Loaded
    from halma.models.deepseek_v4.ranks import Ranks


@dataclass(frozen=True)
class Run:
    """A finished run: seconds of the steps behind the first, and of it; tokens that the former gave."""

    seconds: float
    prefill_seconds: float
    tokens: int


def run_engine(engine: Engine) -> Run:
    """Step until nothing is left to do, and say how long it took."""
    begin = time.perf_counter()
    engine.step()
    first = time.perf_counter()
    already = engine.counters.tokens
    while engine.busy:
        engine.step()
    end = time.perf_counter()
    return Run(end - first, first - begin, engine.counters.tokens - already)


def result_of(loaded: Loaded, engine: Engine, generations: list[Generation], run: Run) -> dict[str, Any]:
    """The report of a run, but for what MTP and several ranks add to it."""
    runner, codec = loaded.runner, loaded.codec
    texts = ["" if codec is None else codec.decode(g.tokens) for g in generations]
    rate = run.tokens / run.seconds if run.seconds and run.tokens else 0.0
    return {
        "schema": "halma.generate/1",
        "text": texts[0],
        "token_ids": generations[0].tokens,
        "finish": generations[0].finish,
        "tokens_per_second": rate,
        "backend": runner.backend.name,
        "evidence": runner.backend.evidence,
        "arithmetic": runner.options.arithmetic,
        "model": loaded.name,
        "batch": runner.options.max_requests,
        "generations": [
            {"text": text, "token_ids": g.tokens, "finish": g.finish, "prompt_tokens": len(g.request.prompt)}
            for text, g in zip(texts, generations, strict=True)
        ],
        "seconds": {"first_step": run.prefill_seconds, "decode": run.seconds},
        "graphs": {
            "captured": len(runner.session),
            "replayed_steps": engine.counters.replayed,
            "eager_steps": engine.counters.eager,
            "why_eager": dict(runner.session.eager_steps),
        },
        "memory_bytes": {
            "weights": loaded.weight_bytes,
            "state": runner.model.state.nbytes,
            "workspace": runner.workspace.report().total,
        },
    }


def parallel_of(team: Team, ranks: Ranks, loaded: Loaded) -> dict[str, Any]:
    """How the model is divided, and what a decode step exchanges and how.

    With MTP that is a step of the most drafts: each drafted token passes through the module's embedding and layer.
    """
    from halma.hal.decisions import decisions

    runner, config = loaded.runner, loaded.config
    mine = {"weights": loaded.weight_bytes, "state": runner.model.state.nbytes, "arena": ranks.nbytes}
    drafts = runner.options.mtp
    nbytes = runner.options.max_requests * (drafts + 1) * config.hidden_size * runner.model.carrier.itemsize
    made = [decision for decision, _ in decisions.all("collective")]
    reduced = f"all_reduce of {nbytes} bytes"
    return {
        "size": team.size,
        "rank_memory_bytes": team.ranks.exchange("the report", mine),
        "all_reduces_per_step": 2 * config.num_hidden_layers + 1 + 3 * drafts,
        "all_reduce_bytes": nbytes,
        "all_reduce_algorithm": next((one.chosen for one in made if one.subject.startswith(reduced)), "none was made"),
        "collectives": [{"call": one.subject, "algorithm": one.chosen, "why": one.reason} for one in made],
    }


def print_summary(result: dict[str, Any]) -> None:
    """The report as a table."""
    memory, graphs = result["memory_bytes"], result["graphs"]
    rows = [
        ("backend", result["backend"]),
        ("evidence", result["evidence"]),
        ("arithmetic", result["arithmetic"]),
        ("tokens/s", f"{result['tokens_per_second']:.1f}"),
        (
            "graphs",
            f"{graphs['captured']} captured, {graphs['replayed_steps']} steps replayed, {graphs['eager_steps']} eager",
        ),
        *(
            (("why eager", "; ".join(f"{why} ({count})" for why, count in graphs["why_eager"].items())),)
            if graphs["why_eager"]
            else ()
        ),
        ("memory", ", ".join(f"{name} {size / 2**20:.1f} MiB" for name, size in memory.items())),
    ]
    rows += mtp_rows(result.get("mtp"))
    parallel = result.get("tensor_parallel")
    if parallel is not None:
        each = [f"{one['weights'] / 2**20:.1f} + {one['state'] / 2**20:.1f}" for one in parallel["rank_memory_bytes"]]
        way = f"{parallel['all_reduces_per_step']} of {parallel['all_reduce_bytes']} bytes a step"
        rows += [
            ("ranks", f"{parallel['size']}: weights and state {', '.join(each)} MiB"),
            ("all-reduces", f"{way}, by {parallel['all_reduce_algorithm']}"),
        ]
    if "expert_parallel" in result:
        each = [one["experts"] for one in result["expert_parallel"]]
        rows.append(("experts", ", ".join(f"{first} to {last - 1}" for first, last in each)))
    print_table(("", ""), rows)
