"""The policy: a causal language model with an optional value function, scored on packed rows.

    policy = Policy(model, critic="shared")
    output = policy.score(pack(rows), entropy=True, value=True, temperature=1.0)
    output.log_prob[t]      # of token t, predicted from position t-1; 0 off the loss mask

Only positions whose next token is trained reach the lm head, through `ops.linear_logprob`, so no [tokens, vocabulary]
matrix is held.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from manus_fast.agent.trajectory import Row
from manus_fast.data.packing import PackedRows, own_packs, pack
from manus_fast.data.prefixes import PrefixTree
from manus_fast.learn import beside
from manus_fast.modeling import attention
from manus_fast.modeling.attention import PackedRows as RowsPlan
from manus_fast.modeling.attention import use_packed_attention
from manus_fast.modeling.flops import Work, forward_flops
from manus_fast.modeling.last_layer import hidden_at
from manus_fast.modeling.lora import AdapterFolder, apart_weights, base_model, has_adapters, merged_weights, plain_copy
from manus_fast.modeling.tree_attention import TreePlan
from manus_fast.ops import linear_logprob

CRITICS = ("none", "shared", "separate")


@dataclass
class ScoreOutput:
    """Per-token results, aligned like `PackedRows`: entry t is about token t, 0 where the loss mask is False."""

    log_prob: torch.Tensor | None
    """float32 [N], under the model's distribution at the temperature; None where values alone were asked for."""
    entropy: torch.Tensor | None
    """float32 [N], in nats, of the distribution that token t was drawn from."""
    value: torch.Tensor | None
    """float32 [N]: V(hidden[t-1])."""
    last_value: torch.Tensor | None
    """float32 [R]: V after each row's last token."""


class Summing(Protocol):
    """What scoring needs to know of a run's ranks; a learn.backend.Backend is one."""

    rank: int
    world_size: int

    def sum(self, x: torch.Tensor) -> torch.Tensor: ...


