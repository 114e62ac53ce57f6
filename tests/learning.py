"""Small models and random rows for the tests of `manus_fast.learn`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from manus_fast.agent.trajectory import Row
from manus_fast.envs.household import Household
from manus_fast.modeling.tiny import make_policy

VOCABULARY = 37

# Models this small run several times faster on one thread, all the more on a busy machine.
torch.set_num_threads(1)


def tiny_model(seed: int = 0, layers: int = 2, tied: bool = True, vocabulary: int = VOCABULARY) -> LlamaForCausalLM:
    """A float32 Llama of a few thousand weights."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).float()
        for parameter in model.parameters():  # larger than a fresh model's, so that distributions are not flat
            if parameter.dim() > 1:
                parameter.data.mul_(4.0)
    return model


def household_policy(folder: Path) -> Path:
    """Makes a folder with an untrained policy of a few thousand weights, which has words for what it sees in rooms."""
    environment = Household(max_steps=2, num_train=60, num_valid=4)
    batch = environment.make_batch(8)
    texts, _ = batch.reset(range(8), list(environment.tasks("train"))[:8], [0] * 8)
    words = [*texts, "Household. Think: find it\nAct: look", "Nothing happens."]
    shape = {"hidden": 32, "layers": 1, "heads": 2, "kv_heads": 1, "intermediate": 32}
    return make_policy(folder, words, max_length=512, **shape)


def random_rows(count: int, seed: int = 0, longest: int = 40, rows_per_episode: int = 1) -> list[Row]:
    """Rows of several turns with rewards and made-up sampled log-probabilities; the last turn ends the row."""
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        token_ids, mask, turns = [], [], []
        for turn in range(int(rng.integers(1, 4))):
            for width, flag in ((int(rng.integers(1, longest // 6 + 2)), False), (int(rng.integers(1, 6)), True)):
                token_ids += rng.integers(0, VOCABULARY, width).tolist()
                mask += [flag] * width
                turns += [turn if flag else -1] * width
        mask, turns = np.asarray(mask, bool), np.asarray(turns, np.int32)
        reward = np.zeros(len(mask), np.float32)
        ends = np.flatnonzero(mask & np.append(turns[1:] != turns[:-1], True))
        reward[ends] = rng.normal(size=len(ends)).astype(np.float32)
        rows.append(
            Row(
                token_ids=np.asarray(token_ids, np.int64),
                loss_mask=mask,
                turn_id=turns,
                log_prob=np.where(mask, rng.normal(-3.0, 0.3, len(mask)), 0.0).astype(np.float32),
                reward=reward,
                episode=number // rows_per_episode,
                terminated=bool(rng.integers(0, 2)),
            )
        )
    return rows
