"""Stages of a curriculum: what a block means, when a stage ends, and that a resumed run goes on where it was."""

import json

import pytest

from manus_fast.agent.trajectory import Trajectory, Turn
from manus_fast.config import from_mapping, to_dict
from manus_fast.learn.curriculum import Curriculum, CurriculumConfig, StageConfig
from manus_fast.run_config import Config


def played(*solved, turns=2, failed=0):
    """Episodes of two turns each, solved or not, and some that failed."""
    turn = Turn([], [], [], "stop")
    good = [Trajectory("", "", "", "", "", 0, 0, 0, turns=[turn] * turns, success=bool(s)) for s in solved]
    bad = [Trajectory("", "", "", "", "", 0, 0, 0, turns=[turn], error="x") for _ in range(failed)]
    return good + bad


def test_levels_and_rounds_are_short_for_stages():
    levels = CurriculumConfig(levels=[1, 2], success=0.7).resolved()
    assert levels == [StageConfig({"level": 1}, success=0.7), StageConfig({"level": 2}, success=0.7)]
    rounds = CurriculumConfig(rounds=[5, 10], steps=100).resolved()
    assert rounds == [StageConfig(max_steps=5, steps=100), StageConfig(max_steps=10, steps=100)]
    both = CurriculumConfig(levels=[1, 3], rounds=[5, 10], steps=100).resolved()
    assert both[1] == StageConfig({"level": 3}, max_steps=10, steps=100)
    assert CurriculumConfig().resolved() == []


def test_a_stage_of_its_own_limits_keeps_them():
    config = from_mapping(
        CurriculumConfig, {"stages": [{"max_steps": 3, "steps": 7}, {"max_steps": 9}], "success": 0.5}
    )
    assert [(s.steps, s.success) for s in config.resolved()] == [(7, None), (None, 0.5)]
    assert from_mapping(CurriculumConfig, to_dict(config)) == config


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"levels": [1, 2]}, "curriculum: expected success or steps to end stage 1, got neither"),
        ({"stages": [{"steps": 5}, {}, {}]}, "curriculum: expected success or steps to end stage 2, got neither"),
        ({"levels": [1, 2], "rounds": [5], "steps": 9}, r"curriculum.rounds: expected as many as .* \(2\), got 1"),
        ({"levels": [1], "stages": [{}]}, "curriculum.stages: expected either stages, or levels and rounds, got both"),
        ({"rounds": [0, 5], "steps": 9}, "curriculum.max_steps: expected null or an integer >= 1, got 0"),
        ({"levels": [1, 2], "success": 70}, r"curriculum.success: expected null or a share in \(0, 1\], got 70"),
        ({"levels": [1, 2], "steps": 0}, "curriculum.steps: expected null or an integer >= 1, got 0"),
        ({"window": 0}, "curriculum.window: expected an integer >= 1, got 0"),
        ({"stages": [{"level": 2}]}, "unknown key"),
    ],
)
def test_bad_blocks_are_refused_in_one_sentence(block, message):
    with pytest.raises(ValueError, match=message) as caught:
        from_mapping(Config, {"curriculum": block})
    assert "\n" not in str(caught.value)


def test_without_stages_nothing_changes():
    curriculum = Curriculum(CurriculumConfig())
    assert curriculum.stage is None and not curriculum.observe(played(1)) and curriculum.metrics() == {}
    curriculum.load_state_dict(curriculum.state_dict())


def test_success_over_a_full_window_begins_the_next_stage():
    """A window of 4 and a threshold of 0.75: three of the last four. Failed episodes are no failures of the agent."""
    curriculum = Curriculum(CurriculumConfig(levels=[1, 2, 3], success=0.75, window=4))
    assert not curriculum.observe(played(1, 1, 1)) and curriculum.success is None
    assert not curriculum.observe(played(0, 0, failed=3)) and curriculum.success == 0.5  # 1, 1, 0, 0
    assert not curriculum.observe(played(1, 1)) and curriculum.success == 0.5  # 0, 0, 1, 1
    assert curriculum.observe(played(1)) and curriculum.stage.options == {"level": 2}  # 0, 1, 1, 1
    assert curriculum.success is None and curriculum.steps == 0  # a stage starts with an empty window
    assert curriculum.observe(played(1, 1, 1, 1)) and curriculum.stage.options == {"level": 3}
    assert not curriculum.observe(played(1, 1, 1, 1)) and curriculum.index == 2  # the last one stays


def test_environment_steps_begin_the_next_stage_failed_episodes_included():
    curriculum = Curriculum(CurriculumConfig(rounds=[5, 10], steps=10))
    assert not curriculum.observe(played(0, 0, 0, 0)) and curriculum.steps == 8
    assert curriculum.metrics() == {"curriculum/stage": 1.0, "curriculum/steps": 8.0}
    assert curriculum.observe(played(0, failed=1)) and curriculum.stage.max_steps == 10


def test_whichever_comes_first():
    config = CurriculumConfig(levels=[1, 2], success=1.0, steps=100, window=2)
    assert Curriculum(config).observe(played(1, 1))
    slow = Curriculum(config)
    assert sum(slow.observe(played(0, 0)) for _ in range(25)) == 1 and slow.index == 1  # 25 · 4 steps


def test_a_restored_curriculum_goes_on_as_the_first_would_have():
    config = CurriculumConfig(levels=[1, 2], success=0.75, window=4)
    first, second = Curriculum(config), Curriculum(config)
    first.observe(played(0, 1, 1))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.steps == first.steps == 6 and second.metrics() == first.metrics()
    assert first.observe(played(1)) and second.observe(played(1)) and first.state_dict() == second.state_dict()
    with pytest.raises(ValueError, match=r"curriculum: expected the 2 stages that the checkpoint had reached, got 1"):
        Curriculum(CurriculumConfig(levels=[1])).load_state_dict(first.state_dict())
