"""A small policy made on the spot: a word-level tokenizer and a few-layer Llama, saved as a plain Hugging Face folder.

Words carry their leading space as a marker, so that `decode(encode(text)) == text` for every text whose words are in
the vocabulary. What the policy writes therefore reaches the parser and the environment letter for letter ("in/on"
stays one word, "Act:" one token), which a tokenizer that joins tokens by spaces would not give.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

SPECIAL_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|pad|>", "<|unk|>")

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

_SPACE = "\u2581"
_LETTER = r"[^\W\d_]"
# A newline, a label of the ReAct form, a word (in/on, don't), a number, one other sign, a spare space.
_WORD = rf"{_LETTER}+(?:['/\-]{_LETTER}+)*"
_TOKEN = rf"\n|{_SPACE}?(?:Think|Act|Action):|{_SPACE}?{_WORD}|{_SPACE}?[0-9]+|{_SPACE}?(?:[^\s\w{_SPACE}]|_)|{_SPACE}"
_PUNCTUATION = ".,:;!?'\"()[]<>=-/_"
_LABELS = ("Think:", "Act:", "Action:")
_LEAST_NUMBERS = 20


def split_words(text: str) -> list[str]:
    """The tokens of a text as the tokenizer cuts it, the leading-space marker included."""
    return re.findall(_TOKEN, re.sub(r"[ \t]", _SPACE, text))


def make_tokenizer(texts: Iterable[str], max_length: int = 4096) -> Any:
    """A word-level tokenizer whose vocabulary is every word of `texts`, with and without a leading space, and all
    numbers up to the largest seen (20 at least). The order of `texts` doesn't matter.

    Raises:
        ValueError: `texts` holds no word.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {token.lstrip(_SPACE) for text in texts for token in split_words(text)} - {"", "\n"}
    if not any(word[0].isalpha() for word in words):
        raise ValueError("texts: expected at least one text with a word in it, got none")
    numbers = [int(word) for word in words if word.isdecimal() and len(word) <= 4]
    words.update(map(str, range(max([_LEAST_NUMBERS, *numbers]) + 1)))
    words.update(_PUNCTUATION, _LABELS)
    tokens = [*SPECIAL_TOKENS, "\n", _SPACE, *(mark + word for word in sorted(words) for mark in ("", _SPACE))]
    core = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<|unk|>"))
    core.normalizer = normalizers.Replace(Regex(r"[ \t]"), _SPACE)
    core.pre_tokenizer = pre_tokenizers.Split(Regex(_TOKEN), "isolated")
    core.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.Fuse()])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|end|>",
        pad_token="<|pad|>",
        unk_token="<|unk|>",
        additional_special_tokens=["<|system|>", "<|user|>", "<|assistant|>"],
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )


def make_policy(
    folder: str | os.PathLike[str],
    texts: Iterable[str],
    *,
    hidden: int = 128,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    intermediate: int = 384,
    initializer_range: float = 0.02,
    max_length: int = 4096,
    seed: int = 0,
) -> Path:
    """Writes an untrained policy (fp32, tied embeddings) that AutoModelForCausalLM and AutoTokenizer load.

    Args:
        folder: where to write; must not exist yet, or be empty.
        texts: whatever the policy must be able to read and write (observations, prompts, expert replies).
        hidden, layers, heads, kv_heads, intermediate: the Llama's sizes.
        initializer_range: standard deviation of the initial weights. Hugging Face's 0.02 suits widths of thousands; at
            a width of 128 what attention and MLP add is then so small that learning to copy takes twice as long.
        max_length: longest row, in tokens.
        seed: of the initial weights; torch's global generator is left as it was.

    Returns:
        `folder`, which appears complete or not at all.

    Raises:
        ValueError: sizes that don't divide, a folder in use or that cannot be written, no text.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from manus_fast.checkpoint import save_model

    folder = Path(folder)
    if hidden % heads or (hidden // heads) % 2:
        raise ValueError(f"hidden: expected an even multiple of heads ({heads}), got {hidden}")
    if heads % kv_heads:
        raise ValueError(f"kv_heads: expected a divisor of heads ({heads}), got {kv_heads}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"folder: expected a new or empty folder, got {folder}")
    tokenizer = make_tokenizer(texts, max_length)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=intermediate,
        max_position_embeddings=max_length,
        tie_word_embeddings=True,
        initializer_range=initializer_range,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).float()
    folder.parent.mkdir(parents=True, exist_ok=True)
    save_model(folder, model, tokenizer)
    return folder
