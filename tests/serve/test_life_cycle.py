"""Starting, keys and stopping of a server."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import httpx2
import pytest

from support.command import d3d
from support.server import serving

QUESTION = [{"role": "user", "content": "hello"}]


def test_an_open_address_needs_a_key(tiny_target: Path) -> None:
    asked = ("serve", "--model", tiny_target, "--host", "0.0.0.0", "--port", 0)
    assert d3d(*asked).is_refusal("--host 0.0.0.0", "--api-key", "--no-api-key")
    assert d3d(*asked, "--api-key", " ").is_refusal("--api-key", "empty")


def test_an_address_in_use_is_told_before_the_model_is_read() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert d3d("serve", "--model", "none", "--port", port).is_refusal(f"--port {port}")
    assert d3d("serve", "--host", "no such host", "--port", 1).is_refusal("no such host")


@pytest.mark.slow
def test_keys_are_checked_and_sigterm_ends_streams_in_time(
    tiny_target: Path, tmp_path: Path
) -> None:
    key = {"authorization": "Bearer sésame"}
    with serving(
        tmp_path / "log",
        *("--model", tiny_target, "--dtype", "float32", "--api-key", "sésame"),
        *("--drain-seconds", 0.2, "--device", "cpu"),
    ) as server:
        url = f"{server.url}/v1/chat/completions"
        body = {"messages": QUESTION, "max_tokens": 5}
        for headers in ({}, {"authorization": "Bearer no"}, {"authorization": "sesame"}):
            refused = httpx2.post(url, json=body, headers=headers)
            assert refused.status_code == 401
            assert refused.json()["error"]["code"] == "invalid_api_key"
        assert httpx2.get(f"{server.url}/health").status_code == 200
        encoded = {name: value.encode() for name, value in key.items()}
        assert httpx2.post(url, json=body, headers=encoded).status_code == 200
        # long enough to be cut: many answers of the whole context
        body |= {"stream": True, "max_tokens": 240, "ignore_eos": True, "n": 16}
        with httpx2.stream("POST", url, json=body, headers=encoded, timeout=30) as stream:
            lines = stream.iter_lines()
            next(lines)
            server.process.terminate()
            events = [line.removeprefix("data: ") for line in lines if line]
        ended = json.loads(events[-1]) if events[-1] != "[DONE]" else {}
        assert "stopping" in ended["error"]["message"]
        assert server.process.wait(20) == 0


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "uvicorn", None)
    monkeypatch.delitem(__import__("sys").modules, "d3d.serve.run", raising=False)
    assert d3d("serve").is_refusal("pip install 'd3d-decoding[serve]'")
