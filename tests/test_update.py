import contextlib
import copy
import dataclasses
import math

import numpy as np
import pytest
import torch
from learning import random_rows, tiny_model

from manus_fast.agent.trajectory import Row
from manus_fast.learn import update as module
from manus_fast.learn.advantages import Episodes
from manus_fast.learn.backend import BackendConfig, SingleProcessBackend, make_backend
from manus_fast.learn.losses import PPOConfig
from manus_fast.learn.policy import Policy, Reference
from manus_fast.learn.update import PolicyGradientUpdate

FULL = {"kl_coef": 0.3, "ent_coef": 0.05, "vf_coef": 0.7, "gamma": 0.9, "lam": 0.8, "token_lam": 0.9}


class Recorder(SingleProcessBackend):
    """Keeps the gradients of every step and changes no weight."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.steps = []

    def step(self, lr, norm):
        self.steps.append({name: gradient.clone() for name, gradient in self.gradients().items()})
        self.discard()


def make_policy(config, noise=0.05):
    """A policy that has moved a little from a reference, with a critic that says something."""
    model = tiny_model()
    reference = Reference(Policy(copy.deepcopy(model)))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(noise * parameter.std() * torch.randn(parameter.shape, generator=generator))
    policy = Policy(model, critic=config.critic_kind)
    if policy.value_head is not None:
        with torch.no_grad():
            policy.value_head.weight.copy_(0.2 * torch.randn(policy.value_head.weight.shape, generator=generator))
    return policy, reference


def gradients(rows, config, accumulation=1, order=None, dtype="float32"):
    policy, reference = make_policy(config)
    backend = Recorder(policy, dtype=dtype)
    update = PolicyGradientUpdate(
        policy,
        backend,
        config,
        gradient_accumulation_steps=accumulation,
        reference=reference,
        temperature=0.8,
        correction="none",
    )
    rows = rows if order is None else [rows[i] for i in order]
    stats = update.run(rows, iteration=0, progress=0.0, learning_rate=0.0)
    assert len(backend.steps) == 1
    return backend.steps[0], stats


def naive_turn_gae(row, values, config):
    """Turn GAE by its definition, over lists: every turn's advantage at its last token, then inside the turn."""
    turns = [np.flatnonzero(row.turn_id == t) for t in sorted(set(row.turn_id[row.turn_id >= 0]))]
    advantage = np.zeros(len(row))
    future_value = future_advantage = 0.0
    for tokens in reversed(turns):
        last = tokens[-1]
        delta = row.reward[last] + config.gamma * future_value - values[last]
        advantage[last] = delta + config.gamma * config.lam * future_advantage
        future_value, future_advantage = values[last], advantage[last]
        for t, after in zip(tokens[-2::-1], tokens[:0:-1], strict=True):
            advantage[t] = (
                config.token_gamma * values[after]
                - values[t]
                + config.token_gamma * config.token_lam * advantage[after]
            )
    return advantage


