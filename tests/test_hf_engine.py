"""The slot-cache engine: its completions against the plain model, and its rules of queueing, sampling and weights."""

import copy

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from manus_fast.ops import dispatch
from manus_fast.rollout.engine import Request, generate
from manus_fast.rollout.engines.hf import HFEngine
from manus_fast.rollout.engines.sampling import sample
from manus_fast.rollout.seeds import uniforms

VOCAB = 60
END = 59


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Operations this small take longer in two threads than in one, most of all on a machine that is busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_model(seed=0, **options):
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,  # far from uniform, so that mistakes show
    }
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **options})).eval()


MODEL = make_model()


def make_engine(model=None, ends=(END,), **options):
    options = {"max_slots": 8, "max_length": 128, **options}
    return HFEngine(copy.deepcopy(model or MODEL), ends, **options)


def prompt(length, seed=0):
    return np.random.default_rng(seed).integers(0, VOCAB - 1, length).astype(np.int32)


def reference_log_probs(ids, start, temperature=1.0, model=MODEL):
    """log p(ids[t] | ids[:t]) for t >= start by the model as transformers runs it, without any cache."""
    with torch.no_grad():
        logits = model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0].double()
    log_probs = (logits / temperature).log_softmax(-1)
    targets = torch.from_numpy(ids[start:].astype(np.int64))
    return log_probs[start - 1 : -1].gather(-1, targets[:, None])[:, 0].numpy()


def check_scored(request, completion, model=MODEL):
    ids = np.concatenate([request.prompt_ids, completion.ids])
    expected = reference_log_probs(ids, len(request.prompt_ids), request.temperature or 1.0, model)
    np.testing.assert_allclose(completion.log_probs, expected, atol=1e-4)
    assert completion.ids.dtype == np.int32 and completion.log_probs.dtype == np.float32


def requests(count, **options):
    options = {"max_tokens": 12, **options}
    return [Request(i, prompt(3 + 5 * (i % 7), seed=i % 5), seed=100 + i, **options) for i in range(count)]


# "auto" decodes with the compiled kernel where the head is a multiple of 16 wide, "reference" by padded SDPA
@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.9])
def test_log_probs_equal_scoring_by_the_plain_model(temperature, backend):
    asked = requests(20, temperature=temperature)
    with dispatch.forced(backend):
        done = generate(make_engine(), asked)
    for request, completion in zip(asked, done, strict=True):
        check_scored(request, completion)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("options", [{"num_key_value_heads": 4}, {"num_key_value_heads": 1}, {"head_dim": 12}])
def test_head_layouts(options, backend):
    model = make_model(**options)
    asked = requests(9)
    with dispatch.forced(backend):
        done = generate(make_engine(model), asked)
    for request, completion in zip(asked, done, strict=True):
        check_scored(request, completion, model)


def test_few_running_slots_among_many():
    """Padded decoding takes another way when most slots of the span are idle."""
    engine = make_engine(max_slots=16)
    asked = [Request(i, prompt(20, seed=i), seed=i, max_tokens=2 + 20 * (i == 15)) for i in range(16)]
    with dispatch.forced("reference"):
        done = generate(engine, asked)
    for request, completion in zip(asked, done, strict=True):
        check_scored(request, completion)


def test_greedy_takes_the_best_token():
    request = Request(0, prompt(9), seed=0, max_tokens=10, temperature=0.0)
    (completion,) = generate(make_engine(), [request])
    ids = list(request.prompt_ids)
    for token in completion.ids:
        with torch.no_grad():
            assert int(MODEL(torch.tensor([ids])).logits[0, -1].argmax()) == token
        ids.append(token)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_completion_depends_on_its_request_only(temperature):
    asked = requests(30, temperature=temperature)
    expected = generate(make_engine(max_slots=8), asked)
    for slots, order, batch in ((1, 1, 512), (3, -1, 16), (30, 1, 40)):
        got = generate(make_engine(max_slots=slots, max_batch_tokens=batch), asked[::order])[::order]
        for a, b in zip(expected, got, strict=True):
            assert a.id == b.id and a.finish_reason == b.finish_reason
            np.testing.assert_array_equal(a.ids, b.ids)
            np.testing.assert_allclose(a.log_probs, b.log_probs, atol=1e-4)


