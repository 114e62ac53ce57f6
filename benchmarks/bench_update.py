"""The update phase of PPO on a 1.5B-shaped Qwen2, against the same loop on plain transformers with an eager loss.

    python -m benchmarks.bench_update --json benchmarks/results/h200.json
    python -m benchmarks.bench_update --profile --only compiled     # the kernels that take the time

One update: score a collection under the old weights, turn-level GAE, one epoch of clipped PPO with a shared critic and
an entropy bonus, AdamW. Weights are random, bf16 for computing and float32 for masters, gradients' sums and moments;
micro-batches are packs of at most 8,192 tokens, an optimizer step takes four. A quarter of the tokens is trained.

The peer ("transformers eager") has the same loop, optimizer and packs; its rows are padded to the longest of a pack,
its attention is SDPA, logits of all positions reach memory, log-softmax and loss are eager PyTorch in float32.

Model FLOPs counted, for rows of L tokens of which M are trained, P weights in the layers' matrices:

    forward   2·P·L  +  2·L²·(heads · head size) per layer (causal: half of a full square)  +  2·M·H·V
    training  3 × forward

so neither recomputation nor padding, nor lm-head rows that no loss asks for, count. MFU = those FLOPs / time / the
chip's dense bf16 peak (H100 and H200: 989.4 TFLOP/s). Passes: "score": the old policy's log-probabilities, entropy and
values; "train": forward, backward and optimizer steps; "update": all of it, with what is between. "error": mean |Δ|
of the log-probabilities to the peer's, in nats.
"""

from __future__ import annotations

import contextlib
import sys
import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.profiler import ProfilerActivity
from torch.profiler import profile as profiler

from benchmarks import harness
from manus_fast.agent.trajectory import Row
from manus_fast.data.packing import PackedRows, pack
from manus_fast.learn.backend import BackendConfig, make_backend
from manus_fast.learn.losses import PPOConfig
from manus_fast.learn.policy import Policy, ScoreOutput
from manus_fast.learn.update import PolicyGradientUpdate
from manus_fast.ops import dispatch

PEAK_TFLOPS = {"NVIDIA H200": 989.4, "NVIDIA H100 80GB HBM3": 989.4}

