import copy
import dataclasses
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from learning import random_rows, tiny_model

from manus_fast.agent.context import ChatFormat, Context
from manus_fast.agent.protocol import Protocol
from manus_fast.data.react import Step, demonstration_rows, keep_trainable, message_rows
from manus_fast.learn import offline
from manus_fast.learn.backend import BackendConfig, make_backend
from manus_fast.learn.offline import OfflineState
from manus_fast.learn.policy import Policy
from manus_fast.learn.sft import SFTConfig, train_sft
from manus_fast.modeling.tiny import make_tokenizer

ROWS = random_rows(8, seed=1)
SYSTEM = "You are in a room."
STEPS = [
    Step("You see a mug.", "I need it", "take mug 1"),
    Step("You take the mug.", "now the desk", "go to desk 1", trainable=False),
    Step("You arrive.", "put it down", "put mug 1 in/on desk 1"),
]


def chat_format():
    texts = [SYSTEM, "User Assistant System", *(f"{s.observation} {s.thought} {s.action}" for s in STEPS)]
    return ChatFormat(make_tokenizer(texts))


def trainer(config, seed=0, dtype="float32"):
    return make_backend(Policy(tiny_model(seed)), BackendConfig(), config.optimizer(), dtype)


def train(config, rows=ROWS, **options):
    backend = trainer(config)
    losses = []
    result = train_sft(backend, rows, config, on_step=lambda state, stats: losses.append(stats["sft/loss"]), **options)
    return backend, result, losses


def test_the_loss_is_cross_entropy_over_shifted_labels():
    """Against transformers' own shape of the loss: padded rows, labels -100 off the mask, one mean over all tokens."""
    model = tiny_model()
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("eager")
    longest = max(len(row) for row in ROWS)
    ids = torch.zeros(len(ROWS), longest, dtype=torch.int64)
    labels, seen = torch.full_like(ids, -100), torch.zeros_like(ids)
    for r, row in enumerate(ROWS):
        tokens = torch.from_numpy(row.token_ids)
        ids[r, : len(row)], seen[r, : len(row)] = tokens, 1
        labels[r, : len(row)] = torch.where(torch.from_numpy(row.loss_mask), tokens, -100)
    logits = plain(input_ids=ids, attention_mask=seen).logits
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
    _, _, losses = train(SFTConfig(epochs=1, batch_size=8))
    assert losses == [pytest.approx(expected.item(), abs=1e-4)]


def test_the_first_token_of_a_reply_and_its_end_token_are_trained_and_nothing_else():
    chat = chat_format()
    (row,) = demonstration_rows(chat, Protocol(), SYSTEM, STEPS)
    replies = [chat.reply(Protocol().render(s.thought, s.action)).tolist() for s in STEPS]
    for number, reply in enumerate(replies):
        trained = row.token_ids[row.turn_id == number].tolist()
        assert trained == (reply if STEPS[number].trainable else [])
        assert reply[-1] in chat.end_ids
    assert np.array_equal(row.loss_mask, row.turn_id >= 0)
    start = int(np.flatnonzero(row.loss_mask)[0])
    assert row.token_ids[:start].tolist() == chat.head(SYSTEM, STEPS[0].observation).tolist()
    # A model trained on the row alone gives the first token where the head ends.
    config = SFTConfig(epochs=40, batch_size=4, learning_rate=3e-3)
    model = tiny_model(vocabulary=len(chat.tokenizer))
    backend = make_backend(Policy(model), BackendConfig(), config.optimizer())
    train_sft(backend, [row] * 4, config)
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("eager")
    logits = plain(input_ids=torch.from_numpy(row.token_ids[None])).logits[0]
    for t in np.flatnonzero(row.loss_mask):
        assert int(logits[t - 1].argmax()) == row.token_ids[t]


