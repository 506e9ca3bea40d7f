"""The API against its own OpenAPI document: what fits the document is accepted, what does not is refused, every answer
is one that the document promises, and nothing breaks.

schemathesis makes the requests, as a library; the application answers in its event loop, in a thread of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.python import asgi

from supervisor.service.api import OPERATIONS, Api
from tests.service.world import World

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def document() -> Iterator[tuple[schemathesis.BaseSchema, list[str]]]:
    """The document as schemathesis reads it, and the tracebacks of what broke."""
    faults: list[str] = []
    world = World(endless=False)
    for number in range(3):
        world.put(run_id=f"100{number}", ranks=[{"rank": 0}])
    api = Api(world, world.meter, faults.append)
    yield schemathesis.openapi.from_asgi("/openapi.json", api), faults
    asgi._shutdown()  # its thread; it would end with the interpreter, which is later than this project's tests allow


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: str(mode.value))
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: str(operation.name))
def test_requests_are_answered_as_the_document_says(document, operation, mode) -> None:  # type: ignore[no-untyped-def]
    schema, faults = document
    wanted = schema[operation.path][operation.method]
    if mode is GenerationMode.NEGATIVE and not operation.parameters and operation.body is None:
        return  # nothing in it can be wrong

    @settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
    @given(case=wanted.as_strategy(mode))
    def ask(case) -> None:  # type: ignore[no-untyped-def]
        case.call_and_validate()
        assert not faults, faults[0]

    ask()
