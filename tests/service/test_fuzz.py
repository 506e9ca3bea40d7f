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
from schemathesis.config import SchemathesisConfig
from schemathesis.python import asgi

from supervisor.service.api import OPERATIONS, Api
from tests.service.world import World

pytestmark = pytest.mark.slow


_FITTING = {"positive_data_acceptance": {"expected-statuses": ["2xx", "404", "409", "410", "5xx"]}}
"""What a request that fits the document may get: 410 where its number is of an event that there is not."""


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[schemathesis.BaseSchema, list[str]]]:
    """The document as schemathesis reads it, and the tracebacks of what broke."""
    faults: list[str] = []
    tmp = tmp_path_factory.mktemp("run")
    world = World(endless=False)
    (tmp / "logs").mkdir()
    (tmp / "logs" / "rank-0.client.out").write_bytes(b"a\nb\n")
    (tmp / "receipt.run.json").write_bytes(b"{}")
    for number in range(3):
        world.put(state="ended", run_id=f"100{number}", run_dir=str(tmp), ranks=[{"rank": 0}])
    api = Api(world, world.meter, faults.append)
    config = SchemathesisConfig.from_dict({"checks": _FITTING})
    yield schemathesis.openapi.from_asgi("/openapi.json", api, config=config), faults
    asgi._shutdown()  # its thread; it would end with the interpreter, which is later than this project's tests allow


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: str(mode.value))
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: str(operation.name))
def test_requests_are_answered_as_the_document_says(document, operation, mode) -> None:  # type: ignore[no-untyped-def]
    schema, faults = document
    wanted = schema[operation.path][operation.method]
    if mode is GenerationMode.NEGATIVE and not operation.parameters and operation.body is None:
        return  # nothing in it can be wrong

    cases = wanted.as_strategy(mode)
    if "{name}" in operation.path:  # hardly ever one that there is, by chance
        cases |= wanted.as_strategy(mode, path_parameters={"name": "a1"})

    @settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
    @given(case=cases)
    def ask(case) -> None:  # type: ignore[no-untyped-def]
        case.call_and_validate()
        assert not faults, faults[0]

    ask()
