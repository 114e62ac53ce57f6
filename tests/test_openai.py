"""The endpoint engine on loopback: what it asks, what it makes of every kind of fault, its limits and its journal."""

import email.utils
import json
import time

import pytest

pytest.importorskip("openai")

from loopback import Fault, completion, endpoint, error

from manus_fast.errors import is_users_mistake
from manus_fast.rollout.endpoint import TEACHERS, EndpointConfig, Teacher, find_teacher, strip_reasoning
from manus_fast.rollout.engine import Request, generate
from manus_fast.rollout.engines.openai import BudgetReached, EndpointRefused, OpenAIEngine, _retry_after
from manus_fast.rollout.journal import Journal, read_lines
from manus_fast.rollout.limits import Budget, Pace


def asked(number=0, text="hello", **options):
    options = {"max_tokens": 20, "temperature": 0.0, **options}
    return Request(number, prompt_ids=(), seed=7 + number, messages=[{"role": "user", "content": text}], **options)


def make(url, journal=None, teacher=None, **options):
    options = {"backoff": 0.01, "timeout": 5.0, **options}
    teacher = teacher or Teacher("t", "the-model", url, "key", price_input=1.0, price_output=2.0)
    return OpenAIEngine(teacher, EndpointConfig(**options), journal)


def ask(answer, requests=None, **options):
    """Completions, the endpoint and the engine of one exchange."""
    with endpoint(answer) as server:
        engine = make(server.url, **options)
        try:
            return generate(engine, requests or [asked()]), server, engine
        finally:
            engine.close()


def test_a_reply_and_what_was_sent():
    (done,), server, engine = ask(lambda body, n: "go", [asked(text="where", temperature=0.7, top_p=0.9, top_k=5)])
    assert (done.text, done.finish_reason, done.tokens, done.error) == ("go", "stop", 5, None)
    assert len(done.ids) == len(done.log_probs) == 0
    (body,) = server.bodies
    assert body == {
        "model": "the-model", "messages": [{"role": "user", "content": "where"}], "max_tokens": 20,
        "temperature": 0.7, "top_p": 0.9, "top_k": 5, "seed": 7,
    }  # fmt: skip
    assert server.headers[0]["authorization"] == "Bearer key"
    assert engine.prompt_tokens == 10 and engine.sampled_tokens == 5
    assert engine.budget.spent == pytest.approx((10 * 1.0 + 5 * 2.0) / 1e6)


