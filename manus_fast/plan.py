"""How much memory a training run takes on each GPU, part by part, and what to change where it does not fit.

    shape = Shape.of(json.loads(Path("model/config.json").read_text()))
    load = Load(dtype="bfloat16", tokens=8192, slots=64, length=4096)
    parts(shape, load)                            # {"weights": bytes, "gradients": …, …}
    remedies(shape, load, capacity=80 * GIB)      # what to change, in the order in which it costs least

Arithmetic from the model's config alone: nothing is loaded and no GPU is asked. An estimate counts what lives at the
fullest moment, the end of a forward pass; allocators and kernels take some more, for which a run should leave a tenth.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

GIB = 1 << 30
SHARE = 0.9
"""Of a GPU's memory that a plan may fill."""

_FP32 = 4
_CACHE_BLOCK = 32  # the slot cache rounds lengths up to a multiple of this


@dataclass(frozen=True)
class Shape:
    """What of a decoder's config decides its size: the Llama family (Llama, Mistral, Qwen2, Qwen3, SmolLM2, …)."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied: bool = True
    """Whether the output matrix is the embedding."""
    attention_bias: bool = False
    """Biases of queries, keys and values."""
    head_norms: bool = False
    """Norms of queries and keys (Qwen3)."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Shape:
        """Reads a Hugging Face `config.json`.

        Raises:
            ValueError: a key that such decoders have is missing, or a mixture of experts.
        """
        config = config.get("text_config", config)
        kind = str(config.get("model_type", ""))
        needed = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
        missing = [key for key in needed if config.get(key) is None]
        experts = [key for key in ("num_experts", "num_local_experts", "n_routed_experts") if config.get(key)]
        if missing or experts:
            found = f"no {missing[0]}" if missing else f"a mixture of {config[experts[0]]} experts"
            raise ValueError(f"config.json: expected a dense decoder of the Llama family, got {found} ({kind!r})")
        heads = int(config["num_attention_heads"])
        return cls(
            hidden=int(config["hidden_size"]),
            layers=int(config["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or int(config["hidden_size"]) // heads),
            intermediate=int(config["intermediate_size"]),
            vocabulary=int(config["vocab_size"]),
            tied=bool(config.get("tie_word_embeddings", False)),
            attention_bias=bool(config.get("attention_bias", kind == "qwen2")),
            head_norms=kind.startswith("qwen3"),
        )

    @property
    def layer_parameters(self) -> int:
        """Of one decoder layer: four attention matrices, three of the gated MLP, norms."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = 2 * self.hidden * queries + 2 * self.hidden * keys
        biases = queries + 2 * keys if self.attention_bias else 0
        norms = 2 * self.hidden + (2 * self.head_dim if self.head_norms else 0)
        return attention + biases + 3 * self.hidden * self.intermediate + norms

    def adapter_parameters(self, rank: int, names: Sequence[str] | None = None) -> int:
        """Of low-rank adapters on the linear layers `names`, or on all of them: rank · (width in + width out) each."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        widths = {
            "q_proj": self.hidden + queries,
            "k_proj": self.hidden + keys,
            "v_proj": self.hidden + keys,
            "o_proj": queries + self.hidden,
            **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), self.hidden + self.intermediate),
        }
        return self.layers * rank * sum(width for name, width in widths.items() if names is None or name in names)

    @property
    def trunk_parameters(self) -> int:
        """Embedding, layers and the last norm."""
        return self.vocabulary * self.hidden + self.layers * self.layer_parameters + self.hidden

    @property
    def parameters(self) -> int:
        return self.trunk_parameters + (0 if self.tied else self.vocabulary * self.hidden)

    def layer_activations(self, dtype_bytes: int) -> int:
        """Bytes a token that one layer keeps for its backward pass, attention computed without its score matrix.

        Two norms: their input and its normalised form (both float32 inside) and what goes on to a matrix product;
        queries, keys and values; attention's output and log-sum-exp; gate, up, SiLU(gate) and their product.
        """
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        norms = 2 * self.hidden * (_FP32 + 2 * dtype_bytes)
        attention = dtype_bytes * (2 * queries + 2 * keys) + _FP32 * self.heads
        return norms + attention + dtype_bytes * 4 * self.intermediate


@dataclass(frozen=True)
class Load:
    """What is asked of the model: how it is trained, on how many GPUs, and what it plays beside that."""

    dtype: str = "bfloat16"
    tokens: int = 8192
    """Of one micro-batch."""
    slots: int = 64
    """Episodes at the same time on one GPU, each with a key/value cache of `length` tokens."""
    length: int = 4096
    critic: str = "none"
    """none | shared | separate."""
    reference: bool = False
    """Whether a frozen copy is held for a KL term."""
    adapters: int | None = None
    """Parameters of low-rank adapters, which then train in place of the policy's weights; they need no reference."""
    gradient_checkpointing: bool = False
    ranks: int = 1
    zero_stage: int = 0
    """What ranks divide: 0 nothing, 1 the optimizer's state and the masters, 2 gradients too, 3 weights too."""
    offload: bool = False
    """Whether the divided state (masters, moments, gradients) lives in host memory."""

    def __post_init__(self) -> None:
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype: expected float32 or bfloat16, got {self.dtype!r}")
        if self.zero_stage not in (0, 1, 2, 3):
            raise ValueError(f"zero_stage: expected 0, 1, 2 or 3, got {self.zero_stage!r}")
        for name in ("tokens", "slots", "length", "ranks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected an integer >= 1, got {getattr(self, name)}")


