"""A request that is wrong, slow, too large or abandoned ends with a clear error, and never touches another."""

from __future__ import annotations

import json
import os
import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from forked import posix_only
from serving import before_each_forward, chat_body, serving

from taper.errors import RequestError
from taper.server import limits
from taper.server.limits import Limits, listen

CHAT = "/v1/chat/completions"
TOOL = {"type": "function", "function": {"name": "f"}}
LONG = {"max_tokens": 900, "taper": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def server(tiny_llama):
    with serving(tiny_llama, context=1000, max_waiting=4, max_body_bytes=20_000) as running:
        yield running


def check_refused(response: httpx.Response, *statuses: int) -> dict:
    """An error in OpenAI's shape, of one line."""
    assert response.status_code in (statuses or range(400, 500)), response.text[:300]
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"].isprintable()
    assert 5 < len(error["message"]) < 2100
    return error


# Bad requests


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"mirostat": 2}, "mirostat", "mirostat is 2, which is not supported (leave it out)"),
        ({"temprature": 2}, "temprature", "unknown field 'temprature'; did you mean temperature?"),
        ({"repeat_penalty": 1.5, "repetition_penalty": 2}, "repeat_penalty", "two names of one number"),
        ({"prediction": {"type": "content"}}, "prediction", "not supported (leave it out)"),
        ({"min_tokens": -1}, "min_tokens", "min_tokens"),
        ({"taper": {"alpha": 1}}, "taper.alpha", "unknown field"),
        ({"messages": None}, "messages", "list"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, None, ""),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages.0.role", "king"),
        ({"messages": [{"role": "user", "content": "  "}]}, None, "empty"),
        ({"model": "other"}, "model", "no model 'other'"),
        ({"max_tokens": 0}, None, "max_tokens is 0"),
        ({"max_tokens": "8"}, "max_tokens", "integer"),
        ({"max_tokens": 8, "max_completion_tokens": 9}, None, "one of the two"),
        ({"temperature": -1}, None, "temperature"),
        ({"temperature": "hot"}, "temperature", "number"),
        ({"top_p": -0.1}, None, "top_p"),
        ({"n": 0}, None, "n is 0"),
        ({"n": 9}, None, "from 1 to 8"),
        ({"top_k": -2}, None, "top_k"),
        ({"max_tokens": -2}, None, "max_tokens"),
        ({"stop": 5}, "stop", "string"),
        ({"stop": ["x"] * 17}, "stop", "at most 16"),
        ({"stop": "x" * 1001}, None, "at most 1000"),
        ({"logit_bias": {"x": 1}}, None, "not a token id"),
        ({"logit_bias": {"": 1}}, None, "not a token id"),
        ({"logit_bias": {"5": 101}}, None, "100"),
        ({"logit_bias": {"900": 1}}, None, "outside the vocabulary"),
        ({"top_logprobs": 2}, None, "logprobs"),
        ({"stream_options": {"include_usage": True}}, None, "stream_options goes with stream"),
        ({"logprobs": True, "top_logprobs": 21}, None, "from 0 to 20"),
        ({"taper": {"policy": "none"}}, None, "must be one of full, d3"),
        ({"taper": {"policy": "/etc/passwd"}}, None, "must be one of"),
        ({"taper": {"mode": "full", "policy": "d3"}}, None, "takes no policy"),
        ({"response_format": {"type": "xml"}}, "response_format", ""),
        ({"response_format": {"type": "json_object"}}, None, "would never end"),  # with ignore_eos
        ({"response_format": {"type": "json_object"}, "tools": [TOOL]}, None, "exclude each other"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, None, "context"),
        ({"taper": {"repetition_penalty": 1e-300}}, None, "must be a number in [0.01, 100]"),
    ],
)
def test_mistakes_are_named(server, fields, param, said):
    error = check_refused(server.http.post(CHAT, json=chat_body() | fields))
    assert said in error["message"]
    if param:
        assert error["param"] == param