def test_stops_on_end_ids_and_keeps_them():
    # seed chosen by nothing: among 40 sampled replies of up to 60 tokens, several meet one of six end ids
    ends = (7, 13, 21, 30, 44, END)
    completions = generate(make_engine(ends=ends), requests(40, max_tokens=60))
    stopped = [c for c in completions if c.finish_reason == "stop"]
    cut = [c for c in completions if c.finish_reason == "length"]
    assert len(stopped) + len(cut) == 40 and stopped
    assert all(c.ids[-1] in ends and not np.isin(c.ids[:-1], ends).any() for c in stopped)
    assert all(len(c.ids) == 60 and not np.isin(c.ids, ends).any() for c in cut)


def test_limits():
    engine = make_engine(ends=(57,), max_length=20)
    limited, room, full, over = generate(
        engine,
        [
            Request(0, prompt(5), seed=3, max_tokens=1),
            Request(1, prompt(17), seed=3, max_tokens=50, temperature=0.0),
            Request(2, prompt(20), seed=3, max_tokens=5),
            Request(3, prompt(31), seed=3, max_tokens=5),
        ],
    )
    assert len(limited.ids) == 1 and limited.finish_reason == "length"
    assert len(room.ids) == 3 and room.finish_reason == "length"
    for completion, length in ((full, 20), (over, 31)):
        assert completion.finish_reason == "error" and len(completion.ids) == 0
        assert "max_length = 20" in completion.error and str(length) in completion.error


def count_tokens(engine):
    """Wraps the decoder so that the tokens of every forward call are recorded."""
    seen = []
    forward = engine.model.base_model.forward

    def counting(*args, **kwargs):
        seen.append(kwargs["input_ids"].shape[1])
        return forward(*args, **kwargs)

    engine.model.base_model.forward = counting
    return seen


def test_session_computes_only_what_is_new():
    engine = make_engine()
    seen = count_tokens(engine)
    first = Request(0, prompt(40), seed=1, max_tokens=6, session=5)
    (a,) = generate(engine, [first])
    assert sum(seen) == 40 + len(a.ids) - 1  # the last sampled token is not fed back
    seen.clear()
    follow = np.concatenate([first.prompt_ids, a.ids, prompt(7, seed=9)])
    second = Request(1, follow, seed=2, max_tokens=4, session=5)
    (b,) = generate(engine, [second])
    assert seen[0] == 1 + 7 and sum(seen) == 1 + 7 + len(b.ids) - 1
    check_scored(second, b)


def test_equal_prompts_are_computed_once():
    engine = make_engine()
    seen = count_tokens(engine)
    asked = [Request(i, prompt(60), seed=i, max_tokens=3, session=i) for i in range(8)]
    done = generate(engine, asked)
    assert seen[0] == 60 and sum(seen) <= 60 + 8 * 3
    for request, completion in zip(asked, done, strict=True):
        check_scored(request, completion)


def test_idle_sessions_lose_their_slot_to_new_work():
    engine = make_engine(max_slots=2)
    first = [Request(i, prompt(30, seed=i), seed=i, max_tokens=4, session=i) for i in range(2)]
    done = generate(engine, first)
    other = Request(2, prompt(25, seed=7), seed=7, max_tokens=4, session=2)  # takes the slot of session 0
    check_scored(other, *generate(engine, [other]))
    for i in (1, 0):
        follow = np.concatenate([first[i].prompt_ids, done[i].ids, prompt(5, seed=i + 20)])
        request = Request(10 + i, follow, seed=i, max_tokens=4, session=i)
        check_scored(request, *generate(engine, [request]))
    for session in range(3):
        engine.end_session(session)
    engine.end_session(99)