def test_a_demonstration_reads_as_the_rollout_writes_it():
    """The prompts of play are prefixes of the row; a windowed context forks rows as play does."""
    chat, protocol = chat_format(), Protocol()
    (whole,) = demonstration_rows(Context(chat), protocol, SYSTEM, STEPS)
    talk = Context(chat).start(SYSTEM, STEPS[0].observation)
    for number, step in enumerate(STEPS):
        prompt = talk.prompt()
        assert whole.token_ids[: len(prompt)].tolist() == prompt.tolist()
        if number + 1 < len(STEPS):
            talk.add(chat.reply(protocol.render(step.thought, step.action)), STEPS[number + 1].observation)
    # With a window of one turn the third prompt no longer extends the second, so it starts a row.
    steps = [STEPS[0], STEPS[2], STEPS[1]]
    rows = demonstration_rows(Context(chat, "window", 1), protocol, SYSTEM, steps, episode=5)
    assert [sorted(set(row.turn_id.tolist())) for row in rows] == [[-1, 0, 1], [-1]]
    assert {row.episode for row in rows} == {5}
    kept, dropped = keep_trainable(rows)
    assert (len(kept), dropped) == (1, 1)


def test_messages_with_flags_become_rows():
    chat = chat_format()
    messages = [
        {"role": "user", "content": "You see"},
        {"role": "user", "content": "a mug."},
        {"role": "assistant", "content": "take mug 1", "trainable": False},
        {"role": "user", "content": "You arrive."},
        {"role": "assistant", "content": "go to desk 1"},
        {"role": "user", "content": "You take the mug."},
    ]
    (row,) = message_rows(chat, messages)
    assert chat.decode(row.token_ids[row.loss_mask]) == "go to desk 1"
    assert "You see\na mug." in chat.tokenizer.decode(row.token_ids)
    assert "You take" not in chat.tokenizer.decode(row.token_ids)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "user", "content": "hello"}], "expected at least one user message with a reply"),
        ([{"role": "assistant", "content": "hello"}], r"messages\[0\].role: .* got 'assistant' after the start"),
        ([{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}], r"messages\[1\].role: .* got 'tool'"),
        ([{"role": "user", "content": None}], r"messages\[0\].content: expected text, got None"),
    ],
)
def test_conversations_out_of_order_are_refused(messages, message):
    with pytest.raises(ValueError, match=message):
        message_rows(chat_format(), messages)


@pytest.mark.parametrize(("accumulation", "max_tokens"), [(2, None), (8, None), (1, 40)])
def test_micro_batches_leave_training_alone(accumulation, max_tokens):
    _, _, base = train(SFTConfig(epochs=3, batch_size=8, learning_rate=1e-2))
    config = SFTConfig(epochs=3, batch_size=8, learning_rate=1e-2, max_tokens=max_tokens)
    _, _, cut = train(config, gradient_accumulation_steps=accumulation)
    assert cut == pytest.approx(base, rel=2e-3)


def test_training_lowers_the_loss_in_both_precisions():
    config = SFTConfig(epochs=25, batch_size=4, learning_rate=5e-3)
    for dtype in ("float32", "bfloat16"):
        losses = []
        backend = trainer(config, dtype=dtype)
        train_sft(backend, ROWS, config, on_step=lambda _, stats, losses=losses: losses.append(stats["sft/loss"]))
        assert losses[-1] < 0.3 * losses[0]


def test_early_stop_counts_checks_and_restores_the_best_weights():
    scores = iter([0.1, 0.3, 0.3, 0.2, 0.25, 0.9])
    snapshots = []
    config = SFTConfig(epochs=50, batch_size=8, learning_rate=1e-2, eval_every=2, patience=3)
    backend = trainer(config)

    def evaluate():
        snapshots.append({name: weight.clone() for name, weight in backend.named_masters()})
        return next(scores)

    result = train_sft(backend, ROWS, config, evaluate=evaluate)
    assert (result.stopped, result.steps, result.best_step, result.best_score) == ("patience", 10, 4, 0.3)
    assert result.history == [(2, 0.1), (4, 0.3), (6, 0.3), (8, 0.2), (10, 0.25)]
    for name, weight in backend.named_masters():
        assert torch.equal(weight, snapshots[1][name])


