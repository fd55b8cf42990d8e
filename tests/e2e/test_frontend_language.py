"""Programs in SGLang's own frontend language run against our server unchanged, and say what a stock server says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import sglang as sgl
from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint

from support.frontend import PROGRAMS, run_program
from support.live import Server

pytestmark = pytest.mark.e2e


@pytest.fixture
def backend(server: Server) -> Iterator[RuntimeEndpoint]:
    endpoint = RuntimeEndpoint(server.url)
    sgl.set_default_backend(endpoint)
    yield endpoint
    sgl.set_default_backend(None)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_says_what_it_says_on_a_stock_server(
    stock_answers: dict[str, Any], backend: RuntimeEndpoint, name: str
) -> None:
    answer = run_program(name)
    answer.pop("pieces", None)  # how many depends on how fast the reader was
    assert answer == stock_answers["programs"][name]
    assert all(answer.values()), answer


def test_a_regex_constraint_holds(backend: RuntimeEndpoint) -> None:
    assert re.fullmatch(r"[0-9]{3}-[a-f]{4}", run_program("regex")["code"])


def test_a_json_constraint_holds(backend: RuntimeEndpoint) -> None:
    reply = json.loads(run_program("json_schema")["reply"])
    assert isinstance(reply["pages"], int) and reply["kind"] in ("book", "letter")


def test_select_chooses_one_of_the_choices(backend: RuntimeEndpoint) -> None:
    assert run_program("select")["tool"] in ("a calculator", "a search engine", "a map")


def test_forks_run_beside_each_other_and_join(backend: RuntimeEndpoint, server: Server) -> None:
    answer = run_program("fork_join")
    assert answer["summary"] and answer["tips"].count("Tip") == 3


def test_a_streamed_program_arrives_in_pieces_that_make_up_the_answer(backend: RuntimeEndpoint) -> None:
    answer = run_program("stream")
    assert int(answer["pieces"]) > 1
    assert answer["streamed"] == answer["whole"]


def test_a_batch_of_programs_larger_than_the_pool_is_served_whole(backend: RuntimeEndpoint, server: Server) -> None:
    """Programs do not say how fast they are read: as batch work and silent readers they share the pool fairly."""
    long = run_program("batch")
    assert len(long) == 12 and len(set(long.values())) == 12
