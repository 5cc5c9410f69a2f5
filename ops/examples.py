"""Example calls of our ops for the admission suite: small, seeded, and hard where implementations differ.

Imported by whoever tries routes; a program never needs it. Row counts, odd widths and ties are chosen so that a
kernel that assumes a multiple of its tile, or breaks ties its own way, is found out.
"""

from __future__ import annotations

from typing import Any

import torch

from halma.hal.testing.examples import Arguments, OpExample, examples
from halma.ops import families as _families  # noqa: F401  (defines every op)
from halma.ops import grouped_examples as _grouped_examples  # noqa: F401  (experts by group)
from halma.ops import speculation_examples as _speculation_examples  # noqa: F401  (the token state)
from halma.ops import state_examples as _state_examples  # noqa: F401  (the ops that keep state)
from halma.ops.draws import Draw, example
from halma.ops.weight import Weight

ROUNDED = 5e-2
"""Tolerance where activations are rounded: another order of summation moves a value across a rounding step."""


CODE = 7e-2
"""Tolerance of e4m3 codes, relative to the largest: one place of the largest code, 32 of 448."""


# -- rows -----------------------------------------------------------------------------------------------


@examples("step_rows")
def _step_rows() -> list[OpExample]:
    def build(tokens: int) -> Any:
        def make(draw: Draw, rows: int) -> Arguments:
            count = draw.ids(rows, below=tokens + 1)
            return draw.ids(rows, tokens, below=99), draw.ids(rows, below=500), count, draw.ids(rows, below=9)

        return make

    return [
        example("step_rows", "one token a request", build(1), by_row=(0, 1, 2, 3)),
        example("step_rows", "five tokens a request, some padding", build(5)),
    ]


@examples("embed")
def _embed() -> list[OpExample]:
    def build(draw: Draw, rows: int) -> Arguments:
        return draw.ids(rows, below=40), Weight(draw.normal(40, 24))

    def part(draw: Draw, rows: int) -> Arguments:
        return draw.ids(rows, below=40), Weight(draw.normal(10, 24)), 20

    return [
        example("embed", "fp32 table", build, by_row=(0,), tolerance=0.0),
        example("embed", "the third quarter of a vocabulary", part, by_row=(0,), tolerance=0.0),
    ]


@examples("expand_streams")
def _expand_streams() -> list[OpExample]:
    return [
        example("expand_streams", "four streams", lambda d, n: (d.normal(n, 20), 4), by_row=(0,), tolerance=0.0),
    ]


@examples("last_rows")
def _last_rows() -> list[OpExample]:
    def build(tokens: int) -> Any:
        def make(draw: Draw, rows: int) -> Arguments:
            return draw.normal(rows * tokens, 4, 6), draw.ids(rows, below=tokens + 1), tokens

        return make

    return [
        example("last_rows", "one token a request", build(1), by_row=(0, 1), tolerance=0.0),
        example("last_rows", "three tokens a request", build(3), tolerance=0.0),
    ]


# -- products and norms ---------------------------------------------------------------------------------


@examples("rms_norm")
def _rms_norm() -> list[OpExample]:
    return [
        example("rms_norm", "weighted", lambda d, n: (d.normal(n, 129), d.normal(129), 1e-6), by_row=(0,)),
        example("rms_norm", "per head, unweighted", lambda d, n: (d.normal(n, 3, 64), None, 1e-6), by_row=(0,)),
        example(
            "rms_norm",
            "bf16",
            lambda d, n: (d.normal(n, 64, dtype=torch.bfloat16), d.normal(64, dtype=torch.bfloat16), 1e-6),
            by_row=(0,),
            tolerance=8e-3,
        ),
    ]


