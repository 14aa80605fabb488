"""A real server process, asked by real clients."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

import d3d
from d3d.api import Model
from d3d.serve.protocol import IGNORED, ChatBody, CompletionBody
from support.server import RunningServer, serving

NAME = "tiny"
QUESTION = [{"role": "user", "content": "how much is two and two?"}]


@pytest.fixture(scope="module")
def server(
    tiny_target: Path, tiny_drafter: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    log = tmp_path_factory.mktemp("server") / "log"
    with serving(
        log,
        *("--model", tiny_target, "--drafter", tiny_drafter, "--dtype", "float32"),
        *("--served-model-name", NAME, "--max-batch", 4, "--max-waiting", 8, "--device", "cpu"),
    ) as running:
        yield running


@pytest.fixture(scope="module")
def model(tiny_target: Path) -> Model:
    return d3d.load(str(tiny_target), device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def http(server: RunningServer) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=server.url, timeout=60) as client:
        yield client


def chat(http: httpx2.Client, **fields: Any) -> httpx2.Response:
    return http.post("/v1/chat/completions", json={"messages": QUESTION, **fields})


def figure(http: httpx2.Client, name: str) -> float:
    lines = http.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name + "{"))


def test_a_chat_gets_the_targets_own_answer(client: openai.OpenAI, model: Model) -> None:
    own = model.generate(QUESTION, method="plain", max_tokens=30)
    answer = client.chat.completions.create(
        model=NAME, messages=QUESTION, max_completion_tokens=30, temperature=0
    )
    assert answer.choices[0].message.content == own.text
    assert answer.choices[0].finish_reason == own.finish_reason
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (
        own.usage.prompt_tokens,
        own.usage.completion_tokens,
    )


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"temperature": 0.9, "seed": 5}], ids=str)
def test_a_stream_spells_the_same_answer(client: openai.OpenAI, fields: dict[str, Any]) -> None:
    asked = {"model": NAME, "messages": QUESTION, "max_tokens": 24, **fields}
    whole = client.chat.completions.create(**asked)
    chunks = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert [each.choices[0].finish_reason for each in chunks if each.choices][-1] == "length"
    assert not chunks[-1].choices
    assert chunks[-1].usage == whole.usage


def test_choices_of_one_seed_differ_and_come_back(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": NAME, "prompt": ["a cat", "the mat"], "max_tokens": 12}
    first, second = (
        [each.text for each in client.completions.create(**asked, n=2, seed=3).choices]
        for _ in range(2)
    )
    assert first == second
    assert len(set(first)) == 4


def test_stops_penalties_and_bias_are_the_engines(client: openai.OpenAI, model: Model) -> None:
    own = model.generate(
        "the cat",
        raw=True,
        max_tokens=20,
        presence_penalty=1.0,
        frequency_penalty=0.5,
        logit_bias={70: 3.0},
        min_tokens=8,
        stop=("z",),
        logprobs=2,
    )
    answer = client.completions.create(
        model=NAME,
        prompt="the cat",
        max_tokens=20,
        temperature=0,
        presence_penalty=1.0,
        frequency_penalty=0.5,
        logit_bias={"70": 3.0},
        stop=["z"],
        logprobs=2,
        extra_body={"min_tokens": 8, "return_token_ids": True},
    ).choices[0]
    assert answer.text == own.text
    assert answer.to_dict()["token_ids"] == list(own.token_ids)
    assert answer.logprobs is not None
    assert answer.logprobs.token_logprobs == pytest.approx(
        [entry.logprob for entry in own.logprobs], abs=1e-4
    )


def test_log_probabilities_of_a_chat(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": NAME, "messages": QUESTION, "max_tokens": 5}
    asked |= {"temperature": 0, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**asked).choices[0].logprobs
    assert whole is not None
    assert whole.content is not None
    streamed = [
        entry
        for chunk in client.chat.completions.create(**asked, stream=True)
        if chunk.choices[0].logprobs is not None
        for entry in chunk.choices[0].logprobs.content or []
    ]
    assert streamed == whole.content
    assert all(entry.top_logprobs[0].logprob >= entry.logprob for entry in whole.content)


def test_echo_scores_the_prompt_as_lm_eval_asks(client: openai.OpenAI, model: Model) -> None:
    ids = model.encode("the cat sat on the mat", raw=True)
    answer = client.completions.create(
        model=NAME, prompt=[ids, ids[:3]], max_tokens=1, temperature=0, logprobs=1, echo=True
    )
    assert len(answer.choices) == 2
    scores = answer.choices[0].logprobs
    assert scores is not None
    assert scores.token_logprobs is not None
    assert scores.token_logprobs[0] is None
    assert len(scores.token_logprobs) == len(ids) + 1
    # the log-probability that generation reports for the same token at the same place
    for place in (1, len(ids) - 1):
        forced = model.generate(ids[:place], max_tokens=1, logprobs=64)
        known = dict(forced.logprobs[0].top)
        if ids[place] in known:
            assert scores.token_logprobs[place] == pytest.approx(known[ids[place]], abs=1e-4)
    alone = client.completions.create(
        model=NAME, prompt=ids, max_tokens=0, logprobs=1, echo=True
    ).choices[0]
    assert alone.logprobs is not None
    assert alone.logprobs.token_logprobs == pytest.approx(scores.token_logprobs[: len(ids)])


def test_async_clients_share_the_engine(server: RunningServer, model: Model) -> None:
    own = model.generate(QUESTION, max_tokens=25).text

    async def ask_all() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            answers = await asyncio.gather(
                *(
                    client.chat.completions.create(
                        model=NAME, messages=QUESTION, max_tokens=25, temperature=0
                    )
                    for _ in range(10)
                )
            )
        return [answer.choices[0].message.content for answer in answers]

    assert asyncio.run(ask_all()) == [own] * 10


def test_speculation_is_told_as_vllm_tells_it(http: httpx2.Client) -> None:
    body = chat(http, max_tokens=30, temperature=0).json()
    figures = body["metrics"]["speculative_decoding"]
    assert len(figures["acceptance_histogram"]) == figures["num_spec_tokens"] + 1
    kept = sum(place * count for place, count in enumerate(figures["acceptance_histogram"]))
    assert kept == figures["num_accepted_draft_tokens"]
    assert figures["mean_acceptance_length"] > 1


def test_counters_move(http: httpx2.Client) -> None:
    names = (
        "vllm:generation_tokens_total",
        "vllm:spec_decode_num_drafts_total",
        "d3d:rounds_total",
    )
    before = [figure(http, name) for name in names]
    chat(http, max_tokens=20, temperature=0)
    after = [figure(http, name) for name in names]
    assert after[0] == before[0] + 20
    assert all(late > early for late, early in zip(after, before, strict=True))


def test_a_client_that_leaves_frees_its_place(http: httpx2.Client, server: RunningServer) -> None:
    aborted = figure(http, "vllm:request_success_total")
    asked = {"messages": QUESTION, "max_tokens": 200, "ignore_eos": True}
    with httpx2.Client(base_url=server.url) as leaving:
        with leaving.stream("POST", "/v1/chat/completions", json={**asked, "stream": True}) as it:
            next(it.iter_lines())
        with pytest.raises(httpx2.TimeoutException):
            leaving.post("/v1/chat/completions", json=asked, timeout=0.02)
    limit = time.monotonic() + 20
    while figure(http, "vllm:num_requests_running") and time.monotonic() < limit:
        time.sleep(0.05)
    assert figure(http, "vllm:num_requests_running") == 0
    assert figure(http, "vllm:request_success_total") >= aborted + 1


def test_tokens_go_there_and_back(http: httpx2.Client, model: Model) -> None:
    told = http.post("/tokenize", json={"prompt": "naïve café 你好"}).json()
    assert told["count"] == len(told["tokens"])
    back = http.post("/detokenize", json={"tokens": told["tokens"]}).json()
    assert back["prompt"] == "naïve café 你好"
    turn = http.post("/tokenize", json={"messages": QUESTION}).json()
    assert turn["tokens"] == model.encode(QUESTION)
    assert http.get("/tokenizer_info").json()["eos_token"] == "<|im_end|>"
    assert http.get("/v1/models").json()["data"][0]["id"] == NAME
    assert http.get(f"/v1/models/{NAME}").json()["max_model_len"] == told["max_model_len"]


BAD: list[tuple[Any, int, str | None]] = [
    ({"messages": QUESTION, "max_tokens": 0}, 400, "max_tokens"),
    ({"messages": QUESTION, "max_tokens": "many"}, 400, "max_tokens"),
    ({"messages": QUESTION, "max_tokens": -1}, 400, "max_tokens"),
    ({"messages": QUESTION, "temperature": -0.1}, 400, "temperature"),
    ({"messages": QUESTION, "temperature": "hot"}, 400, "temperature"),
    ({"messages": QUESTION, "top_p": 0}, 400, "top_p"),
    ({"messages": QUESTION, "top_p": 1.5}, 400, "top_p"),
    ({"messages": QUESTION, "top_k": -2}, 400, "top_k"),
    ({"messages": QUESTION, "presence_penalty": 3}, 400, "presence_penalty"),
    ({"messages": QUESTION, "logit_bias": {"x": 1}}, 400, "logit_bias"),
    ({"messages": QUESTION, "logit_bias": {"99999": 1}}, 400, "logit_bias"),
    ({"messages": QUESTION, "logit_bias": dict.fromkeys(map(str, range(1025)), 1)}, 400, None),
    ({"messages": QUESTION, "stop_token_ids": [1] * 1025}, 400, "stop_token_ids"),
    ({"messages": QUESTION, "seed": 2**70}, 400, "seed"),
    ({"messages": QUESTION, "stop": [""]}, 400, "stop"),
    ({"messages": QUESTION, "stop": 5}, 400, "stop"),
    ({"messages": QUESTION, "stop": ["a"] * 17}, 400, "stop"),
    ({"messages": QUESTION, "n": 0}, 400, "n"),
    ({"messages": QUESTION, "n": 10**9}, 400, "n"),
    ({"messages": QUESTION, "n": 13}, 400, None),
    ({"messages": QUESTION, "top_logprobs": 21}, 400, "top_logprobs"),
    ({"messages": QUESTION, "min_tokens": 9, "max_tokens": 3}, 400, "min_tokens"),
    ({"messages": QUESTION, "stream": "perhaps"}, 400, "stream"),
    ({"messages": QUESTION, "stream_options": {"x": 1}}, 400, "stream_options"),
    ({"messages": QUESTION, "tools": [{"type": "function"}]}, 400, "tools"),
    ({"messages": QUESTION, "response_format": {"type": "json_object"}}, 400, "response_format"),
    ({"messages": QUESTION, "prediction": {"content": "x"}}, 400, "prediction"),
    ({"messages": QUESTION, "frequency_penaltyy": 1}, 400, "frequency_penaltyy"),
    ({"messages": QUESTION, "model": "gpt-9"}, 404, "model"),
    ({"messages": QUESTION, "chat_template_kwargs": {"x": 1}}, 400, "chat_template_kwargs"),
    ({"messages": []}, 400, "messages"),
    ({"messages": "hello"}, 400, "messages"),
    ({"messages": [{"role": "user"}, 5]}, 400, "messages"),
    ({"messages": [{"role": "user", "content": {"a": 1}}]}, 400, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages"),
    ({"messages": [{"role": "user", "content": "ha " * 5000}]}, 400, "prompt"),
    ({}, 400, "messages"),
    ([], 400, None),
    ("text", 400, None),
    (b"{", 400, None),
    (b'{"messages": NaN}', 400, "messages"),
    (b'{"messages": [], "temperature": Infinity}', 400, None),
    (b"\xff\xfe{}", 400, None),
    (b"[" * 200_000, 400, None),
    (b" " * (9 * 2**20), 413, None),
]


@pytest.mark.parametrize(("body", "status", "param"), BAD, ids=lambda value: repr(value)[:60])
def test_bad_input_gets_one_clear_error(
    http: httpx2.Client, body: Any, status: int, param: str | None
) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    answer = http.post("/v1/chat/completions", content=content, headers=headers)
    error = answer.json()["error"]
    assert answer.status_code == status, answer.text
    assert set(error) == {"message", "type", "param", "code"}
    if param is not None:
        assert error["param"] == param
    assert "Traceback" not in answer.text
    assert http.get("/health").status_code == 200


def test_only_json_is_read_and_other_sites_get_no_leave(http: httpx2.Client) -> None:
    content = json.dumps({"messages": QUESTION})
    form = http.post(
        "/v1/chat/completions", content=content, headers={"content-type": "text/plain"}
    )
    assert form.status_code == 415
    preflight = http.options(
        "/v1/chat/completions",
        headers={"origin": "https://elsewhere", "access-control-request-method": "POST"},
    )
    assert preflight.status_code == 405
    assert "access-control-allow-origin" not in preflight.headers
    assert http.get("/v1/models/../../etc/passwd").status_code == 404


def test_a_page_whose_name_leads_here_can_not_use_it(http: httpx2.Client) -> None:
    body = {"messages": QUESTION, "max_tokens": 2}
    for host, status in (("evil.example:8000", 403), ("", 403), ("LocalHost:1", 200)):
        answer = http.post("/v1/chat/completions", json=body, headers={"host": host})
        assert answer.status_code == status


def test_streamed_offsets_and_prompts_are_those_of_each_choice(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": NAME, "prompt": ["a cat", "the mat"], "max_tokens": 9}
    asked |= {"temperature": 0, "logprobs": 0, "extra_body": {"return_token_ids": True}}
    whole = client.completions.create(**asked)
    assert [each.to_dict()["prompt_token_ids"] for each in whole.choices] == [
        client.completions.create(**asked | {"prompt": each})
        .choices[0]
        .to_dict()["prompt_token_ids"]
        for each in asked["prompt"]
    ]
    streamed: dict[int, list[int]] = {}
    for chunk in client.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            if choice.logprobs is not None:
                streamed.setdefault(choice.index, []).extend(choice.logprobs.text_offset or [])
    for choice in whole.choices:
        assert choice.logprobs is not None
        assert streamed[choice.index] == choice.logprobs.text_offset


def test_a_full_queue_says_when_to_come_back(http: httpx2.Client) -> None:
    asked = {"messages": QUESTION, "max_tokens": 200, "ignore_eos": True, "n": 12, "stream": True}
    for _ in range(20):  # the answers may end before the next request comes
        with http.stream("POST", "/v1/chat/completions", json=asked) as busy:
            next(busy.iter_lines())
            refused = chat(http, max_tokens=5)
        if refused.status_code != 200:
            break
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) > 0
    assert refused.json()["error"]["code"] == "queue_full"


def test_nothing_of_a_request_is_in_the_log(http: httpx2.Client, server: RunningServer) -> None:
    chat(http, max_tokens=3)
    log = server.log.read_text()
    assert "/v1/chat/completions" in log
    assert QUESTION[0]["content"] not in log
    assert "Traceback" not in log


def test_the_guide_names_every_field() -> None:
    guide = (Path(__file__).parents[2] / "docs/guide/serving.md").read_text()
    honoured, ignored = (
        set(re.findall(r"`([a-z_]+)(?:\.[a-z_]+)?`", part))
        for part in guide.partition("**Honoured**")[2]
        .partition("**Everything else")[0]
        .split("**Accepted without effect**")
    )
    assert ignored == IGNORED
    assert honoured >= (ChatBody.model_fields.keys() | CompletionBody.model_fields) - {"model"}
