"""Two ranks on this machine against one process: the same gradients, the same weights, and no end without a name."""

import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from manus_fast.agent.trajectory import Turn
from manus_fast.data.packing import micro_batches, own_packs
from manus_fast.launch import launch
from manus_fast.ranks import Ranks, connect
from manus_fast.rollout.scheduler import RolloutStats

KINDS = ("ddp", "fsdp1", "fsdp2", "fsdp3")  # fsdp with its stage
WORKER = Path(__file__).with_name("ranks_worker.py")


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """What two ranks found, for every kind of backend."""
    file = tmp_path_factory.mktemp("ranks") / "result.json"
    before = dict(os.environ)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(WORKER.parent.parent), before.get("PYTHONPATH")]))
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        assert launch(2, [",".join(KINDS), str(file)], [sys.executable, str(WORKER)]) == 0
    finally:
        os.environ.clear()
        os.environ.update(before)
    return json.loads(file.read_text())


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_have_the_gradient_of_one_process(two_ranks, kind):
    """For several losses, micro-batches and packings, more ranks than rows included; statistics too."""
    cases = two_ranks[kind]["cases"]
    assert len(cases) == (2 if kind in ("fsdp1", "fsdp3") else 6)
    for name, found in cases.items():
        assert found["tensors"] > 10
        assert found["gradient"] < 1e-5, name
        assert found["statistics"] < 1e-3, name


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_take_the_steps_of_one_process_and_stay_equal(two_ranks, kind):
    """Clipping and weight decay included; ranks hold the same bits. AdamW's first steps are sign-like, so that
    bfloat16's rounding shows in a few of them."""
    found = two_ranks[kind]
    assert found["float32"]["weights"] < 2e-2
    assert found["bfloat16"]["weights"] < 0.2
    assert found["float32"]["spread"] == found["bfloat16"]["spread"] == 0.0


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_train_adapters_as_one_process_does(two_ranks, kind):
    """The reference being the ranks' own model with adapters off; merged weights come whole."""
    pytest.importorskip("peft")
    found = two_ranks[kind]["adapters"]
    assert found["weights"] < 2e-2 and found["merged"]
    # Rank 2 of seven matrices in each of two layers, of widths 32, 16 (keys and values) and 48; the value head.
    assert found["numbers"] == 2 * 2 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 48)) + 33


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_that_one_rank_sees_as_not_finite_stops_all_under_one_name(two_ranks, kind):
    told = two_ranks[kind]["bad_rank"]["told"]
    assert len(told) == 2 and told[0] == told[1]
    assert "log" in told[0] and two_ranks[kind]["bad_rank"]["skipped"] == 1


@pytest.fixture(autouse=True)
def short_grace(monkeypatch):
    """Seconds that the other ranks have to end by themselves: these never do."""
    monkeypatch.setattr("manus_fast.launch._GRACE", 0.3)


def run(source, capfd, ranks=2):
    """Exit code, standard error and seconds of a launch of `python -c source`."""
    started = time.monotonic()
    code = launch(ranks, [], [sys.executable, "-c", source])
    return code, capfd.readouterr().err, time.monotonic() - started


def test_a_killed_rank_ends_the_run_with_its_name(capfd):
    source = (
        "import os, signal, time\nif os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(90)"
    )
    code, text, seconds = run(source, capfd)
    assert code == 1 and seconds < 30
    assert text.startswith("manus-fast: rank 1 of 2 (process ") and "was killed by SIGKILL" in text


def test_a_failing_rank_is_named_with_its_last_line(capfd):
    source = "import os, time\nif os.environ['RANK'] == '1': raise RuntimeError('out of luck')\ntime.sleep(90)"
    code, text, _ = run(source, capfd)
    assert code == 1 and "rank 1 of 2" in text and "the last line: RuntimeError: out of luck" in text


def test_a_mistake_that_all_ranks_refuse_is_told_once(capfd):
    code, text, _ = run("import os, sys\nprint('manus-fast: no', file=sys.stderr)\nsys.exit(2)", capfd)
    assert code == 2 and text == "manus-fast: no\n"


def test_ranks_are_given_what_launchers_give(capfd):
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"]
    code = launch(1, [], [sys.executable, "-c", f"import os; print([os.environ[n] for n in {names}])"])
    shown = capfd.readouterr().out
    assert code == 0 and "['0', '0', '1', '1', '127.0.0.1', '" in shown


@pytest.mark.parametrize(("count", "size"), [(7, 3), (2, 4), (0, 2), (12, 1), (5, 5)])
def test_shares_cover_everything_once_in_order(count, size):
    shares = [list(Ranks(rank, size).share(count)) for rank in range(size)]
    assert [number for share in shares for number in share] == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("rows", [1, 2, 5, 16])
def test_ranks_have_equally_many_packs_and_every_row_counts_once(ranks, rows):
    lengths = np.random.default_rng(rows).integers(1, 50, rows)
    packs = micro_batches(lengths, max_tokens=60, multiple=ranks)
    own = [own_packs(packs, rank, ranks) for rank in range(ranks)]
    assert len({len(part) for part in own}) == 1
    counted = [row for part in own for pack, counts in part if counts for row in pack]
    assert sorted(counted) == list(range(rows))
    if rows % ranks == 0 or rows > 2 * ranks:
        assert all(counts for part in own for _, counts in part) and len(packs) % ranks == 0


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"WORLD_SIZE": "abc"}, "WORLD_SIZE: expected an integer from 1 to 1000000 from the launcher, got 'abc'"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE: expected an integer from 1"),
        ({"WORLD_SIZE": "²"}, "WORLD_SIZE: expected an integer from 1"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE: expected RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT from the launcher"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK: expected an integer from 0 to 1 from the launcher, got '2'"),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_PORT": "x"}, "MASTER_PORT: expected an integer from 1 to 65535"),
    ],
)
def test_variables_of_a_launcher_that_make_no_sense(monkeypatch, variables, message):
    rest = {"RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"} if len(variables) > 1 else {}
    for name, value in {**rest, **variables}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        connect()


def test_no_launcher_is_one_process(monkeypatch):
    for value in (None, "", "1"):
        monkeypatch.delenv("WORLD_SIZE", raising=False)
        if value is not None:
            monkeypatch.setenv("WORLD_SIZE", value)
        assert connect() == Ranks()


def test_a_run_of_one_process_needs_no_channel():
    ranks = Ranks()
    assert ranks.first and ranks.gather([1, 2]) == [1, 2] and ranks.of_first("x") == "x"
    ranks.wait()


def test_figures_of_ranks_are_joined():
    one = RolloutStats(episodes=3, sampled_tokens=100, seconds=2.0, engine_seconds=1.0)
    two = RolloutStats(episodes=5, sampled_tokens=300, seconds=4.0, engine_seconds=2.0)
    both = RolloutStats.joined([one, two])
    assert (both.episodes, both.sampled_tokens, both.seconds, both.engine_seconds) == (8, 400, 4.0, 1.5)
    assert both.tokens_per_second == 100.0


def test_a_turn_can_be_sent():
    """Ranks send each other pickled trajectories."""
    import pickle

    turn = Turn(np.arange(3, dtype=np.int32), np.arange(2, dtype=np.int32), np.zeros(2, np.float32), "stop")
    assert np.array_equal(pickle.loads(pickle.dumps(turn)).prompt_ids, turn.prompt_ids)