def test_replies_are_independent_of_reuse():
    """The same multi-turn dialogue with sessions, without, and with other episodes in between."""

    def play(engine, session, noise):
        ids, out = prompt(20), []
        for turn in range(5):
            asked = [Request(turn, ids, seed=turn, max_tokens=8, session=session)]
            asked += [Request(100 + i, prompt(18, seed=turn + i), seed=i, max_tokens=9) for i in range(noise)]
            completion = generate(engine, asked)[0]
            out.append(completion.ids)
            ids = np.concatenate([ids, completion.ids, prompt(3, seed=turn)])
        return np.concatenate(out)

    expected = play(make_engine(max_slots=1), None, 0)
    np.testing.assert_array_equal(play(make_engine(max_slots=1), 4, 0), expected)
    np.testing.assert_array_equal(play(make_engine(max_slots=3), 4, 7), expected)


def test_first_come_first_served():
    engine = make_engine(max_slots=2)
    for i in range(6):
        engine.submit(Request(i, prompt(4, seed=i), seed=i, max_tokens=2, temperature=0.0))
    order = []
    while len(order) < 6:
        order += [c.id for c in engine.poll(0.0)]
    assert sorted(order[:2]) == [0, 1] and sorted(order[2:4]) == [2, 3] and sorted(order[4:]) == [4, 5]
    assert engine.poll(1.0) == []


def test_abort():
    engine = make_engine(max_slots=1)
    for i in range(3):
        engine.submit(Request(i, prompt(6), seed=i, max_tokens=50, session=i))
    for _ in range(4):
        assert engine.poll(0.0) == []
    engine.abort(0)
    engine.abort(2)
    engine.abort(77)
    done = {c.id: c for c in engine.poll(0.0)}
    assert done[0].finish_reason == "abort" and len(done[0].ids) == 4
    assert done[2].finish_reason == "abort" and len(done[2].ids) == 0
    while 1 not in done:
        done.update({c.id: c for c in engine.poll(0.0)})
    assert len(done[1].ids) > 0


def test_load_changes_the_output_to_what_the_new_weights_give():
    engine = make_engine()
    other = make_model(seed=5)
    request = Request(0, prompt(30), seed=1, max_tokens=10, session=1)
    generate(engine, [request])
    engine.load(((n, p.detach()) for n, p in other.named_parameters()), version=3)
    (completion,) = generate(engine, [request])
    assert engine.version == completion.version == 3
    check_scored(request, completion, other)


def test_every_token_knows_the_version_it_came_from():
    engine = make_engine()
    other = make_model(seed=5)
    request = Request(0, prompt(30), seed=1, max_tokens=10)
    engine.submit(request)
    for _ in range(4):
        assert engine.poll(0.0) == []
    engine.load(((n, p.detach()) for n, p in other.named_parameters()), version=7)
    done = []
    while not done:
        done = engine.poll(0.0)
    assert done[0].version == 0 and done[0].text is None
    np.testing.assert_array_equal(done[0].versions, [0] * 4 + [7] * 6)
    (whole,) = generate(engine, [request])
    assert whole.version == 7 and whole.versions is None


def test_load_refuses_other_names_and_shapes():
    engine = make_engine()
    tensors = {n: p.detach() for n, p in MODEL.named_parameters()}
    with pytest.raises(ValueError, match="nonsense"):
        engine.load({**tensors, "model.nonsense": torch.zeros(1)}.items(), 1)
    short = dict(tensors)
    short.pop("model.norm.weight")
    with pytest.raises(ValueError, match=r"model\.norm\.weight"):
        engine.load(short.items(), 1)
    with pytest.raises(ValueError, match=r"shape \[64\], got \[33\]"):
        engine.load({**tensors, "model.norm.weight": torch.zeros(33)}.items(), 1)
    assert engine.version == 0


def test_tied_weights_load_under_one_name():
    model = make_model(tie_word_embeddings=True)
    other = make_model(seed=5, tie_word_embeddings=True)
    engine = make_engine(model)
    engine.load(((n, p.detach()) for n, p in other.named_parameters()), 1)
    request = Request(0, prompt(30), seed=1, max_tokens=10)
    check_scored(request, *generate(engine, [request]), other)