@examples("linear")
def _linear() -> list[OpExample]:
    def plain(draw: Draw, rows: int) -> Arguments:
        return draw.normal(rows, 96), Weight(draw.normal(40, 96, scale=0.1))

    def odd(draw: Draw, rows: int) -> Arguments:
        return draw.normal(rows, 37), Weight(draw.normal(13, 37, scale=0.1)), torch.float32

    def rounding(draw: Draw, rows: int) -> Arguments:
        return draw.normal(rows, 256), Weight(draw.normal(40, 256, scale=0.1), activation="fp8")

    def quantised(draw: Draw, rows: int) -> Arguments:
        data = draw.normal(144, 256).to(torch.float8_e4m3fn)
        scale = draw.ids(2, 2, below=4).add_(120).to(torch.uint8).view(torch.float8_e8m0fnu)
        return draw.normal(rows, 256), Weight(data, scale, "fp8_block128", "fp8")

    return [
        example("linear", "fp32", plain, by_row=(0,)),
        example("linear", "odd sizes", odd, by_row=(0,)),
        example("linear", "rounded input", rounding, by_row=(0,), tolerance=ROUNDED),
        example("linear", "fp8 weight, rounded input", quantised, by_row=(0,), tolerance=ROUNDED),
    ]


@examples("linear_fp8")
def _linear_fp8() -> list[OpExample]:
    def build(rows_: int, width: int, packed: bool) -> Any:
        def make(draw: Draw, rows: int) -> Arguments:
            codes = draw.normal(rows, width, scale=100.0).to(torch.float8_e4m3fn)
            scales = 2.0 ** (draw.ids(rows, -(-width // 128), below=6).float() - 9.0)
            values = draw.normal(rows_, width, scale=0.1)
            if not packed:
                return codes, scales, Weight(values, activation="fp8"), torch.float32
            powers = draw.ids(-(-rows_ // 128), -(-width // 128), below=4).add_(120).to(torch.uint8)
            blocks = powers.view(torch.float8_e8m0fnu)
            return codes, scales, Weight(values.to(torch.float8_e4m3fn), blocks, "fp8_block128", "fp8"), torch.bfloat16

        return make

    return [
        example("linear_fp8", "fp32 weight, a shorter last group", build(40, 200, False), by_row=(0, 1), scales=()),
        example("linear_fp8", "fp8 weight into bf16", build(144, 256, True), by_row=(0, 1), tolerance=8e-3, scales=()),
    ]


@examples("grouped_linear")
def _grouped_linear() -> list[OpExample]:
    def build(draw: Draw, rows: int) -> Arguments:
        return draw.normal(rows, 2, 48), Weight(draw.normal(40, 48, scale=0.1), activation="fp8")

    return [example("grouped_linear", "two groups, never rounded", build, by_row=(0,))]


@examples("round_activation")
def _round_activation() -> list[OpExample]:
    def build(draw: Draw, rows: int) -> Arguments:
        return (draw.normal(rows, 256) * 2.0 ** draw.ids(rows, 256, below=12).float(),)

    return [example("round_activation", "wide range", build, by_row=(0,), tolerance=0.0, scales=(0.0, 1e-6, 1e4))]


@examples("hadamard")
def _hadamard() -> list[OpExample]:
    return [example("hadamard", "128 channels", lambda d, n: (d.normal(n, 3, 128),), by_row=(0,))]


@examples("rope_angles")
def _rope_angles() -> list[OpExample]:
    def build(draw: Draw, rows: int) -> Arguments:
        return draw.ids(rows, below=100_000), 1e4 ** -(torch.arange(32) / 32)

    return [example("rope_angles", "long context", build, by_row=(0,))]


@examples("rope")
def _rope() -> list[OpExample]:
    def build(inverse: bool) -> Any:
        def make(draw: Draw, rows: int) -> Arguments:
            angle = draw.normal(rows, 8, scale=50.0)
            return draw.normal(rows, 3, 40), torch.stack((angle.cos(), angle.sin()), -1), inverse

        return make

    return [
        example("rope", "turned", build(False), by_row=(0, 1), state=(0,)),
        example("rope", "turned back", build(True), by_row=(0, 1), state=(0,)),
    ]


# -- hyper-connections ----------------------------------------------------------------------------------


@examples("hc_pre")
def _hc_pre() -> list[OpExample]:
    def build(draw: Draw, rows: int) -> Arguments:
        fn, base, scale = draw.normal(24, 96, scale=0.1), draw.normal(24), draw.normal(3)
        return draw.normal(rows, 4, 24), fn, base, scale, 1e-6, 1e-6, 20

    return [example("hc_pre", "four streams, 20 iterations", build, by_row=(0,))]


@examples("hc_read")
def _hc_read() -> list[OpExample]:
    def build(draw: Draw, rows: int) -> Arguments:
        fn, base, scale = draw.normal(24, 96, scale=0.1), draw.normal(24), draw.normal(3)
        return draw.normal(rows, 4, 24), fn, base, scale, 1e-6, 1e-6

    return [example("hc_read", "four streams", build, by_row=(0,))]


@examples("hc_gates")
def _hc_gates() -> list[OpExample]:
    def build(draw: Draw, rows: int) -> Arguments:
        return draw.normal(rows, 20), draw.normal(24), draw.normal(3), 1e-6, 20

    return [example("hc_gates", "four streams, 20 iterations", build, by_row=(0,))]


@examples("hc_post")
def _hc_post() -> list[OpExample]:
    def build(draw: Draw, rows: int) -> Arguments:
        return draw.normal(rows, 24), draw.normal(rows, 4, 24), draw.normal(rows, 4), draw.normal(rows, 4, 4)

    return [example("hc_post", "lopsided mix", build, by_row=(0, 1, 2, 3))]


@examples("hc_head")
def _hc_head() -> list[OpExample]:
    def build(draw: Draw, rows: int) -> Arguments:
        fn, base, scale = draw.normal(4, 96, scale=0.1), draw.normal(4), draw.normal(1)
        return draw.normal(rows, 4, 24), fn, base, scale, 1e-6, 1e-6

    return [example("hc_head", "four streams", build, by_row=(0,))]


# -- experts --------------------------------------------------------------------------------------------


@examples("route_scores")
def _route_scores() -> list[OpExample]:
    def build(experts: int) -> Any:
        return lambda draw, rows: (draw.normal(rows, 48), Weight(draw.normal(experts, 48, scale=0.5)))

    return [example("route_scores", f"{n} experts", build(n), by_row=(0,)) for n in (16, 13)]


@examples("select_experts")
def _select_experts() -> list[OpExample]:
    def build(draw: Draw, rows: int) -> Arguments:
        return draw.normal(rows, 16).abs(), draw.normal(16), 4, 1.5

    def tied(draw: Draw, rows: int) -> Arguments:
        return draw.ids(rows, 16, below=3).float() + 0.5, torch.zeros(16), 4, 2.5

    # Scaled scores under a fixed bias may tie: extremes are for the scores themselves.
    return [
        example("select_experts", "biased choice", build, by_row=(0,), scales=(0.0, 1e4)),
        example("select_experts", "ties go to the lower expert", tied, by_row=(0,), scales=(0.0, 1e4)),
    ]


@examples("lookup_experts")
def _lookup_experts() -> list[OpExample]:
    def build(draw: Draw, rows: int) -> Arguments:
        return draw.normal(rows, 16).abs(), draw.choices(30, 4, 16), draw.ids(rows, below=30), 1.5

    return [example("lookup_experts", "a table of 30 tokens", build, by_row=(0, 2))]


@examples("swiglu")
def _swiglu() -> list[OpExample]:
    def build(width: int, dtype: torch.dtype) -> Any:
        return lambda draw, rows: (draw.normal(rows, 2 * width, scale=3.0, dtype=dtype), 2.0)

    return [
        example("swiglu", "clamped", build(64, torch.float32), by_row=(0,)),
        example("swiglu", "odd width", build(13, torch.float32), by_row=(0,)),
        example("swiglu", "bf16", build(64, torch.bfloat16), by_row=(0,), tolerance=8e-3),
    ]


@examples("swiglu_fp8")
def _swiglu_fp8() -> list[OpExample]:
    def build(width: int, dtype: torch.dtype) -> Any:
        return lambda draw, rows: (draw.normal(rows, 2 * width, scale=3.0, dtype=dtype), 2.0)

    return [
        example("swiglu_fp8", "two groups", build(256, torch.float32), by_row=(0,), tolerance=CODE),
        example("swiglu_fp8", "a group and a shorter one", build(130, torch.float32), by_row=(0,), tolerance=CODE),
        example("swiglu_fp8", "bf16", build(128, torch.bfloat16), by_row=(0,), tolerance=CODE),
    ]


@examples("expert_ffn")
def _expert_ffn() -> list[OpExample]:
    def build(width: int, inner: int, k: int, activation: str | None = None, dtype: Any = torch.float32) -> Any:
        def make(draw: Draw, rows: int) -> Arguments:
            gate_up = Weight(draw.normal(8, 2 * inner, width, scale=0.2, dtype=dtype), activation=activation)
            down = Weight(draw.normal(8, width, inner, scale=0.2, dtype=dtype), activation=activation)
            x, ids = draw.normal(rows, width, dtype=dtype), draw.choices(rows, k, 8)
            return x, ids, draw.normal(rows, k).abs(), gate_up, down, 1.0

        return make

    def one_for_all(draw: Draw, rows: int) -> Arguments:
        arguments = build(64, 48, 1)(draw, rows)
        arguments[1].fill_(7)
        return arguments

    return [
        example("expert_ffn", "four of eight", build(64, 48, 4), by_row=(0, 1, 2)),
        example("expert_ffn", "odd sizes", build(37, 13, 3), by_row=(0, 1, 2)),
        example("expert_ffn", "bf16", build(256, 128, 4, dtype=torch.bfloat16), by_row=(0, 1, 2), tolerance=1e-2),
        example("expert_ffn", "the last expert takes everything", one_for_all, by_row=(0, 1, 2)),
        example("expert_ffn", "rounded inputs", build(128, 128, 3, "fp8"), by_row=(0, 1, 2), tolerance=ROUNDED),
    ]


@examples("add_rows")
def _add_rows() -> list[OpExample]:
    def build(draw: Draw, rows: int) -> Arguments:
        return draw.normal(rows, 33), draw.normal(rows, 33, dtype=torch.bfloat16), torch.bfloat16

    return [example("add_rows", "fp32 and bf16 into bf16", build, by_row=(0, 1), tolerance=8e-3)]


# -- tokens ---------------------------------------------------------------------------------------------


@examples("argmax_tokens")
def _argmax_tokens() -> list[OpExample]:
    return [
        example(
            "argmax_tokens", "ties go to the lower token", lambda d, n: (d.ids(n, 50, below=4).float(),), by_row=(0,)
        ),
        example("argmax_tokens", "distinct", lambda d, n: (d.normal(n, 1003),), by_row=(0,)),
    ]


@examples("sample_tokens")
def _sample_tokens() -> list[OpExample]:
    def build(draw: Draw, rows: int) -> Arguments:
        heat = (torch.arange(rows) % 3).float()
        cut = draw.normal(rows).abs().clamp_(0.05, 1.0)
        return draw.normal(rows, 203), heat, cut, draw.ids(rows, below=2**40), draw.ids(rows, below=5000)

    # Scaling would scale temperature and top_p too, which has no meaning.
    return [example("sample_tokens", "greedy and drawn rows", build, by_row=(0, 1, 2, 3, 4), scales=())]


@examples("own_best")
def _own_best() -> list[OpExample]:
    def tied(draw: Draw, rows: int) -> Arguments:
        return draw.ids(rows, 50, below=4).float(), 150

    return [
        example("own_best", "ties go to the lower token", tied, by_row=(0,), tolerance=0.0),
        example("own_best", "distinct", lambda d, n: (d.normal(n, 503), 0), by_row=(0,), tolerance=0.0),
    ]


@examples("best_of_all")
def _best_of_all() -> list[OpExample]:
    def build(draw: Draw, rows: int) -> Arguments:
        ids = draw.ids(4, rows, below=25) + 25 * torch.arange(4).unsqueeze(1)
        return torch.stack([draw.ids(4, rows, below=3).float(), ids.float()], 2), 100

    return [example("best_of_all", "four ranks, ties", build)]


@examples("join_columns")
def _join_columns() -> list[OpExample]:
    return [example("join_columns", "three ranks", lambda d, n: (d.normal(3, n, 17),), tolerance=0.0)]


@examples("next_position")
def _next_position() -> list[OpExample]:
    return [example("next_position", "any", lambda d, n: (d.ids(n, below=900), d.ids(n, below=9)), by_row=(0, 1))]