FAULTS = {
    "rate limit": (error(429, "slow down", retry_after="0.1"), "rate_limited"),
    "server error": (error(500), "server_error"),
    "overloaded": (error(503), "server_error"),
    "garbage": (Fault(200, b"<html>gateway</html>"), "garbage"),
    "bytes": (Fault(200, b"\xff\xfe{"), "garbage"),
    "another JSON": (Fault(200, b"[]"), "garbage"),
    "error as answer": (Fault(200, {"error": {"message": "upstream"}}), "garbage"),
    "empty choices": (Fault(200, {**completion("x"), "choices": []}), "garbage"),
    "null choice": (Fault(200, {**completion("x"), "choices": [None]}), "garbage"),
    "no text": (Fault(200, completion(None)), "garbage"),
    "closed stream": (Fault(200, completion("x"), cut=20), "connection"),
    "closed at once": (Fault(200, completion("x"), cut=0), "connection"),
    "hang": (Fault(200, completion("x"), hang=0.6), "timeout"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_tried_again(name):
    fault, kind = FAULTS[name]
    timeout = 0.25 if name == "hang" else 5.0
    (done,), server, engine = ask(lambda body, n: fault if n == 0 else "go", timeout=timeout)
    assert (done.text, done.finish_reason) == ("go", "stop")
    assert engine.counts[kind] == engine.counts["retries"] == engine.counts["replies"] == 1
    assert len(server.bodies) == engine.counts["requests"] == 2
    if name == "rate limit":
        assert server.times[1] - server.times[0] >= 0.1


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_that_stays_fails_its_request_alone(name):
    fault, kind = FAULTS[name]
    timeout = 0.25 if name == "hang" else 5.0
    bad = asked(1, "bad")
    done, server, engine = ask(
        lambda body, n: fault if body["messages"][0]["content"] == "bad" else "go",
        [asked(0), bad, asked(2)], retries=1, timeout=timeout,
    )  # fmt: skip
    assert [d.finish_reason for d in done] == ["stop", "error", "stop"] and done[1].error
    assert engine.counts[kind] == 2 and engine.counts["retries"] == 1 and len(server.bodies) == 4


def test_nobody_listens():
    with endpoint(lambda body, n: "go") as server:
        url = server.url
    engine = make(url, retries=2)
    (done,) = generate(engine, [asked()])
    engine.close()
    assert done.finish_reason == "error" and "connection failed" in done.error
    assert engine.counts["connection"] == 3 and engine.budget.spent == 0  # nobody can have billed it


def test_what_cannot_get_better_is_not_tried_again():
    for fault, kind in (
        (error(400, "maximum context length", code="context_length_exceeded"), "too_long"),
        (error(422, "prompt too long for the maximum Context Length of 8"), "too_long"),
        (error(400, "no such parameter"), "refused"),
        (Fault(200, completion("", "content_filter")), "filtered"),
    ):
        (done,), server, engine = ask(lambda body, n, fault=fault: fault)
        assert done.finish_reason == "error" and len(server.bodies) == 1 and engine.counts[kind] == 1
        assert done.too_long == (kind == "too_long")
    assert "context length" in ask(lambda body, n: FAULT_400)[0][0].error


FAULT_400 = error(400, "maximum context length")


@pytest.mark.parametrize(
    "fault", [error(401, "bad key"), error(404, "no such model"), error(429, "pay", code="insufficient_quota")]
)
def test_what_no_request_will_survive_ends_the_run(fault):
    with pytest.raises(EndpointRefused, match="t answers with status") as caught:
        ask(lambda body, n: fault, [asked(n) for n in range(4)])
    assert is_users_mistake(caught.value)


def test_a_stopped_engine_does_not_hang():
    with endpoint(lambda body, n: error(401)) as server:
        engine = make(server.url)
        for n in range(2):
            with pytest.raises(EndpointRefused):
                generate(engine, [asked(n)])
        engine.close()
        engine.close()
    assert len(server.bodies) == 1


def test_retry_after_quiets_everybody_and_is_read_in_every_form():
    for header, least in (({"retry_after_ms": "150"}, 0.15), ({"retry_after": "junk"}, 0.0)):
        begin = time.monotonic()

        def answer(body, n, header=header):
            return error(429, **header) if n == 0 else "go"

        done, server, _ = ask(answer, [asked(0), asked(1)], concurrency=1)
        assert [d.text for d in done] == ["go", "go"]
        assert server.times[1] - begin >= least
    soon = email.utils.formatdate(time.time() + 30, usegmt=True)  # in whole seconds
    assert 28 < _retry_after({"retry-after": soon}) <= 30 and _retry_after({"retry-after": "2.5"}) == 2.5
    past = email.utils.formatdate(time.time() - 30, usegmt=True)
    assert _retry_after({"retry-after": past}) == _retry_after({"retry-after": "-3"}) == _retry_after({}) == 0
    assert _retry_after({"retry-after": "86400"}) == 600  # not for a day


def test_a_cut_reply_and_reasoning():
    (done,), _, _ = ask(lambda body, n: completion("Think: x", "length"))
    assert (done.text, done.finish_reason) == ("Think: x", "length")
    replies = {
        "<think>let me\nsee</think>\n\nThink: a\nAct: b": "Think: a\nAct: b",
        "let me see</think>Act: b": "Act: b",  # QwQ's template opens the tag itself
        "<think>first</think> <think>more</think> Act: b": "Act: b",
        "<think>never ends": "",
        "Act: b": "Act: b",
    }
    for reply, text in replies.items():
        assert strip_reasoning(reply) == text
        with endpoint(lambda body, n, reply=reply: reply) as server:
            engine = make(None, teacher=Teacher("r", "m", server.url, "k", reasoning=True))
            (done,) = generate(engine, [asked()])
            engine.close()
        assert done.text == text
    # All tokens went into a reasoning field of its own: the reply is empty and cut.
    (done,), _, _ = ask(lambda body, n: completion(None, "length"))
    assert (done.text, done.finish_reason) == ("", "length")


def test_concurrency():
    def slow(body, n):
        time.sleep(0.03)
        return "go"

    done, server, _ = ask(slow, [asked(n) for n in range(10)], concurrency=3)
    assert len(done) == 10 and 2 <= server.most <= 3


def test_aborted_requests():
    with endpoint(lambda body, n: Fault(200, completion("x"), hang=1.0)) as server:
        engine = make(server.url)
        engine.submit(asked(5))
        while not server.bodies:
            time.sleep(0.005)
        engine.abort(5)
        engine.abort(99)
        (done,) = engine.poll(2.0)
        engine.close()
    assert (done.id, done.finish_reason) == (5, "abort")
    assert engine.budget.spent > 0  # it may be on the bill


def test_pace_never_lets_more_through_in_any_window():
    import random

    rng, now, sent = random.Random(0), 0.0, []
    pace = Pace(100, window=60)
    for _ in range(400):
        amount = rng.choice([1, 7, 30, 90])
        now += rng.random() * 3
        wait = pace.wait(amount, now)
        if wait:
            assert pace.wait(amount, now + wait * 0.999) > 0  # no later than needed
            now += wait
            assert pace.wait(amount, now) == pytest.approx(0, abs=1e-9)
        pace.note(amount, now)
        sent.append((now, amount))
    for at, _ in sent:
        assert sum(amount for when, amount in sent if at <= when < at + 60) <= 100


def test_pace_of_something_above_the_limit():
    pace = Pace(10)
    assert pace.wait(50, 0.0) == 0.0
    pace.note(50, 0.0)
    assert pace.wait(1, 1.0) == 59.0 and Pace(None).wait(1e9, 0.0) == 0.0


def test_requests_a_minute(monkeypatch):
    from manus_fast.rollout.engines import openai as module

    monkeypatch.setattr(module, "Pace", lambda limit: Pace(limit, window=0.3))
    _, server, _ = ask(lambda body, n: "go", [asked(n) for n in range(5)], requests_per_minute=2)
    assert server.times[4] - server.times[0] >= 0.45  # 2, then 2 after 0.3 s, then 1 after 0.6 s
    # A prompt of 5 bytes counts (5 + 16) // 4 = 5, a reply its 20: 50 is room for two.
    _, server, _ = ask(lambda body, n: "go", [asked(n) for n in range(4)], tokens_per_minute=50)
    assert server.times[3] - server.times[0] >= 0.15


def test_the_cost_limit_is_never_passed_and_ends_the_run(tmp_path):
    # A request may cost (21 * 1 + 20 * 2) / 1e6 = 61e-6 at most, and costs 20e-6.
    limit = 130e-6
    with endpoint(lambda body, n: "go") as server:
        journal = Journal(tmp_path / "replies.jsonl")
        engine = make(server.url, journal, max_cost=limit)
        with pytest.raises(BudgetReached, match=r"endpoint.max_cost: \$0.0001 of \$0.00013 are spent") as caught:
            generate(engine, [asked(n) for n in range(9)])
        engine.close()
        assert is_users_mistake(caught.value)
        # One by one at the end: 4 replies, 80e-6 spent, and 141e-6 would be above the limit.
        assert len(server.bodies) == 4 and engine.budget.spent == pytest.approx(80e-6)
        # The same limit again: what is there is there, and nothing more is sent.
        engine = make(server.url, Journal(tmp_path / "replies.jsonl"), max_cost=limit)
        assert engine.budget.spent == pytest.approx(80e-6)
        with pytest.raises(BudgetReached):
            generate(engine, [asked(n) for n in range(9)])
        engine.close()
        assert len(server.bodies) == 4
        # A higher one goes on without paying twice.
        engine = make(server.url, Journal(tmp_path / "replies.jsonl"), max_cost=1.0)
        assert len(generate(engine, [asked(n) for n in range(9)])) == 9
        engine.close()
        assert len(server.bodies) == 9 and engine.counts["recalled"] == 4
    assert engine.budget.spent == pytest.approx(9 * 20e-6)


def test_without_usage_the_most_is_counted():
    _, _, engine = ask(lambda body, n: completion("go", usage=None))
    assert engine.budget.spent == pytest.approx(61e-6)


def test_lost_replies_count_at_their_most(tmp_path):
    path = tmp_path / "replies.jsonl"
    fault = Fault(200, completion("x"), cut=20)
    _, _, engine = ask(lambda body, n: fault if n == 0 else "go", journal=Journal(path))
    assert engine.budget.spent == pytest.approx(81e-6) == Journal(path).cost
    _, _, engine = ask(lambda body, n: error(500) if n == 0 else "go")
    assert engine.budget.spent == pytest.approx(20e-6)


def test_budget():
    budget = Budget(1.0, 2e5, 4e5)
    assert budget.cost(1, 1) == pytest.approx(0.6)
    budget.reserve(0.6)
    assert not budget.admits(0.5) and budget.admits(0.4)
    budget.settle(0.6, 0.2)
    assert budget.admits(0.8) and not budget.admits(0.81)
    assert Budget(None, None, None).admits(1e9)


def test_the_journal_tells_requests_apart(tmp_path):
    path = tmp_path / "replies.jsonl"
    same = [asked(0), asked(0, temperature=1.0), asked(0, "else"), asked(0, max_tokens=9)]
    for number, request in enumerate(same):
        (done,), _, engine = ask(lambda body, n, number=number: f"reply {number}", [request], journal=Journal(path))
        assert done.text == f"reply {number}" and engine.counts["recalled"] == 0
    for number, request in enumerate(same):
        (done,), server, engine = ask(lambda body, n: error(500), [request], journal=Journal(path))
        assert done.text == f"reply {number}" and not server.bodies and engine.counts["recalled"] == 1


def test_a_journal_that_was_cut(tmp_path):
    path = tmp_path / "replies.jsonl"
    journal = Journal(path)
    journal.add({"key": "a", "text": "ü\u2028x", "cost": 0.25})
    journal.close()
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"key": "b", "te')
    again = Journal(path)
    assert len(again) == 1 and again.find("a")["text"] == "ü\u2028x" and again.cost == 0.25
    again.add({"key": "c", "text": "y", "cost": 1})
    again.close()
    assert [record["key"] for record in read_lines(path)] == ["a", "c"]
    path.write_bytes(b"junk\n" + whole)
    with pytest.raises(ValueError, match=r"expected a JSON object in line 1"):
        Journal(path)
    path.write_bytes(b"[]\n")
    with pytest.raises(ValueError, match=r"expected a JSON object in line 1"):
        Journal(path)


def test_teachers(monkeypatch):
    for name in ("MANUS_FAST_QWQ_BASE_URL", "MANUS_FAST_DEEPSEEK_BASE_URL", "MANUS_FAST_OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    assert set(TEACHERS) == {"gpt-4o", "deepseek-r1", "qwq-32b"}
    assert find_teacher("gpt-4o", EndpointConfig()).base_url is None  # the package's own
    r1 = find_teacher("deepseek-r1", EndpointConfig())
    assert (r1.base_url, r1.model, r1.reasoning) == ("https://api.deepseek.com", "deepseek-reasoner", True)
    with pytest.raises(ValueError, match="MANUS_FAST_QWQ_BASE_URL"):
        find_teacher("qwq-32b", EndpointConfig())
    monkeypatch.setenv("MANUS_FAST_QWQ_BASE_URL", "http://box/v1")
    monkeypatch.setenv("MANUS_FAST_QWQ_API_KEY", "secret")
    qwq = find_teacher("qwq-32b", EndpointConfig(model="qwq", max_tokens=99, reasoning=False))
    assert (qwq.base_url, qwq.api_key, qwq.model) == ("http://box/v1", "secret", "qwq")
    assert (qwq.max_tokens, qwq.reasoning) == (99, False)
    assert find_teacher("qwq-32b", EndpointConfig(base_url="http://other/v1")).base_url == "http://other/v1"
    own = find_teacher("my/model", EndpointConfig(base_url="http://x/v1"))
    assert (own.model, own.price_input) == ("my/model", None)
    with pytest.raises(ValueError, match="price_input"):
        find_teacher("my/model", EndpointConfig(max_cost=1.0))
    with pytest.raises(ValueError, match=r"model.path: expected a teacher \(gpt-4o, deepseek-r1, qwq-32b\)"):
        find_teacher("", EndpointConfig())


def test_no_key_is_the_users_to_mend(monkeypatch):
    for name in ("OPENAI_API_KEY", "OPENAI_ADMIN_KEY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="endpoint: expected a key for gpt-4o, got none"):
        OpenAIEngine(Teacher("gpt-4o", "gpt-4o"), EndpointConfig())


@pytest.mark.parametrize(
    "option", [{"concurrency": 0}, {"max_cost": -1}, {"timeout": 0}, {"retries": -1}, {"tokens_per_minute": 0}]
)
def test_bad_limits(option):
    (name,) = option
    with pytest.raises(ValueError, match=rf"endpoint\.{name}: expected"):
        EndpointConfig(**option)


def test_ids_are_refused_and_so_are_weights():
    engine = make("http://127.0.0.1:9/v1")
    with pytest.raises(ValueError, match="expected a prompt as messages"):
        engine.submit(Request(0, (), 0, 1))
    with pytest.raises(ValueError, match="weights are ours"):
        engine.load([], 1)
    engine.close()


def test_the_journal_line_says_what_was_paid(tmp_path):
    ask(lambda body, n: "go", journal=Journal(tmp_path / "r.jsonl"))
    (record,) = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert record["text"] == "go" and record["finish_reason"] == "stop"
    assert (record["prompt_tokens"], record["sampled_tokens"], record["cost"]) == (10, 5, pytest.approx(20e-6))
