"""The server keeps its own OpenAPI document: Schemathesis sends what fits it and what does not."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from serving import NAME, serving


@pytest.fixture(scope="module")
def server(tiny_llama):
    with serving(tiny_llama, context=64, max_seconds=20) as running:
        yield running


@pytest.mark.ci
@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_no_request_makes_the_server_fail_and_replies_keep_their_schema(server, mode):
    import schemathesis
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance

    checks = [not_a_server_error, content_type_conformance, response_schema_conformance]
    api = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations = [result.ok() for result in api.get_all_operations()]
    assert len(operations) == 14
    for operation in operations:
        if mode == "positive" or operation.method == "post":  # the others take nothing to spoil

            @settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
            @given(case=operation.as_strategy(schemathesis.GenerationMode(mode)))
            def check(case):
                if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
                    case.body["model"] = NAME  # another one is all that would be refused
                case.call_and_validate(checks=checks)

            check()