QWEN2_1_5B = {
    "vocab_size": 151936, "hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12,
    "num_key_value_heads": 2, "intermediate_size": 8960, "max_position_embeddings": 32768, "tie_word_embeddings": True,
}  # fmt: skip
TINY = {
    "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 128, "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip


@dataclass
class Workload:
    """A collection to update on."""

    name: str
    rows: list[Row]
    pack_tokens: int
    rows_per_step: int


def workloads(quick: bool) -> list[Workload]:
    """Rows of one length, where padding costs the peer nothing, and rows of 1,024 to 3,072 tokens."""
    mean, pack_tokens, count, vocabulary = (2048, 8192, 32, 151936) if not quick else (64, 256, 8, 512)
    spread = np.linspace(0.5, 1.5, count)
    # A random order, as episodes end in; the same on every machine.
    ragged = np.random.default_rng(0).permutation((mean * spread / spread.mean()).astype(int))
    step = max(1, count // 2)
    return [
        Workload(f"{count} rows of {mean}", make_rows([mean] * count, vocabulary), pack_tokens, step),
        Workload(f"{count} rows, {ragged.min()}-{ragged.max()}", make_rows(ragged, vocabulary), pack_tokens, step),
    ]


def make_rows(lengths, vocabulary: int) -> list[Row]:
    """Random tokens in turns of 192 that are read and 64 that are trained; the last turn is rewarded."""
    rng = np.random.default_rng(1)
    rows = []
    for number, length in enumerate(map(int, lengths)):
        position = np.arange(length)
        mask = position % 256 >= 192 if length >= 256 else position >= length * 3 // 4
        turn = np.where(mask, position // 256, -1).astype(np.int32)
        reward = np.zeros(length, np.float32)
        reward[np.flatnonzero(mask)[-1]] = float(number % 2)
        log_prob = np.where(mask, -np.log(vocabulary), 0.0).astype(np.float32)
        ids = rng.integers(0, vocabulary, length)
        rows.append(Row(ids, mask, turn, log_prob, reward, episode=number, terminated=True))
    return rows


class PlainPolicy(Policy):
    """The peer: padded rows, SDPA, logits of every position, float32 log-softmax."""

    def __init__(self, model: nn.Module, critic: str = "none"):
        super().__init__(model, critic)
        model.set_attn_implementation("sdpa")

    def _score(self, packed: PackedRows, entropy: bool, value: bool, temperature: float) -> ScoreOutput:
        longest = packed.max_length
        place = packed.row * longest + packed.position_ids
        ids = torch.zeros(packed.rows * longest, dtype=torch.int64, device=packed.device)
        ids = ids.index_copy(0, place, packed.token_ids).view(packed.rows, longest)
        lengths = packed.cu_seqlens.diff()[:, None]
        seen = torch.arange(longest, device=packed.device)[None] < lengths
        # Without padding no mask is given, so that SDPA may take its fastest causal kernel.
        full = int(packed.lengths.min()) == longest
        hidden = self.model.base_model(
            input_ids=ids, attention_mask=None if full else seen.long(), use_cache=False
        ).last_hidden_state
        log_p = torch.log_softmax(self.model.lm_head(hidden)[:, :-1].float() / temperature, dim=-1)
        log_prob = log_p.gather(-1, ids[:, 1:, None]).squeeze(-1)
        entropies = -(log_p.exp() * log_p).sum(-1) if entropy else None
        values = self.value_head(hidden[:, :-1].float()).squeeze(-1) if value else None
        before = (packed.row * (longest - 1) + packed.position_ids - 1)[packed.trainable]

        def taken(x: torch.Tensor) -> torch.Tensor:
            zeros = torch.zeros(packed.tokens, dtype=x.dtype, device=x.device)
            return zeros.index_copy(0, packed.trainable, x.flatten()[before])

        last = None
        if value:
            ends = hidden[torch.arange(packed.rows, device=packed.device), lengths[:, 0] - 1]
            last = self.value_head(ends.float()).squeeze(-1)
        return ScoreOutput(
            log_prob=taken(log_prob),
            entropy=None if entropies is None else taken(entropies),
            value=None if values is None else taken(values),
            last_value=last,
        )


class TimedUpdate(PolicyGradientUpdate):
    """Keeps the seconds of the passes, waiting for the device around each; the peer's loss is the eager reference."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.seconds: dict[str, float] = {}
        self.eager_loss = isinstance(self.policy, PlainPolicy)

    def _timed(self, name, function, *arguments):
        _wait(self.policy.device)
        begin = time.perf_counter()
        result = function(*arguments)
        _wait(self.policy.device)
        self.seconds[name] = time.perf_counter() - begin
        return result

    def run(self, *arguments, **options):
        return self._timed("update", lambda: super(TimedUpdate, self).run(*arguments, **options))

    def _score(self, packed):
        stats = self._timed("score", super()._score, packed)
        self.log_prob = packed.old_log_prob
        return stats

    def _optimise(self, *arguments):
        with dispatch.forced("reference") if self.eager_loss else contextlib.nullcontext():
            return self._timed("train", super()._optimise, *arguments)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def model_flops(config, rows: list[Row]) -> float:
    """FLOPs of one forward pass, as the module's docstring counts them."""
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    weights = config.hidden_size * (2 * queries + 2 * keys + 3 * config.intermediate_size) * config.num_hidden_layers
    total = 0.0
    for row in rows:
        length, trained = len(row), int(row.loss_mask.sum())
        total += 2.0 * weights * length + 2.0 * length**2 * queries * config.num_hidden_layers
        total += 2.0 * trained * config.hidden_size * config.vocab_size
    return total


def make_model(shape: dict, device: str) -> nn.Module:
    """A Qwen2 with random weights in float32, the same for everybody."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        return Qwen2ForCausalLM(Qwen2Config(**shape)).float().eval()


def variants():
    """(name, from a model to its policy)."""
    yield "transformers eager", lambda model: PlainPolicy(model, "shared")
    yield "manus_fast", lambda model: Policy(model, "shared")
    yield "manus_fast compiled", lambda model: Policy(model, "shared", compile_layers=True)
    yield (
        "manus_fast compiled, checkpointing",
        lambda model: Policy(model, "shared", gradient_checkpointing=True, compile_layers=True),
    )


def main(argv=None) -> list[dict]:
    """Runs the benchmark; returns its rows."""
    words = list(sys.argv[1:] if argv is None else argv)
    arguments = harness.parse([word for word in words if word != "--profile"], "update")
    device, cuda = arguments.device, arguments.device == "cuda"
    quick = arguments.quick or not cuda
    report = harness.open_report(arguments, "update", (8192, 8960, 1536) if cuda else (256, 256, 256), at_once=False)
    expected: dict[str, torch.Tensor] = {}
    for name, policy_of in variants():
        if arguments.only not in name:
            continue
        policy = policy_of(make_model(TINY if quick else QWEN2_1_5B, device))
        backend = make_backend(policy, BackendConfig(), PPOConfig().optimizer(), "bfloat16")
        for number, case in enumerate(workloads(quick)):
            try:
                update = measure(report, case, name, policy, backend, expected)
            except torch.OutOfMemoryError as error:
                if not isinstance(policy, PlainPolicy):
                    raise
                # The peer then has no row for these packs; half of one usually fits.
                print(f"{name} on {case.name}: {str(error).splitlines()[0][:200]}", flush=True)
                backend.discard()
                torch.cuda.empty_cache()
                case.pack_tokens //= 2
                update = measure(report, case, f"{name}, packs of {case.pack_tokens}", policy, backend, expected)
            if "--profile" in words and number == 0:
                profile(update, case)
            del update
        del policy, backend
        if cuda:
            torch.cuda.empty_cache()
    report.save(arguments.json)
    return report.rows


def measure(report, case, name, policy, backend, expected) -> TimedUpdate:
    """Adds the rows of one variant on one workload: the median of three updates after one to warm up."""
    cuda = policy.device.type == "cuda"
    size = case.rows_per_step
    config = PPOConfig(advantage="turn", ent_coef=0.001, batch_size=size, max_tokens=case.pack_tokens)
    update = TimedUpdate(policy, backend, config)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    times: list[dict[str, float]] = []
    for number in range(4 if cuda else 2):
        # Learning rate 0: every kernel runs, and all variants keep the same weights to be compared on.
        stats = update.run(case.rows, iteration=number, progress=0.0, learning_rate=0.0)
        if stats["update/skipped_steps"] or stats["update/steps"] != len(case.rows) // size:
            raise RuntimeError(f"{name}: expected {len(case.rows) // size} optimizer steps, got {stats}")
        if number == 0:
            print(f"{name} on {case.name}: the first update took {update.seconds['update']:.1f} s", flush=True)
        else:
            times.append(dict(update.seconds))
    log_prob, mask = update.log_prob.cpu(), pack(case.rows).loss_mask
    error = float((log_prob - expected.setdefault(case.name, log_prob))[mask].abs().mean())
    peak_mib = torch.cuda.max_memory_allocated() / 2**20 if cuda else None
    peak = PEAK_TFLOPS.get(report.device)
    forward, tokens = model_flops(policy.model.config, case.rows), sum(len(row) for row in case.rows)
    for which, flops in (("score", forward), ("train", 3 * forward), ("update", 4 * forward)):
        seconds = float(np.median([t[which] for t in times]))
        figures = {"flops": flops, "peak_mib": peak_mib, "error": float(f"{error:.2e}")}
        row = report.add(case.name, name, which, seconds * 1e3, **figures)
        row["tokens_per_s"] = round(tokens / seconds)
        row["mfu"] = None if peak is None else round(flops / seconds / peak * 1e-10, 1)
        print(f"    {row['tokens_per_s']:,} tokens/s, MFU {row['mfu']} %", flush=True)
    return update


def profile(update: TimedUpdate, case: Workload) -> None:
    """Prints where the time of one more update goes, by kernel."""
    cuda = update.policy.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profiler(activities=activities) as recorded:
        update.run(case.rows, iteration=9, progress=0.0, learning_rate=0.0)
        _wait(update.policy.device)
    order = "self_cuda_time_total" if cuda else "self_cpu_time_total"
    print(recorded.key_averages().table(sort_by=order, row_limit=40, max_name_column_width=70), flush=True)


if __name__ == "__main__":
    main()
