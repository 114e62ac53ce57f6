"""What a turn's reward is made of: every part by hand, and what is refused."""

import math

import numpy as np
import pytest

from manus_fast.agent.trajectory import Trajectory, Turn
from manus_fast.envs.config import RewardConfig
from manus_fast.rewards.episode import EpisodeRewards, check_rewards, overlong_penalty
from manus_fast.rewards.functions import load_function
from manus_fast.rewards.shaping import TurnFacts, make_shape
from manus_fast.run_config import Config


def facts(**changes):
    return TurnFacts(
        **{
            **{"env_reward": 0.0, "success": False, "action": "go", "format_ok": True},
            **{"admissible": True, "excused": False},
            **changes,
        }
    )


SOLVED = facts(env_reward=1.0, success=True)
WRONG = facts(format_ok=False, admissible=False)


def test_the_defaults_pay_one_for_success_and_take_a_cent_a_step():
    shape = make_shape(RewardConfig())
    assert shape(SOLVED) == {"environment": 1.0, "step_penalty": -0.01}
    assert shape(WRONG) == {"environment": 0.0, "step_penalty": -0.01, "invalid_action": -0.1}
    assert shape(facts(admissible=False, excused=True)) == {"environment": 0.0, "step_penalty": -0.01}


def test_reward_config_is_added_as_written():
    shape = make_shape(RewardConfig(success_bonus=9.0, format_bonus=0.2, step_penalty=0.0, invalid_action_penalty=-0.5))
    assert shape(SOLVED) == {"environment": 1.0, "success": 9.0, "format": 0.2}
    assert shape(WRONG) == {"environment": 0.0, "invalid_action": -0.5}


def test_progress_pays_what_was_gained_and_takes_back_what_was_lost():
    shape = make_shape(RewardConfig(progress_bonus=2.0, step_penalty=0.0))
    assert shape(facts(progress=0.5)) == {"environment": 0.0, "progress": 1.0}
    assert shape(facts(progress=-0.5)) == {"environment": 0.0, "progress": -1.0}
    assert make_shape(RewardConfig(step_penalty=0.0))(facts(progress=0.5)) == {"environment": 0.0}


def test_the_rewards_block_weighs_its_parts_and_leaves_the_others():
    """environment counts only if it is named; what the block does not name stays as in reward_config."""
    shape = make_shape(RewardConfig(success_bonus=5.0), {"environment": 2.0, "format": 0.3, "step_penalty": 0.05})
    assert shape(SOLVED) == {"environment": 2.0, "success": 5.0, "format": 0.3, "step_penalty": -0.05}
    alone = make_shape(RewardConfig(step_penalty=0.0), {"success": 10.0})
    assert alone(SOLVED) == {"success": 10.0} and alone(facts(env_reward=0.5)) == {}


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ({"enviroment": 1.0}, r"rewards: expected environment, .* or module:function, got 'enviroment': did you mean "),
        ({"qqq": 1.0}, r"rewards: expected environment, .* or module:function, got 'qqq'$"),
        ({"format": math.inf}, r"rewards.format: expected a finite number, got inf"),
        ({"step_penalty": -0.01}, r"rewards.step_penalty: expected a weight >= 0"),
        ({"invalid_action": -1.0}, r"rewards.invalid_action: expected a weight >= 0"),
    ],
)
def test_bad_blocks_are_refused_in_one_sentence(rewards, message):
    with pytest.raises(ValueError, match=message) as caught:
        check_rewards(rewards)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=message):
        Config(rewards=rewards)


def test_reward_fn_is_short_for_one_part():
    config = Config.load(None, ["reward_fn=environment", "rewards.format=1"])
    assert config.rewards == {"environment": 1.0} and config.reward_fn is None
    assert Config.load(None, ["rewards={environment: 1, 'a.b:c': 0.5}"]).rewards == {"environment": 1.0, "a.b:c": 0.5}


def trajectory(*tokens, error=None):
    """An episode of turns with so many sampled tokens and a reward of 1 each."""
    turns, history = [], np.zeros(0, np.int32)
    for count in tokens:
        prompt, ids = np.append(history, np.int32(1)), np.full(count, 2, np.int32)
        turns.append(
            Turn(prompt, ids, np.zeros(count, np.float32), "stop", reward=1.0, reward_parts={"environment": 1.0})
        )
        history = np.concatenate([prompt, ids])
    return Trajectory("home/0/0", "", "", "", "", 0, 0, 0, turns=turns, terminated=True, error=error)


@pytest.fixture
def module(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_rewards.py").write_text(
        "import math\n"
        "LIMIT = 3\n"
        "def tokens(t): return t.sampled_tokens\n"
        "def each(t): return [len(turn.ids) for turn in t.turns]\n"
        "def lost(t): return None\n"
        "def nan(t): return math.nan\n"
        "def wrong(t): return [1.0]\n"
        "def text(t): return 'much'\n"
        "def breaks(t): return 1 / 0\n"
    )
    (tmp_path / "broken_rewards.py").write_text("import nothing_of_that_name\n")
    yield "my_rewards"
    import sys

    sys.modules.pop("my_rewards", None)


