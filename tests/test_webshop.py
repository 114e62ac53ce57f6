"""The shop: pages by hand, random walks that stay inside, clones, and an expert that buys what is wanted."""

import random

import pytest

from manus_fast import envs
from manus_fast.envs.base import EnvBatch


@pytest.fixture(scope="module")
def shop():
    return envs.make("webshop")


def test_splits_by_goal_number(shop):
    assert [len(shop.tasks(s)) for s in ("test", "dev", "train")] == [500, 1000, 2000]
    assert [shop.tasks(s)[0].data["goal"] for s in ("test", "dev", "train")] == [0, 500, 1500]
    with pytest.raises(ValueError, match="split"):
        shop.tasks("valid")
    for options in ({"mode": "pdf"}, {"num_goals": 10}, {"max_steps": 0}, {"backend": "java"}):
        with pytest.raises(ValueError, match=next(iter(options))):
            envs.make("webshop", **options)


@pytest.mark.parametrize("mode", ["html", "text", "text_rich", "url"])
def test_expert_buys_with_full_score_in_every_mode(mode):
    environment = envs.make("webshop", mode=mode)
    tasks = environment.tasks("test")[:50]
    batch = environment.make_batch(50)
    assert isinstance(batch, EnvBatch)
    texts, _ = batch.reset(range(50), tasks, [0] * 50)
    assert len(set(texts)) == 50
    live, scores = list(range(50)), {}
    while live:
        _, rewards, terminated, truncated, infos = batch.step(live, batch.expert(live)[0])
        for slot, score, info in zip(live, rewards, infos, strict=True):
            scores[slot] = score
            assert info["success"] == (score == 1)
        live = [s for s, over in zip(live, terminated | truncated, strict=True) if not over]
    assert list(scores.values()) == [1.0] * 50


def test_pages_by_hand(shop):
    batch = shop.make_batch(2)
    (text,), (info,) = batch.reset([0], shop.tasks("test")[:1], [0])
    assert text.startswith("WebShop [SEP] Instruction: [SEP] Find me ") and text.endswith(" [SEP] Search")
    assert "search[x]" in info["admissible"] and "click[buy now]" not in info["admissible"]
    (text,), *_, (info,) = batch.step([0], ["search[lamp]"])
    assert "Page 1 (Total results: 50)" in text and "click[< prev]" not in info["admissible"]
    assert len([c for c in info["admissible"] if c.startswith("click[b0")]) == 10
    before = batch.save(0)
    assert len(before) < 1024
    (same,), rewards, *_ = batch.step([0], ["click[no such thing]"])
    assert same == text and rewards[0] == 0
    for _ in range(6):  # beyond the last page nothing blocks
        (text,), *_ = batch.step([0], ["click[Next >]"])
    assert "Page 7 (Total results: 50)" in text
    batch.restore(1, before)
    (text,), *_ = batch.step([1], ["click[next >]"])
    assert "Page 2 (Total results: 50)" in text


def test_random_walks_stay_in_the_shop_and_clones_agree():
    environment = envs.make("webshop", max_steps=30)
    rng = random.Random(0)
    batch = environment.make_batch(2)
    for task in environment.tasks("train")[:40]:
        _, infos = batch.reset([0], [task], [0])
        over = False
        while not over:
            choices = [*infos[0]["admissible"], f"search[{rng.choice(('lamp', 'red', 'zzz', '!'))}]", "dance"]
            action = rng.choice(choices)
            batch.clone(0, 1)
            texts, rewards, terminated, truncated, infos = batch.step([0, 1], [action, action])
            assert texts[0] and texts[0] == texts[1] and 0 <= rewards[0] <= 1 and rewards[0] == rewards[1]
            over = bool(terminated[0] or truncated[0])