def test_values_by_which_clients_say_that_nothing_is_set(server):
    """The same outputs as without them; a `top_p` of 0 takes the most probable token."""
    greedy = server.chat("one").json()["choices"][0]["message"]
    assert server.chat("one", temperature=0.9, top_p=0).json()["choices"][0]["message"] == greedy
    for more in ({"seed": -1}, {"seed": -12345}, {"top_k": -1}):
        assert server.chat("one", **more).json()["choices"][0]["message"] == greedy
    for path, body in ((CHAT, chat_body()), ("/v1/completions", {"model": "tiny", "prompt": "one", "temperature": 0})):
        reply = server.http.post(path, json=body | {"max_tokens": -1, "taper": {"ignore_eos": True}}).json()
        usage = reply["usage"]
        assert reply["choices"][0]["finish_reason"] == "length"
        assert usage["total_tokens"] > 200  # up to the end of the context


def test_fields_that_openai_documents_and_that_change_nothing_are_taken(server):
    fields = {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "safety_identifier": "x"}
    plain = server.chat("one").json()["choices"][0]["message"]
    same = server.chat("one", **fields, prompt_cache_key="k", parallel_tool_calls=True)
    assert same.json()["choices"][0]["message"] == plain


def hostile_bodies() -> list[bytes]:
    """300 bodies that nobody sends in good faith."""
    rng = random.Random(5)
    good = json.dumps(chat_body())
    bodies = [
        b"", b"{", b"[]", b"null", b"nan", b"1", b'"text"', b"\xff\xfe", b"\x00" * 50, b"{}" * 20, b"\xef\xbb\xbf{}",
        b"[" * 9000, b'{"a":' * 3000, b'{"messages":' + b"[" * 5000 + b"]" * 5000 + b"}",
        good.replace('"tell me"', '"\\ud83d"').encode(), good.replace("tell me", "a\xff").encode("latin-1"),
        good.replace('"max_tokens": 8', '"max_tokens": NaN').encode(),
        good.replace('"max_tokens": 8', '"max_tokens": 1e400').encode(),
        good.replace('"max_tokens": 8', '"max_tokens": ' + "9" * 5000).encode(),
        good.replace('"temperature": 0', '"temperature": Infinity').encode(),
        good.replace('"temperature": 0', '"temperature": -1e308').encode(),
        json.dumps(chat_body(stop=[f"stop {i}" for i in range(5000)])).encode(),
        json.dumps(chat_body(x="y" * 30_000)).encode(),
        json.dumps(chat_body(logit_bias={str(i): 1 for i in range(1500)})).encode(),
        json.dumps(chat_body(tools=[{"type": "function", "function": {"name": ""}}])).encode(),
    ]  # fmt: skip
    deep: object = "x"
    for _ in range(200):
        deep = {"a": [deep]}
    for place in ("response_format", "tools", "metadata", "taper", "messages"):
        bodies.append(json.dumps(chat_body(**{place: deep})).encode())
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": deep}}
    bodies.append(json.dumps(chat_body(response_format=schema)).encode())
    values = [None, True, -1, 1.5, 10**400, "", "x", [], {}, [[]], {"a": 1}, "\u202e\x1b[31m", ["\x00"], -(10**30)]
    fields = [*chat_body(), "stop", "n", "seed", "top_p", "logprobs", "stream_options", "tool_choice", "logit_bias"]
    while len(bodies) < 300:
        kind = rng.randrange(3)
        if kind == 0:
            cut = rng.randrange(1, len(good))
            bodies.append(good[:cut].encode())
        elif kind == 1:
            noisy = bytearray(good.encode())
            for _ in range(3):
                noisy[rng.randrange(len(noisy))] = rng.randrange(128, 256)
            bodies.append(bytes(noisy))
        else:
            body = chat_body() | {rng.choice(fields): rng.choice(values), "unknown": rng.choice(values)}
            bodies.append(json.dumps(body).encode())
    return bodies


def test_three_hundred_hostile_bodies_are_refused_in_openais_shape(server):
    for body in hostile_bodies():
        for path in (CHAT, "/v1/completions"):
            response = server.http.post(path, content=body, headers={"content-type": "application/json"})
            check_refused(response)
    assert server.chat("one").status_code == 200