def padded_gradients(rows, config, temperature=0.8):
    """The same gradient by other means: right-padded rows, full logits, every term written out, plain autograd."""
    policy, reference = make_policy(config)
    plain, frozen = copy.deepcopy(policy.model), reference._policy.model
    plain.set_attn_implementation("eager")
    frozen = copy.deepcopy(frozen)
    frozen.set_attn_implementation("eager")
    longest = max(len(row) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    seen, mask = torch.zeros_like(ids), torch.zeros(len(rows), longest, dtype=torch.bool)
    for r, row in enumerate(rows):
        ids[r, : len(row)] = torch.from_numpy(row.token_ids)
        mask[r, : len(row)] = torch.from_numpy(row.loss_mask)
        seen[r, : len(row)] = 1
    mask = mask[:, 1:]

    def forward(model):
        output = model(input_ids=ids, attention_mask=seen, output_hidden_states=True)
        log_probs = (output.logits[:, :-1] / temperature).log_softmax(-1)
        return log_probs, log_probs.gather(-1, ids[:, 1:, None]).squeeze(-1), output.hidden_states[-1][:, :-1]

    log_probs, log_prob, hidden = forward(plain)
    with torch.no_grad():
        ref = forward(frozen)[1]
    value = policy.value_head(hidden).squeeze(-1)
    advantage = torch.zeros_like(value)
    for r, row in enumerate(rows):
        values = np.concatenate([[0.0], value[r].detach().numpy()])
        advantage[r, : len(row) - 1] = torch.from_numpy(naive_turn_gae(row, values, config))[1:].float()
    returns = advantage + value.detach()
    chosen = advantage[mask]
    white = (advantage - chosen.mean()) / (chosen.var() + 1e-8).sqrt()
    old = log_prob.detach()
    ratio = (log_prob - old).exp()
    policy_term = torch.maximum(-white * ratio, -white * ratio.clamp(0.8, 1.2))
    gap = ref - log_prob
    kl = gap.exp() - gap - 1
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    total = policy_term + 0.7 * 0.5 * (value - returns) ** 2 + 0.3 * kl - 0.05 * entropy
    (total * mask).sum().div(mask.sum()).backward()
    result = {f"model.{name}": p.grad for name, p in plain.named_parameters()}
    result["value_head.weight"], result["value_head.bias"] = policy.value_head.weight.grad, policy.value_head.bias.grad
    return result


def assert_same(one, two, tolerance=2e-4):
    assert one.keys() == two.keys()
    for name, gradient in one.items():
        error = float((gradient - two[name]).norm() / (gradient.norm() + 1e-8))
        assert error <= tolerance, f"{name}: relative difference {error:.2e}"


ROWS = random_rows(12, seed=3)


def test_the_gradient_equals_an_independent_padded_implementation():
    config = PPOConfig(batch_size=12, **FULL)
    packed, _ = gradients(ROWS, config)
    assert_same(packed, padded_gradients(ROWS, config))


@pytest.mark.parametrize(
    ("accumulation", "max_tokens", "reverse"),
    [(2, None, False), (12, None, False), (1, 60, False), (1, None, True), (3, 25, True)],
)
@pytest.mark.parametrize(
    "options",
    [
        FULL,
        {"advantage": "token", "critic": "separate", "token_gamma": 0.95},
        {"aggregation": "seq-mean-token-mean", **FULL},
        {"advantage": "return", "ratio": "sequence", "aggregation": "seq-mean-token-mean", "kl_coef": 0.1},
    ],
    ids=["turn", "separate-critic", "sequence-mean", "sequence-ratio"],
)
def test_micro_batches_and_their_packing_leave_the_gradient_alone(options, accumulation, max_tokens, reverse):
    base, base_stats = gradients(ROWS, PPOConfig(batch_size=12, **options))
    config = PPOConfig(batch_size=12, max_tokens=max_tokens, **options)
    order = list(reversed(range(12))) if reverse else None
    cut, cut_stats = gradients(ROWS, config, accumulation, order)
    assert_same(base, cut)
    for name in ("policy/loss", "update/grad_norm"):
        assert cut_stats[name] == pytest.approx(base_stats[name], rel=1e-3, abs=1e-5)


def test_bfloat16_gradients_are_summed_in_float32():
    """Twelve micro-batches in bfloat16 come as close to the float32 gradient as one does."""
    config = PPOConfig(batch_size=12)
    exact, _ = gradients(ROWS, config)
    errors = []
    for accumulation in (1, 12):
        rough, _ = gradients(ROWS, config, accumulation, dtype="bfloat16")
        assert all(g.dtype == torch.float32 for g in rough.values())
        flat = [torch.cat([g[name].flatten() for name in exact]) for g in (exact, rough)]
        errors.append(float((flat[0] - flat[1]).norm() / flat[0].norm()))
    assert errors[1] <= 2 * errors[0] < 0.2


def test_bfloat16_keeps_float32_masters():
    """A step below bfloat16's resolution is not lost: masters move, and a hundred of them show in the weights."""
    policy = Policy(tiny_model())
    backend = make_backend(policy, BackendConfig(), dtype="bfloat16")
    before = {name: weight.clone() for name, weight in backend.named_masters()}
    name = "model.model.layers.0.mlp.up_proj.weight"
    weight = dict(policy.named_parameters())[name]
    start = weight.clone()
    for _ in range(100):
        (weight.float().sum() * 1.0).backward()
        backend.step(1e-5, backend.gradient_norm())
    masters = dict(backend.named_masters())
    assert weight.dtype == torch.bfloat16 and masters[name].dtype == torch.float32
    torch.testing.assert_close(masters[name], before[name] - 1e-3, atol=1e-5, rtol=0)
    assert torch.equal(weight, masters[name].bfloat16()) and not torch.equal(weight, start)


def run(config, rows, iterations=1, seed=0, learning_rate=1e-3, episodes=None, policy=None, **options):
    policy = policy or Policy(tiny_model(), critic=config.critic_kind)
    backend = make_backend(policy, BackendConfig(), config.optimizer())
    update = PolicyGradientUpdate(policy, backend, config, seed=seed, **options)
    for i in range(iterations):
        stats = update.run(rows, episodes, iteration=i, progress=i / iterations, learning_rate=learning_rate)
    return policy, stats, update


def test_tokens_of_another_policy_are_weighted():
    """Rows whose sampled log-probabilities are 0.5 below the policy's have weight e^0.5 on every policy term."""
    config = PPOConfig(batch_size=12, whiten=False)
    policy, rows = Policy(tiny_model(), critic="shared"), copy.deepcopy(ROWS)
    scored = policy.score_all(module.pack(rows)).log_prob.split([len(row) for row in rows])
    for row, log_prob in zip(rows, scored, strict=True):
        row.log_prob = np.where(row.loss_mask, log_prob.numpy() - 0.5, 0.0).astype(np.float32)
    losses = {}
    for mode in ("none", "token_truncate", "token_mask"):
        _, stats, _ = run(config, rows, learning_rate=0.0, policy=policy, correction=mode)
        losses[mode] = stats["policy/loss"]
        assert stats["correction/gap_mean"] == pytest.approx(0.5, abs=1e-4)
    assert losses["token_truncate"] == pytest.approx(math.exp(0.5) * losses["none"], rel=1e-3)
    assert losses["token_mask"] == pytest.approx(losses["token_truncate"], rel=1e-6)
    with pytest.raises(ValueError, match=r"rollout.correction: expected one of none, .*, got 'tis'"):
        run(config, rows, correction="tis")


def test_the_first_step_has_ratio_one_and_clips_nothing():
    _, stats, _ = run(PPOConfig(batch_size=12), ROWS)
    assert stats["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert stats["policy/clip_fraction"] == 0.0 and stats["update/steps"] == 1


def test_every_row_is_used_once_an_epoch_in_steps_of_about_batch_size():
    for rows, size, want in ((12, 4, 3), (13, 4, 3), (15, 4, 4), (5, 4, 1)):
        _, stats, _ = run(PPOConfig(batch_size=size, epochs=2), random_rows(rows))
        assert stats["update/steps"] == 2 * want


def test_same_seed_same_weights_other_seed_other_order():
    config = PPOConfig(batch_size=4)
    one, two, other = (run(config, ROWS, seed=seed)[0] for seed in (5, 5, 6))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_probability_moves_to_the_rewarded_token():
    """A two-armed bandit: token 3 earns 1, token 4 earns 0."""
    policy = Policy(tiny_model(), critic="shared")
    config = PPOConfig(batch_size=8, epochs=2, ent_coef=0.0)
    backend = make_backend(policy, BackendConfig(), config.optimizer())
    update = PolicyGradientUpdate(policy, backend, config)

    def share():
        logits = policy.score_all(module.pack(arms([3, 4]))).log_prob
        return float(torch.sigmoid(logits[1] - logits[3]))

    def arms(tokens):
        mask, turn = np.asarray([False, True]), np.asarray([-1, 0], np.int32)
        return [
            Row(np.asarray([1, t]), mask, turn, np.zeros(2, np.float32), np.asarray([0, t == 3], np.float32), e)
            for e, t in enumerate(tokens)
        ]

    before = share()
    for i in range(10):
        update.run(arms([3, 4] * 4), iteration=i, progress=i / 10, learning_rate=3e-3)
    assert share() > max(0.9, before)


def test_a_batch_larger_than_the_collection_is_refused_but_failed_episodes_count():
    config = PPOConfig(batch_size=16)
    with pytest.raises(ValueError, match=r"ppo.batch_size: expected at most the 12 rows that are collected, got 16"):
        run(config, ROWS)
    nothing = torch.zeros(0)
    episodes = Episodes(torch.zeros(16), torch.zeros(16).long(), nothing, nothing, nothing, nothing, nothing)
    assert run(config, ROWS, episodes=episodes)[1]["update/steps"] == 1
    with pytest.raises(ValueError, match=r"expected a multiple of"):
        run(PPOConfig(batch_size=8), ROWS, gradient_accumulation_steps=3)
    with pytest.raises(ValueError, match=r"policy: expected critic 'shared' for ppo.advantage 'turn', got 'none'"):
        run(PPOConfig(batch_size=8), ROWS, policy=Policy(tiny_model()))


def test_coefficient_zero_neither_loads_nor_runs_a_reference(monkeypatch):
    def refuse(*_):
        raise AssertionError("a reference was made")

    monkeypatch.setattr(module, "Reference", refuse)
    _, stats, update = run(PPOConfig(batch_size=12), ROWS)
    assert update.reference is None and "policy/ref_kl" not in stats


def test_kl_in_the_reward_is_the_log_ratio_of_each_token():
    """With gamma 1 and no critic, a token of the only turn gets the row's reward minus its KL from there on."""
    config = PPOConfig(batch_size=12, advantage="return", gamma=1.0, kl_coef=0.5, kl_in="reward")
    policy, reference = make_policy(config)
    update = PolicyGradientUpdate(policy, Recorder(policy), config, reference=reference)
    packed = module.pack(ROWS)
    plain = packed.reward.clone()
    update._score(packed)
    nothing = torch.zeros(0)
    episodes = Episodes(torch.ones(12), torch.zeros(12).long(), nothing, nothing, nothing, nothing, nothing)
    less, _ = update._reference_terms(packed, episodes, 0.5)
    gap = packed.old_log_prob - reference.log_prob(packed)
    torch.testing.assert_close(packed.reward, plain - 0.5 * gap * packed.loss_mask)
    assert gap.abs().max() > 0.01
    # Group advantages read an episode's reward: it is less by what its tokens are, row for row.
    by_row = torch.stack([part.sum() for part in (plain - packed.reward).split(list(packed.lengths))])
    torch.testing.assert_close(1.0 - less.reward, by_row)


def test_adaptive_kl_reacts_to_the_measured_kl():
    config = PPOConfig(batch_size=12, kl_coef=0.1, kl_target=1e-6, kl_horizon=120)
    policy, reference = make_policy(config)
    _, stats, update = run(config, ROWS, policy=policy, reference=reference)
    assert stats["policy/ref_kl"] != 0
    grows = stats["policy/ref_kl"] > 0
    assert update.kl.at(0.0) == pytest.approx(0.1 * (1.02 if grows else 0.98))
    assert update.state_dict()["kl"]["value"] == update.kl.at(0.0)


def test_target_kl_leaves_the_rest_of_an_update_out():
    config = PPOConfig(batch_size=4, epochs=5, target_kl=1e-4)
    _, stats, _ = run(config, ROWS, learning_rate=1e-2)
    assert stats["update/stopped_early"] == 1.0 and 1 <= stats["update/steps"] < 15


def test_sampled_log_probs_that_are_not_finite_drop_their_token_only():
    rows = copy.deepcopy(ROWS)
    rows[0].log_prob[np.flatnonzero(rows[0].loss_mask)[0]] = math.nan
    in_reward = {"kl_coef": 0.1, "kl_in": "reward"}
    for options in ({}, in_reward):
        config = PPOConfig(batch_size=12, bypass_old=True, **options)
        policy, reference = make_policy(config)
        _, stats, _ = run(config, rows, policy=policy, reference=reference)
        assert stats["policy/dropped_tokens"] == 1.0 and stats["update/skipped_steps"] == 0
    assert math.isfinite(stats["policy/ref_kl"]) and math.isfinite(stats["advantage/std"])


@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_sampled_log_probs_for_old_ones_give_the_same_step(critic):
    """Where the engine reports what the policy says, taking its word changes nothing; values are scored still."""
    rows = copy.deepcopy(ROWS)
    config = PPOConfig(batch_size=4, critic=critic)
    said = Policy(tiny_model()).score_all(module.pack(rows)).log_prob
    for row, log_prob in zip(rows, said.split([len(row) for row in rows]), strict=True):
        row.log_prob[:] = log_prob.numpy()
    scored, stats, _ = run(config, rows, learning_rate=1e-3)
    bypassed, others, _ = run(dataclasses.replace(config, bypass_old=True), rows, learning_rate=1e-3)
    for name, weight in scored.state_dict().items():
        torch.testing.assert_close(bypassed.state_dict()[name], weight, rtol=1e-4, atol=1e-6)
    assert others["policy/entropy"] == pytest.approx(stats["policy/entropy"], rel=0.02)
    assert "correction/gap_mean" in stats and "correction/gap_mean" not in others


def test_group_advantages_train_without_a_critic():
    episodes = Episodes(
        reward=torch.arange(12.0),
        group=torch.arange(12) // 4,
        turn_reward=torch.zeros(12),
        turn_penalty=torch.zeros(12),
        turn_episode=torch.arange(12),
        anchor=torch.zeros(12).long(),
        cu_turns=torch.arange(13).int(),
    )
    # A config's critic is for the advantages that need one.
    policy, stats, _ = run(PPOConfig(batch_size=12, advantage="grpo", critic="separate"), ROWS, episodes=episodes)
    assert policy.value_head is None and "critic/loss" not in stats and stats["update/grad_norm"] > 0


def test_rows_without_targets_are_left_out_and_counted():
    rows = copy.deepcopy(ROWS)
    rows[2].loss_mask[:] = False
    _, stats, _ = run(PPOConfig(batch_size=4), rows)
    assert stats["update/rows"] == 11 and stats["update/rows_without_targets"] == 1


def test_deepspeed_is_refused_in_one_sentence():
    with pytest.raises(ValueError, match=r"backend.kind: expected fsdp, .* got 'deepspeed'"):
        BackendConfig(kind="deepspeed")
    with pytest.raises(ValueError, match=r"backend.offload: expected backend.kind 'fsdp'"):
        BackendConfig(offload=True)
    with pytest.raises(ValueError, match=r"backend.offload: expected several ranks"):
        make_backend(Policy(tiny_model()), BackendConfig(kind="fsdp", offload=True))


class Adapted(torch.nn.Module):
    """What `Reference` relies on of a PEFT model: the base model, and a switch for what was added to it."""

    def __init__(self, base):
        super().__init__()
        self.base, self.config = base, base.config
        self.added = torch.nn.Parameter(torch.full_like(base.model.norm.weight, 0.5))
        self.off = False
        base.model.norm.register_forward_hook(lambda _m, _i, out: out if self.off else out + self.added)

    def get_base_model(self):
        return self.base

    @contextlib.contextmanager
    def disable_adapter(self):
        self.off = True
        yield
        self.off = False


def test_with_adapters_the_reference_is_the_model_with_adapters_off():
    """No copy is made, the reference stays where it was when the adapters move, and scoring turns them on again."""
    base = tiny_model()
    plain = Policy(copy.deepcopy(base)).score_all(module.pack(ROWS)).log_prob
    policy = Policy(Adapted(base))
    reference = Reference(policy)
    assert reference._policy is policy and reference.state_dict() == {}
    packed = module.pack(ROWS)
    torch.testing.assert_close(reference.log_prob(packed), plain)
    assert not policy.model.off and (policy.score_all(packed).log_prob - plain).abs().max() > 0.01
    with torch.no_grad():
        policy.model.added.add_(1.0)
    torch.testing.assert_close(reference.log_prob(packed), plain)


def test_a_kl_is_in_the_loss_or_in_the_reward_and_never_in_both():
    """The same policy and coefficient: in the loss the rewards stay, in the reward the loss has no KL term."""
    losses = {}
    for where in ("loss", "reward"):
        config = PPOConfig(batch_size=12, advantage="return", whiten=False, kl_coef=0.5, kl_in=where, clip="none")
        policy, reference = make_policy(config)
        update = PolicyGradientUpdate(policy, Recorder(policy), config, reference=reference)
        packed = module.pack(ROWS)
        update._score(packed)
        update._reference_terms(packed, None, 0.5)
        changed = not torch.equal(packed.reward, module.pack(ROWS).reward)
        losses[where] = (changed, config.loss_config(0.0, 0.5).kl_coef)
    assert losses == {"loss": (False, 0.5), "reward": (True, 0.0)}


def test_scheduled_coefficients_are_used_and_logged():
    config = PPOConfig(
        batch_size=12,
        ent_coef={"start": 0.2, "kind": "linear", "end": 0.1},
        kl_coef={"start": 0.4, "kind": "cosine", "warmup": 0.5},
    )
    policy, reference = make_policy(config)
    update = PolicyGradientUpdate(policy, Recorder(policy), config, reference=reference)
    seen = []
    for progress in (0.0, 0.25, 0.5, 0.75, 1.0):
        stats = update.run(ROWS, iteration=0, progress=progress, learning_rate=0.0)
        seen.append((stats["update/ent_coef"], stats["update/kl_coef"]))
    assert [e for e, _ in seen] == pytest.approx([0.2, 0.175, 0.15, 0.125, 0.1])
    assert [k for _, k in seen] == pytest.approx([0.0, 0.2, 0.4, 0.2, 0.0])