def test_a_function_of_the_user_judges_the_episode_or_each_turn(module):
    both = EpisodeRewards({f"{module}:tokens": 0.5, f"{module}:each": 2.0, "environment": 1.0})
    episode, failed = trajectory(2, 4), trajectory(3, error="the world broke")
    both([episode, failed])
    assert [turn.reward_parts for turn in episode.turns] == [
        {"environment": 1.0, f"{module}:each": 4.0},
        {"environment": 1.0, f"{module}:tokens": 3.0, f"{module}:each": 8.0},
    ]
    assert [turn.reward for turn in episode.turns] == [5.0, 12.0] and episode.reward == 17.0
    assert episode.reward_parts == {"environment": 2.0, f"{module}:tokens": 3.0, f"{module}:each": 12.0}
    assert failed.turns[0].reward == 1.0 and math.isnan(failed.reward)


@pytest.mark.parametrize("name", ["lost", "nan"])
def test_an_episode_that_cannot_be_judged_is_masked_not_worth_zero(module, name):
    episode = trajectory(2)
    EpisodeRewards({f"{module}:{name}": 1.0})([episode])
    assert not episode.valid and episode.error.startswith(f"reward {module}:{name}: expected a finite number")
    assert math.isnan(episode.reward) and episode.turns[0].reward == 1.0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wrong", r"rewards.my_rewards:wrong: expected a number or 2 numbers, one a turn, got \[1.0\]"),
        ("text", r"rewards.my_rewards:text: expected a number or 2 numbers, one a turn, got 'much'"),
        ("breaks", r"rewards.my_rewards:breaks: expected a number for home/0/0, got ZeroDivisionError: division by"),
    ],
)
def test_what_a_function_does_wrong_is_said(module, name, message):
    with pytest.raises(ValueError, match=message):
        EpisodeRewards({f"{module}:{name}": 1.0})([trajectory(2, 2)])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "my_rewards:tokenz",
            r"a function of my_rewards, got 'my_rewards:tokenz': did you mean 'my_rewards:tok",
        ),
        ("my_rewards:qqqqqq", r"got 'my_rewards:qqqqqq', which has no function 'qqqqqq'"),
        ("my_rewards:LIMIT", r"expected 'my_rewards:LIMIT' to be a function, got a int"),
        ("no_such_rewards:f", r"can be imported for 'no_such_rewards:f', got ModuleNotFoundError: No module named"),
        ("broken_rewards:f", r"can be imported for 'broken_rewards:f', got ModuleNotFoundError"),
        ("gone.py:f", r"can be imported for 'gone.py:f', got FileNotFoundError: no file gone.py"),
    ],
)
def test_a_function_that_is_not_there_is_one_sentence(module, name, message):
    with pytest.raises(ValueError, match=message) as caught:
        EpisodeRewards({name: 1.0})
    assert "\n" not in str(caught.value)


def test_a_function_in_a_file(module, tmp_path):
    assert load_function(f"{tmp_path / 'my_rewards.py'}:tokens")(trajectory(2, 3)) == 5


def test_a_reward_model_scores_the_last_row_of_each_episode():
    """The second episode's history was rewritten, so that it has two rows: the last one, with 3 tokens, counts."""
    seen = []

    def score(rows):
        seen.extend(rows)
        return np.asarray([len(row) for row in rows], np.float32)

    plain, forked, failed = trajectory(2, 4), trajectory(2, 2), trajectory(1, error="the world broke")
    forked.turns[1].prompt_ids = np.asarray([9], np.int32)
    EpisodeRewards({"reward_model": 0.5}, score)([failed, plain, forked])
    assert [row.episode for row in seen] == [1, 2]
    assert plain.turns[-1].reward_parts == {"environment": 1.0, "reward_model": 4.0}  # 1 + 2 + 1 + 4 tokens
    assert forked.turns[-1].reward_parts == {"environment": 1.0, "reward_model": 1.5}
    assert "reward_model" not in plain.turns[0].reward_parts


def test_a_reward_model_is_needed_and_has_to_answer_for_every_row():
    with pytest.raises(ValueError, match=r"rewards.reward_model: expected a reward model to score with, got none"):
        EpisodeRewards({"reward_model": 1.0})
    short = EpisodeRewards({"reward_model": 1.0}, lambda rows: np.zeros(1))
    with pytest.raises(ValueError, match=r"rewards.reward_model: expected scores \[2\], got \[1\]"):
        short([trajectory(1), trajectory(1)])
    short([trajectory(1, error="the world broke")])  # nobody to score: the model is not asked


def test_overlong_episodes_by_hand():
    """DAPO, equation 13, with a limit of 100 tokens and a buffer of 20: nothing up to 80, half at 90, all at 100."""
    for tokens, want in ((0, 0.0), (80, 0.0), (85, -0.25), (90, -0.5), (100, -1.0), (120, -1.0)):
        assert overlong_penalty(tokens, 100, 20, 1.0) == pytest.approx(want)
    assert overlong_penalty(90, 100, 20, 0.4) == pytest.approx(-0.2) and overlong_penalty(100, 100, 0, 1.0) == 0.0
    short, long = trajectory(40, 40), trajectory(50, 40)
    EpisodeRewards({}, None, (100, 20, 1.0))([short, long])
    assert "overlong" not in short.reward_parts
    assert long.turns[-1].reward_parts["overlong"] == pytest.approx(-0.5) and long.reward == pytest.approx(1.5)