def test_other_content_types_methods_and_paths_are_refused(server):
    body = json.dumps(chat_body())
    assert "application/json" in check_refused(server.http.post(CHAT, content=body), 400, 422)["message"]
    form = {"content-type": "text/plain"}  # what a web page may send to another origin without asking
    check_refused(server.http.post(CHAT, content=body, headers=form), 400)
    check_refused(server.http.get(CHAT), 405)
    check_refused(server.http.get("/nothing"), 404)
    check_refused(server.http.get("/page/../../../etc/passwd"), 404)


def test_a_body_without_a_length_is_measured_too(server):
    def endless():
        for _ in range(100):
            yield b" " * 1000

    check_refused(server.http.post(CHAT, content=endless(), headers={"content-type": "application/json"}), 413)


def test_bodies_that_never_end_take_bounded_memory(server):
    """Each is below the limit; together they are above that of all requests."""
    end, unfinished = time.monotonic() + 20, []
    while server.chat("one", user="x" * 19_000).status_code != 429:
        assert time.monotonic() < end
        for _ in range(limits.MAX_BODIES):
            unfinished.append(ask_and_read_nothing(server, "one", user="x" * 8_000, length=20_000))
    assert server.http.get("/health").status_code == 200
    for connection in unfinished:
        connection.close()
    while server.chat("one", user="x" * 19_000).status_code != 200:
        assert time.monotonic() < end


def test_replies_on_a_kept_connection_wait_for_no_acknowledgement(server):
    """Which a client's system may hold back for 40 ms."""
    check_refused(server.http.get("/nothing"), 404)
    accepted = [one.transport.get_extra_info("socket") for one in server.uvicorn.server_state.connections]
    assert accepted
    assert all(one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for one in accepted)


# Many requests


def test_a_full_queue_is_refused_at_once_and_those_accepted_are_served(tiny_llama):
    with serving(tiny_llama, slots=2, max_waiting=3) as server, ThreadPoolExecutor(12) as pool:
        responses = list(pool.map(lambda i: server.chat(f"number {i}", max_tokens=150), range(12)))
        statuses = [response.status_code for response in responses]
        assert set(statuses) == {200, 429}
        assert statuses.count(200) >= 5
        refused = responses[statuses.index(429)]
        assert int(refused.headers["retry-after"]) >= 1
        check_refused(refused, 429)
        assert server.is_idle()


def test_a_newcomer_is_served_before_a_long_output_ends(server):
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(server.chat, "long", **LONG)
        time.sleep(0.05)
        assert server.chat("short", max_tokens=2).status_code == 200
        assert not long.done()
        assert long.result().status_code == 200


# Clients that leave, or do not read