def test_a_check_of_which_nothing_came_is_no_best():
    """Every episode of a panel failed: the first check, then a later one."""
    scores = iter([math.nan, 0.2, math.nan, 0.1])
    config = SFTConfig(epochs=50, batch_size=8, eval_every=1, patience=2)
    result = train_sft(trainer(config), ROWS, config, evaluate=lambda: next(scores))
    assert (result.stopped, result.steps, result.best_step, result.best_score) == ("patience", 4, 2, 0.2)
    for name in ("weight_decay", "max_grad_norm", "time_limit", "stop_at"):
        with pytest.raises(ValueError, match=f"sft.{name}: expected .*got nan"):
            SFTConfig(**{name: math.nan})


def test_imitation_stops_at_a_score():
    scores = iter([0.1, 0.6, 0.9])
    config = SFTConfig(epochs=50, batch_size=8, eval_every=2, patience=None, stop_at=0.5)
    result = train_sft(trainer(config), ROWS, config, evaluate=lambda: next(scores))
    assert (result.stopped, result.steps, result.best_step, result.best_score) == ("score", 4, 4, 0.6)


def test_without_a_rise_at_the_end_epochs_run_out_and_the_last_check_counts():
    scores = iter([0.1, 0.2])
    config = SFTConfig(epochs=3, batch_size=8, eval_every=2)
    _, result, losses = train(config, evaluate=lambda: next(scores))
    assert (result.stopped, result.steps, result.best_step) == ("epochs", 3, 3) and len(losses) == 3
    _, result, _ = train(SFTConfig(epochs=2, batch_size=8))
    assert (result.stopped, result.best_step, result.best_score) == ("epochs", 2, None)


def test_time_limit():
    _, result, losses = train(SFTConfig(epochs=1000, batch_size=8, time_limit=1e-6, patience=None))
    assert result.stopped == "time" and len(losses) == 1


def test_checks_count_towards_the_time_limit(monkeypatch):
    """A run that is compared with another by wall time gets no more of it for being validated often."""
    clock = [0.0]
    monkeypatch.setattr(offline.time, "perf_counter", lambda: clock[0])

    def evaluate():
        clock[0] += 10.0
        return 0.5

    config = SFTConfig(epochs=1000, batch_size=8, time_limit=25.0, eval_every=2, patience=None)
    _, result, _ = train(config, evaluate=evaluate)
    assert (result.stopped, [step for step, _ in result.history]) == ("time", [2, 4, 6])
    config = dataclasses.replace(config, check_start=True)
    result = train_sft(trainer(config), ROWS, config, evaluate=evaluate)
    assert [step for step, _ in result.history] == [0, 2, 4]


@pytest.mark.parametrize(("last", "kept"), [(0.4, 0), (0.5, 4)])
def test_where_all_is_worse_than_the_start_it_is_kept(last, kept):
    scores = iter([0.5, 0.4, last])
    config = SFTConfig(epochs=2, batch_size=4, eval_every=2, check_start=True, learning_rate=1e-2)
    backend, told = trainer(config), []
    start = {name: weight.clone() for name, weight in backend.named_masters()}
    result = train_sft(
        backend, ROWS, config, evaluate=lambda: next(scores),
        on_step=lambda state, stats: told.append((state.step, stats.get("sft/validation"))),
    )  # fmt: skip
    assert result.history == [(0, 0.5), (2, 0.4), (4, last)] and (result.best_step, result.steps) == (kept, 4)
    assert told == [(0, 0.5), (1, None), (2, 0.4), (3, None), (4, last)]
    same = [torch.equal(weight, start[name]) for name, weight in backend.named_masters()]
    assert all(same) if kept == 0 else not any(same)


