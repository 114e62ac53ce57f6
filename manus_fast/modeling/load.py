"""Opens a causal language model and its tokenizer from a Hugging Face folder or hub name, with clear refusals."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
from pathlib import Path
from typing import Any

from manus_fast.modeling import lora, smollm2
from manus_fast.paths import check_path

_log = logging.getLogger(__name__)

DTYPES = ("float32", "bfloat16", "float16")
_HUB_SECONDS = 10.0
"""How long the hub may take to say whether it has a model."""


def load_model(
    path: str | os.PathLike[str],
    dtype: str = "float32",
    device: str = "cpu",
    use_flash_attention_2: bool = False,
) -> tuple[Any, Any]:
    """Loads (model, tokenizer).

    Args:
        path: a folder written by `save_pretrained`, or a hub name ("owner/model"). An adapter's folder, in PEFT's
            format, gives its base model with the adapter merged.
        dtype: "float32" | "bfloat16" | "float16" of the weights.
        device: where the model goes, as torch names it.
        use_flash_attention_2: ask for flash-attn; without that package a warning says so and SDPA serves.

    Raises:
        ValueError: no such folder, no config.json in it, a folder or hub name that holds no causal language model, a
            tokenizer that is missing or names no end-of-sequence token, an unknown dtype, a device torch can't use.
    """
    import torch

    if dtype not in DTYPES:
        raise ValueError(f"model.dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    name = find_model(path)
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device: expected a device as torch names it (cpu, cuda, cuda:1), got {device!r}") from error
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device: expected a usable CUDA device for {device!r}, got none: torch finds no GPU")
    tokenizer = load_tokenizer(name)
    model = _load(name, dtype, use_flash_attention_2)
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise ValueError(
            f"model: expected an embedding row for each of {len(tokenizer)} tokens, got {rows} in {name!r}"
        )
    return model.to(place), tokenizer


def _load(name: str, dtype: str, use_flash_attention_2: bool) -> Any:
    if lora.is_adapter_folder(Path(name)):
        # Its base may be another adapter's folder: each one goes over what the one beneath came to.
        model = _load(find_model(lora.base_of(Path(name))), dtype, use_flash_attention_2)
        lora.load_adapter(model, Path(name))
        model.name_or_path = name
        return model
    import torch
    from transformers import AutoModelForCausalLM

    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            name,
            dtype=getattr(torch, dtype),
            attn_implementation=attention(use_flash_attention_2),
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # told below, in one sentence
        )
    except Exception as error:  # what a damaged folder raises in other libraries is of any type
        raise ValueError(f"model: cannot load a causal language model from {name!r}: {_first(error)}") from error
    if found["mismatched_keys"]:
        key, held, wanted = min(found["mismatched_keys"], key=lambda entry: entry[0])
        raise ValueError(
            f"model: expected weights of the shapes that config.json gives in {name!r}, "
            f"got {list(held)} instead of {list(wanted)} for {key}"
        )
    if found["missing_keys"]:
        # transformers would go on with random numbers in their place.
        raise ValueError(
            f"model: expected all weights in {name!r}, got none for {len(found['missing_keys'])} of them "
            f"({min(found['missing_keys'])}, …)"
        )
    return model


def load_tokenizer(path: str | os.PathLike[str]) -> Any:
    """The tokenizer alone; the same refusals as `load_model`. One without a pad token pads with its end token."""
    from transformers import AutoTokenizer

    name = find_model(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except Exception as error:  # as in _load
        raise ValueError(f"model: cannot load a tokenizer from {name!r}: {_first(error)}") from error
    if tokenizer.eos_token_id is None:
        raise ValueError(f"model: the tokenizer in {name!r} names no end-of-sequence token (eos_token), and needs one")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def check_model_path(path: str | os.PathLike[str]) -> str:
    """`path` as text, checked without loading anything: a model folder, "smollm2", or what may be a hub name."""
    name = str(path)
    if name == smollm2.NAME:
        if not smollm2.is_present():
            raise ValueError(f"model: {name} is not on this machine yet: run manus-fast models get {name}")
        return str(smollm2.default_folder())
    check_path("model", name)
    folder = Path(name)
    if name and folder.is_dir():
        if not (folder / "config.json").is_file() and not lora.is_adapter_folder(folder):
            raise ValueError(f"model: expected a Hugging Face model folder, got {name!r}, which holds no config.json")
        return name
    parts = name.split("/")
    if folder.exists() or len(parts) > 2 or not all(parts) or name.startswith((".", "~")):
        raise ValueError(f"model: expected a model folder or a hub name, found no folder at {name!r}")
    return name


def find_model(path: str | os.PathLike[str]) -> str:
    """`check_model_path`, and of a hub name that is not in the cache also whether the hub has such a model: it is asked
    once, where the libraries that load models ask for each of their files many times over before they give up.

    Raises:
        ValueError: what `check_model_path` refuses; no such model on the hub, or no answer from it.
    """
    name = check_model_path(path)
    if not Path(name).is_dir():
        _ask_hub(name)
    return name


@functools.lru_cache
def _ask_hub(name: str) -> None:
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, RepositoryNotFoundError

    try:
        if any(isinstance(try_to_load_from_cache(name, file), str) for file in ("config.json", lora.CONFIG_FILE)):
            return
        HfApi().model_info(name, timeout=_HUB_SECONDS)
        return
    except (HFValidationError, RepositoryNotFoundError):
        why = "the hub has no such model, or not for this user"
    except OfflineModeIsEnabled:
        why = "the hub may not be asked (HF_HUB_OFFLINE)"
    except HfHubHTTPError:  # its files may be there all the same, as at a mirror that serves nothing else
        return
    except Exception as error:  # no connection: of the type of whichever client that package uses
        why = f"the hub cannot be asked ({_first(error)})"
    raise ValueError(
        f"model: expected a model folder or a hub name, got {name!r}: no such folder, not in the cache, and {why}"
    )


def attention(use_flash_attention_2: bool) -> str:
    """The attention implementation to ask transformers for: flash_attention_2 where wanted and present, else sdpa."""
    if use_flash_attention_2 and importlib.util.find_spec("flash_attn") is None:
        _log.warning("model.use_flash_attention_2 is set, but the package flash-attn is not installed: using SDPA.")
        return "sdpa"
    return "flash_attention_2" if use_flash_attention_2 else "sdpa"


def end_ids(model: Any) -> list[int]:
    """Further end-of-turn ids that the model's generation config names (some models name several)."""
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if named is None:
        return []
    return [int(i) for i in named] if isinstance(named, list | tuple) else [int(named)]


def _first(error: BaseException) -> str:
    """The first line of what an error says, and the second where the first only announces it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[:2] if lines[0].endswith(":") else lines[:1])