class Policy(nn.Module):
    """See the module's docstring.

    Args:
        model: a Hugging Face causal LM, or a PEFT wrapper of one. Its attention is switched to packed rows in place.
        critic: "none"; "shared": a linear head on the policy's last hidden states; "separate": a linear head on a
            decoder of its own that starts as a copy of the policy's. The head is float32 and starts at 0, so that a
            fresh critic predicts 0 everywhere.
        gradient_checkpointing: keep only layer inputs for the backward pass and compute the rest again.
        compile_layers: compile the decoders' layers (see `modeling.attention.compile_layers`).

    Raises:
        ValueError: unknown critic, no output embeddings, or attention that packed rows cannot express.
    """

    def __init__(
        self,
        model: nn.Module,
        critic: str = "none",
        gradient_checkpointing: bool = False,
        compile_layers: bool = False,
    ):
        super().__init__()
        if critic not in CRITICS:
            raise ValueError(f"ppo.critic: expected one of {', '.join(CRITICS)}, got {critic!r}")
        if base_model(model).get_output_embeddings() is None:
            raise ValueError(f"model: expected a causal LM with output embeddings, got {type(model).__name__}")
        use_packed_attention(model)
        self.model = model
        self.critic_kind = critic
        self.critic: nn.Module | None = None
        self.value_head: nn.Linear | None = None
        if critic != "none":
            config = base_model(model).config.get_text_config()
            device = next(model.parameters()).device
            self.value_head = nn.Linear(config.hidden_size, 1, dtype=torch.float32, device=device)
            nn.init.zeros_(self.value_head.weight)
            nn.init.zeros_(self.value_head.bias)
        if critic == "separate":
            self.critic = plain_copy(base_model(model).base_model)
            use_packed_attention(self.critic)
        self.placed: torch.device | None = None
        """Where it computes, where its parameters lie elsewhere between the passes."""
        self.side_by_side = False
        """Whether a separate critic may run beside the policy where the CPU has threads for both (`learn/beside.py`):
        not where gradients are hooked by what must see them in one order."""
        self.work = Work()
        """What rows that share beginnings took and saved; others are not counted."""
        self.gradient_checkpointing = gradient_checkpointing
        # What recomputes or compiles keeps state of the whole process, such as the random generator's.
        self._plain = not (gradient_checkpointing or compile_layers)
        if gradient_checkpointing:
            for trunk in (model, self.critic):
                if trunk is not None:
                    trunk.gradient_checkpointing_enable({"use_reentrant": False})
        if compile_layers:
            for trunk in (model, self.critic):
                if trunk is not None:
                    attention.compile_layers(trunk)

    @property
    def device(self) -> torch.device:
        return self.placed or next(self.model.parameters()).device

    @property
    def has_critic(self) -> bool:
        return self.value_head is not None

    def cast(self, dtype: torch.dtype) -> None:
        """Casts the decoders to `dtype`, in place; the value head stays float32."""
        self.model.to(dtype)
        if self.critic is not None:
            self.critic.to(dtype)

    def score(
        self,
        packed: PackedRows,
        *,
        log_prob: bool = True,
        entropy: bool = False,
        value: bool = False,
        temperature: float = 1.0,
    ) -> ScoreOutput:
        """Log-probabilities (and entropy, values) of the trainable tokens of `packed`, differentiable. Without
        `log_prob` values alone, for which a separate critic needs no pass through the policy.

        Raises:
            ValueError: `value` without a critic, or nothing asked for.
        """
        if not (log_prob or value) or (entropy and not log_prob):
            raise ValueError("log_prob: expected True without values, and with entropy, got False")
        if value and self.value_head is None:
            raise ValueError("value: expected a policy with a critic, got ppo.critic 'none'")
        if not (self.gradient_checkpointing and torch.is_grad_enabled()):
            return self._score(packed, log_prob, entropy, value, temperature)
        # Layers checkpoint in train mode only. Nothing else depends on it (packed attention refuses dropout), but an
        # engine that shares the model has to find it in eval mode.
        self.train()
        try:
            return self._score(packed, log_prob, entropy, value, temperature)
        finally:
            self.eval()

    @torch.no_grad()
    def score_all(
        self,
        packed: PackedRows,
        *,
        log_prob: bool = True,
        entropy: bool = False,
        value: bool = False,
        temperature: float = 1.0,
        max_rows: int | None = None,
        max_tokens: int | None = None,
        ranks: Summing | None = None,
    ) -> ScoreOutput:
        """`score` without gradients over any number of rows, in packs of limited size; results on packed's device.

        With `ranks` each of them scores its part of the packs, and all have all results.
        """
        nothing = torch.zeros(packed.tokens, dtype=torch.float32, device=packed.device)
        log_probs, entropies, values = (nothing.clone() if wanted else None for wanted in (log_prob, entropy, value))
        last = torch.zeros(packed.rows, dtype=torch.float32, device=packed.device) if value else None
        starts = packed.cu_seqlens.cpu().numpy()
        size = 1 if ranks is None else ranks.world_size
        packs = packed.micro_batches(max_rows=max_rows, max_tokens=max_tokens, multiple=size)
        for index, counts in own_packs(packs, 0 if ranks is None else ranks.rank, size):
            part = self.score(
                packed.select(index).to(self.device),
                log_prob=log_prob,
                entropy=entropy,
                value=value,
                temperature=temperature,
            )
            if not counts:
                continue
            spans = [torch.arange(starts[r], starts[r + 1]) for r in index]
            where = torch.cat(spans).to(packed.device)
            if log_prob:
                log_probs[where] = part.log_prob.float().to(packed.device)
            if entropy:
                entropies[where] = part.entropy.float().to(packed.device)
            if value:
                values[where] = part.value.to(packed.device)
                last[torch.from_numpy(index).to(packed.device)] = part.last_value.to(packed.device)
        if ranks is not None and size > 1:
            # What a rank did not score is 0 there, so that sums are exact. Ranks of GPUs add up what lies on them.
            log_probs, entropies, values, last = (
                None if x is None else ranks.sum(x.to(self.device)).to(packed.device)
                for x in (log_probs, entropies, values, last)
            )
        return ScoreOutput(log_prob=log_probs, entropy=entropies, value=values, last_value=last)

    def _score(self, packed: PackedRows, log_prob: bool, entropy: bool, value: bool, temperature: float) -> ScoreOutput:
        tokens, where = packed.tokens, packed.trainable
        if packed.node is None:
            ids, positions, plan = packed.token_ids, packed.position_ids, RowsPlan(packed.cu_seqlens, packed.max_length)
            predicts, target, again, ends = where - 1, where, None, packed.cu_seqlens[1:].long() - 1
        else:
            # Common beginnings once: results are spread to all rows that have them, gradients sum up on the way back.
            tree = PrefixTree.of(packed)
            self._note(packed, tree)
            ids, positions, plan = tree.token_ids, tree.position_ids, TreePlan(tree.segments, tree.paths, packed.device)
            predicts, target, again, ends = tree.before, tree.trained, tree.again, tree.ends

        def spread(x: torch.Tensor) -> torch.Tensor:
            return _spread(x if again is None else x[again], where, tokens)

        pick = _pick if packed.node is None else _pick_shared

        def tokens_of(before: torch.Tensor, at_ends: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
            weight, bias, scale, softcap = lm_head(self.model)
            log_probs, entropies = linear_logprob(
                before.to(weight.dtype),
                weight,
                ids.index_select(0, target),
                temperature=temperature * scale,
                bias=bias,
                entropy=entropy,
                softcap=softcap,
            )
            return spread(log_probs), None if entropies is None else spread(entropies)

        def values_of(before: torch.Tensor, at_ends: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            head = self.value_head
            return spread(head(before.float()).squeeze(-1)), head(at_ends.float()).squeeze(-1)

        def through(trunk: nn.Module, *uses: Callable[..., tuple]) -> tuple:
            hidden, (at, last) = hidden_at(trunk, ids, positions, plan, predicts, ends)
            before, at_ends = pick(hidden, at), hidden.index_select(0, last)
            return sum((use(before, at_ends) for use in uses), ())

        if not log_prob:
            results = (None, None, *through(self.model if self.critic is None else self.critic, values_of))
        elif not value:
            results = (*through(self.model, tokens_of), None, None)
        elif self.critic is None:
            results = through(self.model, tokens_of, values_of)
        elif self.side_by_side and self._plain and beside.possible(packed.device):
            first, second = beside.both(lambda: through(self.model, tokens_of), lambda: through(self.critic, values_of))
            results = (*first, *second)
        else:
            results = (*through(self.model, tokens_of), *through(self.critic, values_of))
        return ScoreOutput(*results)

    def _note(self, packed: PackedRows, tree: PrefixTree) -> None:
        model, pairs = base_model(self.model), int((packed.lengths * (packed.lengths + 1) // 2).sum())
        self.work.add(
            rows_tokens=packed.tokens,
            tokens=tree.tokens,
            rows_flops=forward_flops(model, packed.tokens, pairs, packed.trainable_tokens),
            flops=forward_flops(model, tree.tokens, tree.pairs, len(tree.trained)),
        )

    def value_of(self, max_tokens: int | None = None) -> Callable[[Sequence[Row]], np.ndarray]:
        """A function from rows to V after each row's last token, float32 [R], without gradients: for search."""

        def last_values(rows: Sequence[Row]) -> np.ndarray:
            return self.score_all(pack(rows), log_prob=False, value=True, max_tokens=max_tokens).last_value.numpy()

        return last_values

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The language model's tensors by Hugging Face parameter name, adapters merged, for an engine's `load`. Where
        ranks divide them they come whole, one at a time, and all ranks have to ask for all of them."""
        yield from merged_weights(self.model)

    def weights_for(self, engine: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """What to `load` into an engine: one that computes with this very model has the weights, adapters included,
        and is given them under the names that they have there; one that keeps adapters apart gets them so; any other
        one `named_weights`."""
        base = base_model(self.model)
        if getattr(engine, "model", None) is base:
            return ((name, parameter.detach()) for name, parameter in base.named_parameters())
        if getattr(engine, "adapter_rank", 0) and has_adapters(base):
            return apart_weights(self.model, engine.needs_weights)
        return self.named_weights()

    @torch.no_grad()
    def write_to(self, model: nn.Module) -> None:
        """Gives a copy of the language model, one without adapters, this one's weights, rounded to its dtype."""
        theirs = dict(base_model(model).named_parameters())
        for name, tensor in self.named_weights():
            theirs[name].copy_(tensor)

    def saved_as(self, playing: nn.Module, adapter: bool = False) -> Any:
        """What to call `save_pretrained` of, up to date. All ranks have to ask, one of them then writes.

        Args:
            playing: a whole copy of the language model where ranks divide this one, else this one itself.
            adapter: the adapter alone, in PEFT's format, where the model has one.
        """
        if adapter and has_adapters(self.model):
            return AdapterFolder.of(self.model)
        if playing is base_model(self.model):
            return self
        self.write_to(playing)
        return playing

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Writes the language model as a plain Hugging Face folder, adapters merged."""
        base = base_model(self.model)
        merged = {n: w.cpu() for n, w in self.named_weights()} if has_adapters(base) else None
        base.save_pretrained(folder, state_dict=merged)


class Reference:
    """The frozen policy that a KL term measures from.

    With adapters (PEFT) it is the model itself with adapters off and costs no memory; otherwise it is a copy.

    Args:
        policy: as it is now, not yet divided among ranks.
        dtype: of the copy; None: the policy's.
    """

    def __init__(self, policy: Policy, dtype: torch.dtype | None = None):
        self._adapters = hasattr(policy.model, "disable_adapter")
        if self._adapters:
            self._policy = policy
        else:
            self._policy = Policy(copy.deepcopy(policy.model)).requires_grad_(False).eval()
            if dtype is not None:
                self._policy.cast(dtype)

    def log_prob(
        self,
        packed: PackedRows,
        *,
        temperature: float = 1.0,
        max_rows: int | None = None,
        max_tokens: int | None = None,
        ranks: Summing | None = None,
    ) -> torch.Tensor:
        """float32 [N], aligned like `ScoreOutput.log_prob`, without gradients."""
        off = self._policy.model.disable_adapter() if self._adapters else contextlib.nullcontext()
        with off:
            return self._policy.score_all(
                packed, temperature=temperature, max_rows=max_rows, max_tokens=max_tokens, ranks=ranks
            ).log_prob

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Tensors by name; empty with adapters."""
        return {} if self._adapters else dict(self._policy.model.named_parameters())


def lm_head(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor | None, float, float | None]:
    """The output matrix [V, H], its bias, what logits are divided by, and the soft cap on them, of any causal LM."""
    base = base_model(model)
    head = base.get_output_embeddings()
    config = base.config.get_text_config()
    softcap = getattr(config, "final_logit_softcapping", None)
    scale = float(getattr(config, "logits_scaling", None) or 1.0) / float(getattr(config, "logit_scale", None) or 1.0)
    return head.weight, getattr(head, "bias", None), scale, softcap


def _pick(hidden: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """Rows `where` of hidden [N, H], none of them twice."""
    return hidden.index_select(0, where)


def _pick_shared(hidden: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """Rows `where` of hidden [N, H], some of them several times: indexing sums their gradients in a fixed order."""
    return hidden[where]


def _spread(values: torch.Tensor, where: torch.Tensor, length: int) -> torch.Tensor:
    """[M] values at positions `where` of a zero vector [length]."""
    return torch.zeros(length, dtype=values.dtype, device=values.device).index_copy(0, where, values)
