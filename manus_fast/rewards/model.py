"""An agent reward model: a decoder with two heads that judge episodes and situations.

    model = RewardModel.load("runs/reward_model/model")
    judge = model.scorer("outcome")         # rows of whole episodes → float32 [n]
    value = model.scorer("step")            # rows that end anywhere in an episode → float32 [n]

The outcome head judges an episode at its last token; the step head judges how things stand, before a reply or after
it. Both are logits of a Bradley–Terry model; learn/reward_model.py trains them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from manus_fast.agent.trajectory import Row
from manus_fast.modeling.attention import packed_hidden, use_packed_attention
from manus_fast.modeling.lora import base_model, plain_copy
from manus_fast.paths import check_path

HEADS = ("outcome", "step")
WEIGHTS, FACTS = "reward_model.safetensors", "reward_model.json"
MAX_TOKENS = 16384
"""Of one forward call when rows are scored."""


class RewardModel(nn.Module):
    """See the module's docstring.

    Args:
        decoder: a Hugging Face decoder without lm head. Its attention is switched to packed rows in place.
        tokenizer: name of the tokenizer whose ids it reads (`data.preferences.fingerprint`).
        heads: those that have been trained.

    The heads are float32 and start at 0, so that a fresh model prefers nothing.
    """

    def __init__(self, decoder: Any, tokenizer: str, heads: Sequence[str] = ()):
        super().__init__()
        use_packed_attention(decoder)
        self.decoder = decoder
        self.tokenizer = tokenizer
        self.heads = tuple(heads)
        weight = next(decoder.parameters())
        size = decoder.config.get_text_config().hidden_size
        self.head = nn.Linear(size, len(HEADS), dtype=torch.float32, device=weight.device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    @classmethod
    def of(cls, model: Any, tokenizer: str) -> RewardModel:
        """A fresh one over a copy of a causal LM's decoder, which is left as it is."""
        return cls(plain_copy(base_model(model).base_model), tokenizer)

    @property
    def device(self) -> torch.device:
        return self.head.weight.device

    def cast(self, dtype: torch.dtype) -> None:
        """Casts the decoder to `dtype`, in place; the heads stay float32."""
        self.decoder.to(dtype)

    def logits(
        self,
        token_ids: torch.Tensor,
        position_ids: torch.Tensor,
        cu_seqlens: torch.Tensor,
        max_length: int,
        where: torch.Tensor,
    ) -> torch.Tensor:
        """float32 [M, 2]: the heads (outcome, step) after the tokens `where` [M] of packed rows, differentiable.

        Args:
            token_ids, position_ids, cu_seqlens, max_length: as `modeling.attention.packed_hidden` takes them.
        """
        hidden = packed_hidden(self.decoder, token_ids, position_ids, cu_seqlens, max_length)
        return self.head(hidden.index_select(0, where).float())

    @torch.no_grad()
    def score(self, rows: Sequence[Row], head: str, max_tokens: int = MAX_TOKENS) -> np.ndarray:
        """float32 [n]: logits of `head` after each row's last token.

        Raises:
            ValueError: a head that was never trained.
        """
        if head not in self.heads:
            raise ValueError(
                f"reward model: expected a trained head ({', '.join(self.heads) or 'none is'}), got {head!r}"
            )
        scores = np.zeros(len(rows), np.float32)
        order = np.argsort([-len(row) for row in rows], kind="stable")
        start = 0
        while start < len(order):
            # Rows of like length together: the longest decides how many fit.
            count = max(1, max_tokens // len(rows[order[start]]))
            index = order[start : start + count]
            lengths = np.asarray([len(rows[i]) for i in index])
            ends = np.cumsum(lengths)
            ids = np.concatenate([rows[i].token_ids for i in index]).astype(np.int64)
            positions = np.concatenate([np.arange(length) for length in lengths])
            found = self.logits(
                *(torch.from_numpy(x).to(self.device) for x in (ids, positions, np.r_[0, ends].astype(np.int32))),
                int(lengths.max()),
                torch.from_numpy(ends - 1).to(self.device),
            )
            scores[index] = found[:, HEADS.index(head)].cpu().numpy()
            start += count
        return scores

    def scorer(self, head: str, probability: bool = False) -> Callable[[Sequence[Row]], np.ndarray]:
        """A function rows → float32 [n]: logits of `head`, or their sigmoid.

        Raises:
            ValueError: a head that was never trained.
        """
        self.score([], head)

        def score(rows: Sequence[Row]) -> np.ndarray:
            logits = self.score(rows, head)
            return (1 / (1 + np.exp(-logits.astype(np.float64)))).astype(np.float32) if probability else logits

        return score

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Writes weights, the decoder's config.json, and the heads and tokenizer that it is good for."""
        from safetensors.torch import save_file

        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        self.decoder.config.save_pretrained(path)
        save_file({name: t.detach().contiguous() for name, t in self.state_dict().items()}, path / WEIGHTS)
        (path / FACTS).write_text(json.dumps({"tokenizer": self.tokenizer, "heads": list(self.heads)}) + "\n")

    @classmethod
    def load(cls, folder: str | os.PathLike[str], device: str | torch.device = "cpu") -> RewardModel:
        """Reads what `save_pretrained` wrote, or the run's folder that holds it as `model`.

        Raises:
            ValueError: no reward model there, or tensors that don't fit its config.
        """
        from safetensors.torch import load_file
        from transformers import AutoConfig, AutoModel

        check_path("reward_model.path", folder)
        path = Path(folder)
        path = path if (path / FACTS).is_file() else path / "model"
        if not (path / FACTS).is_file() or not (path / WEIGHTS).is_file():
            raise ValueError(
                f"reward_model.path: expected a folder that manus-fast reward-model wrote, got {str(folder)!r}"
            )
        facts = json.loads((path / FACTS).read_text())
        decoder = AutoModel.from_config(AutoConfig.from_pretrained(path), attn_implementation="sdpa").float().eval()
        model = cls(decoder, facts["tokenizer"], facts["heads"])
        try:
            model.load_state_dict(load_file(path / WEIGHTS))
        except RuntimeError as error:
            raise ValueError(f"reward_model.path: expected weights that fit config.json in {str(path)!r}") from error
        return model.to(device)