def test_what_was_learnt_before_time_was_up_is_checked():
    config = SFTConfig(epochs=1000, batch_size=8, time_limit=1e-6, eval_every=50)
    _, result, _ = train(config, evaluate=lambda: 0.7)
    assert (result.stopped, result.history, result.best_step) == ("time", [(1, 0.7)], 1)


@pytest.mark.parametrize("cut", [3, 4, 8])
def test_resume_gives_the_losses_of_an_uninterrupted_run(cut):
    """Within an epoch of two steps, at the end of one, and after the last."""
    config = SFTConfig(epochs=4, batch_size=4, learning_rate=1e-2, eval_every=2, patience=None)
    _, whole, losses = train(config, evaluate=lambda: 0.5, seed=3)
    saved = {}

    class Stop(Exception):
        pass

    def stop(state, _):
        if state.step == cut:
            saved.update(
                scalars=copy.deepcopy(state.scalars()),
                best={n: t.clone() for n, t in state.best.items()},
                tensors={n: t.clone() for n, t in first.tensors().items()},
            )
            raise Stop

    first = trainer(config)
    with pytest.raises(Stop):
        train_sft(first, ROWS, config, evaluate=lambda: 0.5, seed=3, on_step=stop)
    second, rest = trainer(config, seed=9), []
    second.load(saved["tensors"])
    state = OfflineState.of(saved["scalars"], saved["best"])
    result = train_sft(
        second, ROWS, config, evaluate=lambda: 0.5, seed=3, state=state,
        on_step=lambda _, stats: rest.append(stats["sft/loss"]),
    )  # fmt: skip
    assert len(losses) == 8 and rest == losses[cut:]
    assert result.history == whole.history and result.best_step == whole.best_step


def test_what_is_saved_at_an_early_stop_is_gone_on_from_exactly():
    """The best check is the first and patience ends training at the third: the last step's weights are what belongs to
    the optimizer's state, so that a longer patience gives the losses of a run that had it from the start."""
    scores = {2: 0.5, 4: 0.4, 6: 0.3, 8: 0.2}

    def run(patience, backend, state, on_end=None):
        config, losses = SFTConfig(epochs=4, batch_size=4, learning_rate=1e-2, eval_every=2, patience=patience), []

        def note(state, stats):
            losses.append(stats["sft/loss"])

        result = train_sft(
            backend, ROWS, config, evaluate=lambda: scores[state.step], seed=3, state=state, on_step=note, on_end=on_end
        )
        return result, losses

    whole, losses = run(9, trainer(SFTConfig()), OfflineState())
    saved, first, state = {}, trainer(SFTConfig()), OfflineState()
    cut, before = run(2, first, state, lambda: saved.update({n: t.clone() for n, t in first.tensors().items()}))
    assert (cut.stopped, cut.steps, cut.best_step, whole.steps) == ("patience", 6, 2, 8)
    kept = first.tensors()
    assert any(not torch.equal(kept[name], tensor) for name, tensor in saved.items())  # the best check's, by then
    again = trainer(SFTConfig(), seed=9)
    again.load(saved)
    resumed, after = run(9, again, OfflineState.of(state.scalars(), state.best))
    assert before + after == losses and resumed.history == whole.history and resumed.best_step == 2


def test_refusals():
    with pytest.raises(ValueError, match=r"sft.batch_size: expected at most the 8 rows there are, got 16"):
        train(SFTConfig(batch_size=16))
    masked = copy.deepcopy(ROWS)
    for row in masked:
        row.loss_mask[:] = False
    for rows in ([], masked):
        with pytest.raises(ValueError, match=r"sft: expected at least one row with a trainable token"):
            train(SFTConfig(batch_size=1), rows)
    with pytest.raises(ValueError, match=r"sft.patience: expected null or a number above 0"):
        SFTConfig(patience=0)
    with pytest.raises(ValueError, match=r"sft.learning_rate: schedule.start"):
        SFTConfig(learning_rate=math.nan)
