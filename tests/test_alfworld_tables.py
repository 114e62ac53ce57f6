"""Tables of a language model that learns ALFWorld, from a made-up record."""

from benchmarks import alfworld_tables


def record():
    def panel(success):
        return {"split": "valid_unseen", "tasks": 140, "success": success, "low": success - 0.1, "high": success + 0.1,
                "types": {"pick": success, "heat": 0.25}}  # fmt: skip

    curve = [{"seconds": 10.0 * n, "steps": 1000 * n, "tokens": 500.0 * n, "success": 0.1 * n, "turns": 20.0 - n,
              "valid_actions": 0.9, "entropy": 0.5, "repeats": 0.3, "kl": 2e-4, "gap_mean": 0.001 * n}
             for n in range(1, 9)]  # fmt: skip
    curve[5]["panel"] = 0.65
    part = {"algorithm": "gigpo", "iterations": 8, "episodes": 1024.0, "seconds": 80.0, "tokens": 4000.0,
            "curve": curve,
            "shares": dict.fromkeys(alfworld_tables.PHASES, 0.125) | {"generation": 0.375}, "idle_share": 0.25,
            "trajectories_per_hour": 46080.0, "sampled_tokens_per_s": 9000.4, "rollout_tokens_per_s": 8000.0,
            "update_tokens_per_s": 70000.0, "hand_over_ms": 9.14, "peak_mib": 2048.0, "seconds_to": {"0.6": 70.0},
            "panel": panel(0.8), "sampled": panel(0.75)}  # fmt: skip
    sft = {"step": 50, "rows": 990, "seconds": 31.7, "tokens": 700_000.0, "panel": panel(0.5), "sampled": panel(0.4)}
    parts = {
        "before": {"panel": panel(0.1)},
        "sft": sft,
        "ours": part,  # an early record: under its variant alone
        "gigpo-lockstep": {**part, "variant": "lockstep", "seconds_to": {"0.6": None}},
        "ppo-short": {**part, "algorithm": "ppo", "variant": "short"},
    }
    return {
        "device": "GPU",
        "command": "python x",
        "note": "A note.",
        "parameters": 135e6,
        "seconds": 540.0,
        "parts": parts,
    }


def test_the_panel_before_between_and_after():
    lines = alfworld_tables.learned([record()])
    assert "of 135 million parameters" in lines[0] and "at most 9.0 minutes" in lines[1]
    assert lines[2].startswith("(`python x …`") and lines[6] == "A note."
    assert "| as it came | 10.0 (0.0 to 20.0) | | | |" in lines
    assert (
        "| SFT, 50 steps on 990 episodes | 50.0 (40.0 to 60.0) | 40.0 (30.0 to 50.0) | 32 | 700,000 trained |" in lines
    )
    solved = "80.0 (70.0 to 90.0), +30.0 | 75.0 (65.0 to 85.0), +35.0"
    run = f"| then {{}}, 8 iterations, 1,024 episodes | {solved} | 80 | 4,000 sampled |"
    for name in ("gigpo", "gigpo, with a barrier each turn", "ppo, short"):
        assert run.format(name) in lines


def test_several_records_each_have_their_imitation():
    lines = alfworld_tables.learned([record(), {**record(), "seconds": 600.0}])
    assert sum("SFT, 50 steps" in line for line in lines) == 2 and "at most 10.0 minutes" in lines[1]
    assert (
        alfworld_tables.types([record(), record()])[2].count(
            "| SFT | SFT, sampled | gigpo | gigpo, sampled | gigpo, with"
        )
        == 2
    )


def test_a_run_that_was_cut_has_no_panel_yet():
    cut = record()
    del (
        cut["parts"]["ours"]["panel"],
        cut["parts"]["ours"]["sampled"],
        cut["parts"]["gigpo-lockstep"],
        cut["parts"]["ppo-short"],
    )
    assert not any("then" in line for line in alfworld_tables.learned([cut]))
    assert alfworld_tables.types([cut])[2] == "| | as it came | SFT | SFT, sampled |"


