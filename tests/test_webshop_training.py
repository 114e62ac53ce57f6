"""The shipped WebShop configs from end to end with a policy of a few thousand parameters: SFT, PPO, evaluation."""

import json

import pytest

from manus_fast.cli import main
from manus_fast.demo import make_small_policy
from manus_fast.player import make_environment
from manus_fast.run_config import Config

TINY = {"hidden": 16, "layers": 1, "heads": 2, "kv_heads": 1, "intermediate": 16}
SMALL = [
    "environment.options={mode: text, per_page: 2, num_products: 72, num_goals: 1560}", "environment.max_steps=6",
    "rollout.max_length=1024", "rollout.max_turn_tokens=8", "evaluation.tasks=2", "training.save_strategy=no",
    "agent.instructions=Shop.",
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MANUS_FAST_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    config = Config.load("configs/demo_webshop.yaml", SMALL)
    folder = tmp_path_factory.mktemp("policy") / "model"
    return make_small_policy(config, make_environment(config), folder, shape=TINY)


def test_sft_ppo_and_evaluation(policy, tmp_path, capsys):
    sft, ppo, ev = (str(tmp_path / name) for name in ("sft", "ppo", "eval"))
    more = ["data.demonstrations=8", "sft.batch_size=4", "data.expert=reader"]
    assert (
        main(["sft", "--config", "sft_webshop", "--model_path", str(policy), "--output_dir", sft, *SMALL, *more]) == 0
    )
    report = json.loads((tmp_path / "sft/eval.json").read_text())
    assert (report["suite"], report["split"], len(report["tasks"])) == ("webshop", "dev", 2)
    assert all(0 <= task["score"] <= 1 for task in report["tasks"])
    more = ["training.num_rollouts=4", "ppo.batch_size=4", "training.total_steps=10"]
    assert (
        main(["ppo", "--config", "ppo_webshop", "--model_path", f"{sft}/model", "--output_dir", ppo, *SMALL, *more])
        == 0
    )
    records = [json.loads(line) for line in (tmp_path / "ppo/metrics.jsonl").read_text().splitlines()]
    assert any("policy/loss" in record for record in records)
    assert main(["eval", "webshop", "--model_path", f"{ppo}/model", "--limit", "3", "--output_dir", ev]) == 0
    report = json.loads((tmp_path / "eval/eval.json").read_text())
    assert report["split"] == "test" and report["settings"]["nouns"] and report["settings"]["per_page"] == 2
    assert report["summary"]["score"] == pytest.approx(sum(task["score"] for task in report["tasks"]) / 3)