@pytest.mark.parametrize("shared", [True, False])
def test_sleep_and_wake(shared):
    model = copy.deepcopy(MODEL)
    engine = HFEngine(model, [END], max_slots=2, max_length=64, dtype=None if shared else torch.float64)
    assert engine.shares_model == shared
    request = Request(0, prompt(30), seed=1, max_tokens=10)
    (expected,) = generate(engine, [request])
    engine.submit(request)
    engine.poll(0.0)
    engine.sleep(1)
    with pytest.raises(RuntimeError, match="wake"):
        engine.poll(0.0)
    engine.wake()
    done = []
    while not done:
        done = engine.poll(0.0)
    np.testing.assert_array_equal(done[0].ids, expected.ids)
    engine.sleep(2)
    engine.wake()
    engine.submit(request)
    with pytest.raises(RuntimeError, match="load"):
        engine.poll(0.0)
    engine.load(((n, p.detach()) for n, p in MODEL.named_parameters()), 1)
    done = []
    while not done:
        done = engine.poll(0.0)
    np.testing.assert_array_equal(done[0].ids, expected.ids)
    with pytest.raises(ValueError, match="1 or 2"):
        engine.sleep(3)


def test_a_step_that_fails_is_computed_again_and_a_second_one_loses_what_ran_in_it(monkeypatch):
    asked = requests(6)
    expected = generate(make_engine(), asked)
    engine, broken = make_engine(max_slots=4), []
    whole = engine.model.base_model.forward

    def forward(*words, **more):
        if broken:
            broken.pop()
            raise torch.OutOfMemoryError("no memory left")
        return whole(*words, **more)

    monkeypatch.setattr(engine.model.base_model, "forward", forward)
    for request in asked:
        engine.submit(request)
    broken.extend([True] * 2)
    assert engine.poll(0.0) == []
    lost = engine.poll(0.0)
    assert [c.id for c in lost] == [0, 1, 2, 3] and {c.finish_reason for c in lost} == {"error"}
    assert all("no memory left" in c.error and len(c.ids) == 0 for c in lost)
    done, steps = {}, 0
    for request in asked[:4]:
        engine.submit(request)
    while len(done) < 6:  # two had waited for a slot
        steps += 1
        if steps % 3 == 0:  # nothing is lost, however often it happens
            broken.append(True)
        done.update({c.id: c for c in engine.poll(0.0)})
    assert steps > 12
    for i, request in enumerate(asked):
        np.testing.assert_array_equal(done[i].ids, expected[i].ids)
        check_scored(request, done[i])
    broken.extend([True] * 3)
    with pytest.raises(RuntimeError, match="3 steps in a row failed, the last with: no memory left"):
        for request in asked:
            engine.submit(request)
            engine.poll(0.0)


def test_broken_weights_are_an_error_not_a_token():
    engine = make_engine()
    with torch.no_grad():
        engine.model.model.norm.weight.fill_(float("nan"))
    (completion,) = generate(engine, [Request(0, prompt(5), seed=0, max_tokens=5)])
    assert completion.finish_reason == "error" and "NaN" in completion.error and len(completion.ids) == 0


@pytest.mark.parametrize(
    "options, words",
    [
        ({"prompt_ids": np.zeros(0, np.int32)}, "prompt_ids"),
        ({"prompt_ids": np.asarray([VOCAB], np.int32)}, "prompt_ids"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"min_p": 1.0}, "min_p"),
    ],
)
def test_refuses_bad_requests(options, words):
    with pytest.raises(ValueError, match=words):
        make_engine().submit(Request(**{"id": 0, "prompt_ids": prompt(3), "seed": 0, "max_tokens": 4, **options}))


def test_refuses_bad_limits():
    with pytest.raises(ValueError, match="max_slots"):
        make_engine(max_slots=0)
    with pytest.raises(ValueError, match="max_batch_tokens"):
        make_engine(max_batch_tokens=3)
    with pytest.raises(ValueError, match="end_ids"):
        make_engine(ends=(VOCAB,))
    with pytest.raises(ValueError, match="end_ids"):
        make_engine(ends=())