def ask_and_read_nothing(server, content: str, length: int | None = None, **fields) -> socket.socket:
    """A connection that has sent a request, or its beginning if it gives a greater length, and has read no reply."""
    body = json.dumps(chat_body(content, **fields)).encode()
    head = ["POST /v1/chat/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    connection = socket.create_connection(server.address, timeout=20)
    connection.sendall("\r\n".join([*head, f"Content-Length: {length or len(body)}", "", ""]).encode() + body)
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slot_long_before_the_end(server, stream):
    names = ("taper_disconnects_total", "taper_completion_tokens_total")
    before = [server.metric(name) for name in names]
    connection = ask_and_read_nothing(server, "leaving", stream=stream, **LONG)
    server.wait_for("taper_running_sequences", 1)
    connection.close()
    assert server.is_idle(10)
    disconnects, tokens = (server.metric(name) - value for name, value in zip(names, before, strict=True))
    assert disconnects == 1
    assert tokens < LONG["max_tokens"]
    assert server.llm.engine.num_free_slots == 4


def test_clients_that_never_read_hold_nobody_up(server):
    idle = [ask_and_read_nothing(server, f"silent {i}", stream=True, **LONG) for i in range(4)]
    assert server.chat("one", max_tokens=4).status_code == 200
    assert server.is_idle()  # the engine did not wait for them
    for connection in idle:
        connection.close()


def test_idle_and_slow_connections_hold_nobody_up(server):
    """1,000 connections that send nothing, and 50 that send a letter at a time."""
    idle = [socket.create_connection(server.address) for _ in range(1000)]
    slow = [socket.create_connection(server.address) for _ in range(50)]
    for connection in slow:
        connection.sendall(b"POST /v1/chat/completions HTT")
    started = time.monotonic()
    assert server.chat("one", max_tokens=4).status_code == 200
    assert time.monotonic() - started < 5
    for connection in [*idle, *slow]:
        connection.close()


def test_a_body_that_does_not_arrive_ends_with_an_error(tiny_llama, monkeypatch):
    monkeypatch.setattr(limits, "BODY_SECONDS", 0.3)
    with serving(tiny_llama) as server:
        for begun in (b"", b"{"):
            connection = socket.create_connection(server.address, timeout=10)
            connection.sendall(b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n" + begun)
            reply = connection.makefile("rb").read()  # until the server closes the connection
            assert reply.startswith(b"HTTP/1.1 408 ")
            assert b"the body did not arrive within 0.3 seconds" in reply
        before_each_forward(server, monkeypatch, lambda: time.sleep(0.05))
        assert server.chat("one", max_tokens=10).status_code == 200  # a reply may take longer than a body
        kept = httpx.Client(base_url=server.url)
        assert kept.get("/health").status_code == 200
        time.sleep(0.5)
        assert kept.get("/health").status_code == 200  # so may a connection between two requests


def test_a_request_that_takes_too_long_ends_with_an_error(tiny_llama, monkeypatch):
    with serving(tiny_llama, context=1000, max_seconds=0.3) as server:
        before_each_forward(server, monkeypatch, lambda: time.sleep(0.01))  # a fast machine makes 900 tokens in time
        check = server.chat("slow", max_tokens=900)
        assert check.status_code == 504
        assert check.json()["error"]["code"] == "timeout"
        streamed = server.chat("slow", max_tokens=900, stream=True)
        assert '"code":"timeout"' in streamed.text.split("\n\n")[-2]
        assert server.metric('taper_errors_total{status="504"}') == 2, "a stream that fails is counted too"
        assert server.is_idle()


# A bug in the engine


def test_a_failing_step_fails_the_requests_that_ran_and_the_next_is_served(server, monkeypatch, caplog):
    def fail():
        raise MemoryError("no room")

    before_each_forward(server, monkeypatch, fail)
    response = server.chat("one")
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "the server failed; its log says why"
    assert "no room" in caplog.text
    assert "tell me" not in caplog.text
    monkeypatch.undo()
    assert server.chat("one").status_code == 200
    assert server.llm.engine.num_free_slots == 4


# Who may come in


def test_a_key_is_asked_of_all_but_the_page_and_probes(tiny_llama):
    with serving(tiny_llama, api_key="secret") as server:
        assert server.chat("one").status_code == 200
        for sent in (None, "Bearer wrong", "secret", "Bearer"):
            stranger = httpx.Client(base_url=server.url, headers={"authorization": sent} if sent else {})
            for path in ("/v1/models", "/metrics", "/openapi.json"):
                check_refused(stranger.get(path), 401)
            check_refused(stranger.post(CHAT, json=chat_body()), 401)
            assert {
                stranger.get(path).status_code for path in ("/", "/page/page.js", "/health", "/v1/health", "/ready")
            } == {200}


def test_other_hosts_names_are_refused_without_a_key(server):
    """A page whose name was made to point here must not use the server."""
    wrong = ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "[::1]evil.com", "127.0.0.1:80@evil.com")
    for host in (*wrong, "127.0.0.1:evil.com", "[::1", "localhost, evil.com"):
        check_refused(server.http.get("/v1/models", headers={"host": host}), 403, 400)
    for host in ("localhost:1", "127.0.0.1", "[::1]:8000", "LOCALHOST", "LocalHost:80"):
        assert server.http.get("/v1/models", headers={"host": host}).status_code == 200


def test_pages_of_other_origins_are_let_in_only_if_asked(server, tiny_llama):
    origin = {"origin": "https://a.example"}
    assert "access-control-allow-origin" not in server.http.get("/v1/models", headers=origin).headers
    with serving(tiny_llama, cors_origins=["https://a.example"]) as open_server:
        asked = open_server.http.get("/v1/models", headers=origin)
        assert asked.headers["access-control-allow-origin"] == "https://a.example"
        other = open_server.http.get("/v1/models", headers={"origin": "https://b.example"})
        assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"port": 70000}, "port"),
        ({"max_n": 0}, "max_n"),
        ({"max_seconds": 0}, "max_seconds"),
        ({"max_body_bytes": 1}, "max_body_bytes"),
        *(({"api_key": key}, "API key has characters") for key in ("schlüssel", "a\nb", " a", "\udcff", "\x7f")),
    ],
)
def test_options_that_would_surprise_are_refused(options, said):
    with pytest.raises(RequestError, match=said):
        Limits(**options)


