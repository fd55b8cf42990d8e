"""Policy `fcfs` on our scheduler is stock, batch by batch; and what parked streams say is what stock says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from support import identity

LOOPS = ("overlap", "normal")
Program = Callable[[str, str], Any]


def both(loop: str) -> list[Any]:
    return [pytest.mark.engine("support.cases", f"{kind}-{loop}") for kind in ("stock", "fcfs")]


@pytest.fixture(params=[pytest.param(loop, marks=both(loop)) for loop in LOOPS])
def loop(request: pytest.FixtureRequest) -> str:
    return request.param


def _case(program: Program, kind: str, loop: str, case: str) -> dict[str, Any]:
    result = program("support.cases", f"{kind}-{loop}")[case]
    assert "error" not in result, result["error"]
    return result


def test_fcfs_forms_the_batches_that_stock_forms(program: Program, loop: str) -> None:
    stock, ours = (_case(program, kind, loop, "same_work") for kind in ("stock", "fcfs"))
    assert len(stock["batches"]) > 150 and stock["retracted"] == ours["retracted"] > 0
    for step, (a, b) in enumerate(zip(stock["batches"], ours["batches"], strict=True)):
        assert a == b, f"step {step}"


@pytest.mark.parametrize("part", ["plain", "retracting"])
def test_fcfs_answers_as_stock_answers(program: Program, loop: str, part: str) -> None:
    """Chunks are compared for the plain part alone: stock sends empty ones for streams that it retracts."""
    stock, ours = (_case(program, kind, loop, "same_work")[part]["streams"] for kind in ("stock", "fcfs"))
    keys = ["tokens", "finish", "completion_tokens", "prompt_tokens", "cached_tokens", "logprobs"]
    keys += ["chunks"] if part == "plain" else []
    for rid, stream in stock.items():
        assert {k: ours[rid][k] for k in keys} == {k: stream[k] for k in keys}, rid


@pytest.mark.parametrize(
    ("stock", "parked"),
    [
        pytest.param(
            f"stock-{loop}",
            f"{loop}-{page}",
            marks=[
                pytest.mark.engine("support.cases", f"stock-{loop}"),
                pytest.mark.engine("support.identity", f"{loop}-{page}"),
            ],
        )
        for loop, page in (("overlap", 16), ("normal", 1))
    ],
)
@pytest.mark.parametrize("run", ["base", "forced", "policy"])
def test_parked_streams_say_what_stock_says(program: Program, stock: str, parked: str, run: str) -> None:
    """Penalties in the overlap loop drift in stock itself: there the counts are compared."""
    says = program("support.cases", stock)["identity_streams"]["streams"]
    for i, stream in enumerate(program("support.identity", parked)[run]["streams"]):
        expected = says[f"s{i}"]
        if stock == "stock-overlap" and i in identity.PENALTIES:
            assert len(stream["tokens"]) == len(expected["tokens"]) == identity.TOKENS
        else:
            assert stream["tokens"] == expected["tokens"], f"stream {i}"
        assert stream["finish"] == expected["finish"], f"stream {i}"
