"""The driver's words about captures, in ours."""

from __future__ import annotations

import pytest

from halma.backends.cuda.driver import DriverError
from halma.backends.torch_device.faults import CODES, code_of, translated
from halma.hal.errors import CaptureError, HostReadError


class AcceleratorError(RuntimeError):
    """As torch raises it."""

    def __init__(self, text: str, error_code: int) -> None:
        super().__init__(text)
        self.error_code = error_code


@pytest.mark.parametrize("code", sorted(CODES))
@pytest.mark.parametrize("kind", ["torch", "driver"])
def test_every_code_becomes_a_capture_error_with_code_request_and_advice(code: int, kind: str) -> None:
    error = AcceleratorError("CUDA error: odd\nmore", code) if kind == "torch" else DriverError("cuX", code, "odd")
    found = translated(error, "end() on stream 'main'")
    assert isinstance(found, CaptureError) and found.__cause__ is error
    assert found.asked == ("end() on stream 'main'",) and f"driver error {code}" in found.found[0] and found.do
    assert found.what == CODES[code][0] and "\n" not in found.found[0]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("CUDA error: operation not permitted when stream is capturing", 900),
        ("CUDA error: operation failed due to a previous error during capture", 901),
        ("CUDA error: capturing stream has unjoined work", 904),
        ("CUDA error: dependency created on uncaptured work in another stream", 905),
    ],
)
def test_a_code_is_read_from_the_text_where_there_is_no_attribute(text: str, code: int) -> None:
    assert code_of(RuntimeError(text)) == code
    assert isinstance(translated(RuntimeError(text), "x"), CaptureError)


@pytest.mark.parametrize(
    "error",
    [ValueError("during capture"), RuntimeError("out of memory"), HostReadError("reads"), KeyError("k")],
    ids=lambda error: type(error).__name__,
)
def test_what_is_not_about_captures_stays_itself(error: Exception) -> None:
    assert translated(error, "x") is error


def test_torchs_own_refusal_of_a_capture_is_translated_without_a_code() -> None:
    found = translated(
        RuntimeError("Cannot copy between CPU and CUDA tensors during CUDA graph capture unless pin"), "x"
    )
    assert isinstance(found, CaptureError) and "pinned memory" not in found.found[0] and found.do