def test_only_local_addresses_need_no_key():
    assert all(Limits(host=host).is_local for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost", "LOCALHOST"))
    for host in ("0.0.0.0", "::", "192.168.1.5", "example.org", "localhost.example.org"):
        with pytest.raises(RequestError, match="no API key"):
            Limits(host=host)
        assert not Limits(host=host, api_key="x").is_local
        assert Limits(host=host, insecure=True)


def test_a_path_that_ends_in_a_line_break_leads_nowhere(server):
    for path in ("/v1/models%0A", "/v1/models/%0A", "/health%0A"):
        reply = server.http.get(path)
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "no_route")


def test_a_body_with_two_lengths_is_refused(server):
    lengths = ["Content-Length: 4", "Transfer-Encoding: chunked"]
    for lines in (lengths, lengths[::-1]):
        with socket.create_connection((server.http.base_url.host, server.http.base_url.port), timeout=10) as connection:
            head = [f"POST {CHAT} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *lines, "", ""]
            hidden = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
            connection.sendall("\r\n".join(head).encode() + b"2\r\n{}\r\n0\r\n\r\n" + hidden)
            received = b"".join(iter(lambda: connection.recv(1000), b""))  # until the server ends the connection
            assert received.startswith(b"HTTP/1.1 400")
            assert received.count(b"HTTP/1.1") == 1


def test_a_taken_port_is_one_line():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        taken.listen()
        with pytest.raises(RequestError, match="cannot listen on"):
            listen(Limits(port=taken.getsockname()[1])).listen()


@posix_only
@pytest.mark.parametrize(
    ("family", "kind", "address", "said"),
    [
        (socket.AF_INET, socket.SOCK_STREAM, ("0.0.0.0", 0), "host is 127.0.0.1 .give (--)?host 0.0.0.0"),
        (socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0), "cannot listen on the socket that was handed over"),
        (getattr(socket, "AF_UNIX", None), socket.SOCK_STREAM, "socket", "not for TCP"),
    ],
)
def test_a_socket_that_is_handed_over_is_checked(monkeypatch, tmp_path, family, kind, address, said):
    monkeypatch.chdir(tmp_path)
    with socket.socket(family, kind) as given:
        given.bind(address)
        monkeypatch.setattr(limits, "_HANDED_OVER", os.dup(given.fileno()))
        monkeypatch.setenv("LISTEN_PID", str(os.getpid()))
        monkeypatch.setenv("LISTEN_FDS", "1")
        with pytest.raises(RequestError, match=said):
            listen(Limits())


def test_prompts_stay_out_of_the_log_unless_asked(tiny_llama, caplog):
    caplog.set_level("INFO", "taper.server")
    for log_prompts in (False, True):
        caplog.clear()
        with serving(tiny_llama, log_prompts=log_prompts) as server:
            server.chat("a secret of mine")
            server.chat("a secret of mine", mirostat=1)
        assert "POST /v1/chat/completions 200" in caplog.text
        assert ("a secret of mine" in caplog.text) == log_prompts


def test_the_thread_of_the_engine_is_the_only_one_that_computes(server, monkeypatch):
    threads = set()
    before_each_forward(server, monkeypatch, lambda: threads.add(threading.current_thread().name))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: server.chat(f"number {i}"), range(8)))
    assert threads == {"taper-engine"}