def parts(shape: Shape, load: Load) -> dict[str, int]:
    """Bytes on each GPU by part. Their sum is the estimate.

    With P trained parameters (the policy's or its adapters', and a separate critic's trunk); what is frozen is counted
    under weights and under rollout_copy alone:

    - weights: P of the compute dtype, under stage 3 two layers of them and what lies around the layers; a frozen
      reference as many as the policy's again.
    - gradients: 4·P, summed in float32, and in bfloat16 the largest matrix's own for a moment; under stage 1 a rank's
      part besides, under stages 2 and 3 its part alone.
    - optimizer: AdamW's two moments, 8·P, and in bfloat16 or where they are divided the float32 master weights, 4·P;
      of all that a rank's part.
    - rollout_copy: where ranks divide the model, a whole one in the compute dtype that plays.
    - exchange: of data-parallel ranks: the gradients once more, on their way.
    - activations: what layers keep of a micro-batch for the backward pass; with gradient checkpointing the layers'
      inputs and one layer's own.
    - kv_cache: keys and values of the episodes being played.
    """
    width = 2 if load.dtype == "bfloat16" else _FP32
    frozen = 0 if load.adapters is None else shape.parameters
    trained = shape.parameters if load.adapters is None else load.adapters
    if load.critic == "separate":
        trained += shape.trunk_parameters
    if load.critic != "none":
        trained += shape.hidden + 1
    trunks = 2 if load.critic == "separate" else 1
    largest = shape.vocabulary * shape.hidden if load.adapters is None else 0
    divided = load.zero_stage > 0 and load.ranks > 1
    state = trained // (load.ranks if divided else 1)
    weights = frozen + trained
    if divided and load.zero_stage == 3:  # the layer at work and the next, and what lies around the layers
        weights = frozen + trained - (trunks * shape.layers - 2) * shape.layer_parameters
    gradients = trained if not divided else state + (trained if load.zero_stage == 1 else 0)
    if load.offload:
        gradients -= state
    # AdamW's moments; the masters, where the parameters themselves are not.
    optimizer = 8 * state + (_FP32 * state if divided or width < _FP32 else 0)
    one = shape.layer_activations(width)
    if load.gradient_checkpointing:
        kept = trunks * shape.layers * shape.hidden * width + one
    else:
        kept = trunks * shape.layers * one
    length = math.ceil(load.length / _CACHE_BLOCK) * _CACHE_BLOCK
    return {
        "weights": width * weights + (width * shape.parameters if load.reference and not frozen else 0),
        "gradients": _FP32 * gradients + (width * largest if width < _FP32 else 0),
        "optimizer": 0 if load.offload else optimizer,
        "rollout_copy": width * shape.parameters if divided else 0,
        "exchange": _FP32 * trained if load.ranks > 1 and not divided else 0,
        "activations": load.tokens * kept,
        "kv_cache": load.slots * length * shape.layers * 2 * shape.kv_heads * shape.head_dim * width,
    }


def logits_avoided(shape: Shape, load: Load) -> int:
    """Bytes that a loss over whole logits would take besides: for every token of a micro-batch and every word of the
    vocabulary the logit in the compute dtype, its float32 log-softmax and the gradient of that."""
    return load.tokens * shape.vocabulary * ((2 if load.dtype == "bfloat16" else _FP32) + 2 * _FP32)


@dataclass(frozen=True)
class Remedy:
    """A change of the config, and how many bytes of each GPU it frees after those before it."""

    change: str
    saves: int


def remedies(shape: Shape, load: Load, capacity: int, block: str = "ppo") -> list[Remedy] | None:
    """What to change so that a run fits `SHARE` of `capacity` bytes, what costs least first.

    Args:
        block: of the config, which has `max_tokens`.

    Returns:
        The changes to make together, in order; empty where it fits as it is, None where even all of them do not do.
    """
    made: list[Remedy] = []
    while sum(parts(shape, load).values()) > SHARE * capacity:
        before = sum(parts(shape, load).values())
        for change, lighter in _choices(shape, load, capacity, block):
            saves = before - sum(parts(shape, lighter).values())
            if saves > 0:
                made.append(Remedy(change, saves))
                load = lighter
                break
        else:
            return None
    return made


def _choices(shape: Shape, load: Load, capacity: int, block: str) -> list[tuple[str, Load]]:
    """Changes that are left to make, cheapest first; each may or may not save anything."""
    choices: list[tuple[str, Load]] = []
    if load.dtype == "float32":
        choices.append(("model.dtype: bfloat16", replace(load, dtype="bfloat16")))
    if not load.gradient_checkpointing:
        choices.append(("model.gradient_checkpointing: true", replace(load, gradient_checkpointing=True)))
    figures = parts(shape, load)
    spare = SHARE * capacity - sum(figures.values())
    for part, name, least, text in (
        ("activations", "tokens", load.length, block + ".max_tokens: {}"),
        ("kv_cache", "slots", 8, "rollout.slots: {}"),
    ):
        now = getattr(load, name)
        fitting = int(now * (1 + spare / figures[part])) if figures[part] else now
        if now > least:
            new = max(least, min(fitting, now - 1))
            choices.append((text.format(new), replace(load, **{name: new})))
    for stage in range(load.zero_stage + 1, 4):
        if load.ranks > 1:
            choices.append((f"backend: {{kind: fsdp, zero_stage: {stage}}}", replace(load, zero_stage=stage)))
    if load.zero_stage and not load.offload:
        choices.append(("backend.offload: true", replace(load, offload=True)))
    if load.critic == "separate":
        choices.append(("ppo.critic: shared", replace(load, critic="shared")))
    if load.ranks < 64:
        more = replace(load, ranks=2 * load.ranks, zero_stage=3)
        choices.append((f"--gpus {more.ranks} with backend: {{kind: fsdp, zero_stage: 3}}", more))
    return choices