def draw(logits, count, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0):
    rows = torch.tensor(logits, dtype=torch.float32).repeat(count, 1)
    full = lambda x, dtype: np.full(count, x, dtype)  # noqa: E731
    u = uniforms(np.arange(count, dtype=np.uint64), np.zeros(count, np.uint64))
    return sample(
        rows,
        u,
        full(temperature, np.float32),
        full(top_p, np.float32),
        full(top_k, np.int64),
        full(min_p, np.float32),
    )


# p = 0.5, 0.25, 0.15, 0.10
LOGITS = np.log([0.15, 0.5, 0.1, 0.25])


@pytest.mark.parametrize(
    "options, expected",
    [
        ({}, [0.15, 0.5, 0.1, 0.25]),
        ({"top_k": 2}, [0, 2 / 3, 0, 1 / 3]),
        ({"top_k": 1}, [0, 1, 0, 0]),
        ({"top_k": 9}, [0.15, 0.5, 0.1, 0.25]),
        ({"top_p": 0.7}, [0, 2 / 3, 0, 1 / 3]),
        ({"top_p": 0.76}, [15 / 90, 50 / 90, 0, 25 / 90]),
        ({"top_p": 0.01}, [0, 1, 0, 0]),
        ({"min_p": 0.25}, [15 / 90, 50 / 90, 0, 25 / 90]),
        # top_p counts what top_k left: 0.5 / 0.75 = 0.67 >= 0.6, so one token stays
        ({"top_k": 2, "top_p": 0.6}, [0, 1, 0, 0]),
        ({"temperature": 0.5}, (np.array([0.15, 0.5, 0.1, 0.25]) ** 2 / 0.345).tolist()),
        ({"temperature": 0.0}, [0, 1, 0, 0]),
    ],
)
def test_sampled_frequencies(options, expected):
    count = 20000
    tokens, log_probs = draw(LOGITS, count, **options)
    share = np.bincount(tokens, minlength=4) / count
    # four standard errors of a share are 0.0141 at most
    np.testing.assert_allclose(share, expected, atol=0.0142)
    assert not share[np.asarray(expected) == 0].any()
    if options.get("temperature", 1.0) == 0:  # greedy: of the distribution at temperature 1
        expected = torch.tensor(LOGITS).softmax(-1).numpy()
    np.testing.assert_allclose(np.exp(log_probs), np.asarray(expected)[tokens], atol=1e-5)


def test_uniforms_are_uniform_and_keyed():
    u = uniforms(np.repeat(np.arange(100, dtype=np.uint64), 1000), np.tile(np.arange(1000, dtype=np.uint64), 100))
    assert u.min() >= 0 and u.max() < 1 and len(np.unique(u)) == len(u)
    assert abs(u.mean() - 0.5) < 4 / np.sqrt(12 * len(u))
    histogram = np.bincount((u * 16).astype(int), minlength=16)
    # chi-square with 15 degrees of freedom: 37.7 is its 99.9 % point
    assert ((histogram - len(u) / 16) ** 2 / (len(u) / 16)).sum() < 37.7


@pytest.mark.gpu
def test_cuda():
    model = copy.deepcopy(MODEL)
    asked = requests(20)
    expected = generate(make_engine(), asked)
    for a, b in zip(expected, generate(make_engine(model, device="cuda"), asked), strict=True):
        np.testing.assert_array_equal(a.ids, b.ids)
        np.testing.assert_allclose(a.log_probs, b.log_probs, atol=1e-3)
    # These random weights give logits of up to 10, of which bfloat16 keeps steps of 1/16.
    half = make_engine(model, device="cuda", dtype=torch.bfloat16)
    gaps = []
    for request, completion in zip(asked, generate(half, asked), strict=True):
        ids = np.concatenate([request.prompt_ids, completion.ids])
        gaps.append(np.abs(completion.log_probs - reference_log_probs(ids, len(request.prompt_ids))).mean())
    assert np.mean(gaps) < 0.1 and max(gaps) < 0.3
