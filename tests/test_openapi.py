"""The server keeps its own OpenAPI document: Schemathesis sends what fits it and what does not."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from serving import serving

schemathesis = pytest.importorskip("schemathesis")


@pytest.fixture(scope="module")
def server(tiny_llama):
    with serving(tiny_llama, context=64, max_seconds=20) as running:
        yield running


@pytest.fixture(scope="module")
def api(server):
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


schema = schemathesis.pytest.from_fixture("api")


@schema.parametrize()
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_request_makes_the_server_fail_and_replies_keep_their_schema(case):
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance

    case.call_and_validate(checks=[not_a_server_error, content_type_conformance, response_schema_conformance])