def test_kinds_of_tasks_and_times():
    assert "| pick | 10 | 50 | 40 | 80 | 75 | 80 | 75 | 80 | 75 |" in alfworld_tables.types([record()])
    lines = alfworld_tables.rates([record()])
    for line in ("| | gigpo | gigpo, with a barrier each turn | ppo, short |", "| generation | 37.5 | 37.5 | 37.5 |",
                 "| **idle** | **25.0** | **25.0** | **25.0** |",
                 "| sampled tokens/s, inside the engine | 9,000 | 9,000 | 9,000 |",
                 "| largest memory of tensors, GiB | 2.0 | 2.0 | 2.0 |",
                 "| seconds to 60 % | 70 | – | 70 |"):  # fmt: skip
        assert line in lines


def test_a_curve_is_the_means_of_stretches_of_equal_length():
    lines = alfworld_tables.curves([record()], points=4)
    rows = [line for line in lines if line[:3] in ("| 2", "| 4", "| 6", "| 8")]
    assert rows[0] == "| 20 | 2,000 | 1,000 | 15.0 | 18.5 | 90.0 | 30 | 0.50 | 2.0 |  |  |"
    assert rows[2] == "| 60 | 6,000 | 3,000 | 55.0 | 14.5 | 90.0 | 30 | 0.50 | 2.0 |  | 65.0 |"
    assert len(rows) == 12  # four a run


def test_a_peer_that_tells_less_leaves_cells_empty():
    peer = record()
    part = peer["parts"]["gigpo-lockstep"]
    part["shares"] = {"generation": 0.5, "update": 0.5}
    del part["update_tokens_per_s"], part["peak_mib"]
    lines = alfworld_tables.rates([peer])
    assert "| log-prob | 12.5 |  | 12.5 |" in lines and "| tokens/s of the update | 70,000 |  | 70,000 |" in lines
    assert "| largest memory of tensors, GiB | 2.0 |  | 2.0 |" in lines


def test_engines_and_episodes_played_again():
    ms = {"load": 1297.2, "reset": 575.76, "step": 52.08}
    lines = alfworld_tables.engines({"engine": "textworld 1", "ms": {"stock": ms, "memoised": ms, "native": ms}})
    assert "| TextWorld | 1297.20 | 576 | 52.1 |" in lines and lines[2].endswith("52 ms a step")
    row = {"policy": "gigpo-ours", "split": "valid_unseen", "engine": "textworld 1", "games": 140, "steps": 2500,
           "different_answers": 0, "different_outcomes": 0, "success": 0.85, "success_native": 0.85}  # fmt: skip
    assert "| gigpo-ours | valid_unseen | 140 | 2,500 | 0 | 0 | 85.0 | 85.0 |" in alfworld_tables.replayed([row])


def test_the_distance_of_sampler_and_trainer_is_that_of_all_iterations():
    (row,) = [line for line in alfworld_tables.rates([record()]) if line.startswith("| log-prob, sampled")]
    assert row.count("0.0045") == 3


def test_windows_tell_what_the_machine_changed():
    first, second, slow = (
        {"algorithm": "gigpo", "variant": variant, "sampled_tokens_per_s": rate, "seconds": 100.0, "episodes": 1000}
        | {"shares": {"generation": share}, "curve": [{"seconds": seconds}]}
        for variant, rate, share, seconds in (
            ("ours", 8000.0, 0.6, 9.0),
            ("reference", 10000.0, 0.5, 8.04),
            ("textworld", 100.0, 0.1, 40.0),
        )
    )
    peer = {"parts": {"trl": {**first, "algorithm": "grpo", "variant": "TRL", "shares": {"generation": 0.2}}}}
    text = "\n".join(alfworld_tables.windows({"parts": {"a": first, "b": second, "c": slow}}, [peer]))
    assert "the first 2 columns are alike" in text and "changed by 25 %" in text and "took 9.0, 8.0 s" in text
    assert "an episode: gigpo 40.0; gigpo, reference ops 50.0; grpo, TRL 80.0." in text
