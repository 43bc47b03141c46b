"""Bodies that no client library would send, over a bare socket through the gateway."""

import json
import socket
import urllib.parse

import pytest

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def post(client, path, body, content_type="application/json"):
    """Status and body of the answer to ``body``, which goes out as it is."""
    url = urllib.parse.urlsplit(str(client.base_url))
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: {content_type}\r\n"
    with socket.create_connection((url.hostname, url.port), timeout=60) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        answer = connection.makefile("rb").read()
    first, _, rest = answer.partition(b"\r\n")
    return int(first.split()[1]), rest.partition(b"\r\n\r\n")[2]


def completion(**fields):
    return json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 2, **fields}).encode()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, b""),
        (COMPLETIONS, b"null"),
        (COMPLETIONS, b"[]"),
        (COMPLETIONS, completion()[:-1]),
        (COMPLETIONS, completion()[:-1] + b",}"),
        (COMPLETIONS, completion().replace(b'"a"', b"NaN")),
        (COMPLETIONS, completion().replace(b'"a"', b'"\xff\xfe"')),
        (COMPLETIONS, completion().replace(b'"a"', b'"\\ud800"')),
        (COMPLETIONS, completion().replace(b'"a"', b"[" * 100_000)),
        (COMPLETIONS, completion(stop=["x"] * 100_000)),
        (COMPLETIONS, completion(prompt=[])),
        (COMPLETIONS, completion(prompt=3.5)),
        (COMPLETIONS, completion(prompt="x" * 5_000_000)),
        (COMPLETIONS, completion(max_tokens=-1)),
        (COMPLETIONS, completion(max_tokens="5")),
        (COMPLETIONS, completion(max_tokens=2**64)),
        (COMPLETIONS, completion(temperature="hot")),
        (COMPLETIONS, completion(seed="x")),
        (CHAT, b'{"model": "tiny", "messages": "hello"}'),
        (CHAT, b'{"model": "tiny", "messages": [{"role": "user"}]}'),
        (CHAT, b'{"model": "tiny", "messages": [{"role": 5, "content": "a"}]}'),
        (CHAT, json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "a"}] * 100_000}).encode()),
    ],
    ids=range(22),
)
def test_bodies_that_cannot_be(client, path, body):
    status, answer = post(client, path, body)
    assert 400 <= status < 500
    assert len(answer) < 4000


def test_a_body_of_another_type(client):
    status, _ = post(client, COMPLETIONS, completion(), "text/plain")
    assert 400 <= status < 500


@pytest.mark.parametrize("sent", [b"", b"POST /v1/completions HTTP/1.1\r\nContent-Le", b"\x00" * 1000])
def test_connections_that_are_dropped(client, sent):
    url = urllib.parse.urlsplit(str(client.base_url))
    with socket.create_connection((url.hostname, url.port)) as connection:
        connection.sendall(sent)


def test_a_client_that_sends_and_does_not_read(client):
    url = urllib.parse.urlsplit(str(client.base_url))
    body = completion(max_tokens=300, stream=True, ignore_eos=True)
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        connection.connect((url.hostname, url.port))
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        assert post(client, COMPLETIONS, completion())[0] == 200
