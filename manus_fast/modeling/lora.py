"""Low-rank adapters through PEFT: what is added to a model, the weights that it comes to, and its folder on disk.

    adapted = LoRAConfig(rank=16).adapt(model, seed=0)      # a PeftModel around the very model; only adapters train
    dict(merged_weights(adapted))                           # plain Hugging Face names, W + (alpha / rank) · B · A
    AdapterFolder.of(adapted).save_pretrained("adapter")    # PEFT's own format

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022. A starts random and B at 0, so that an
adapted model begins as the model itself.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

# PEFT's name of the one adapter that a model here has.
_NAME = "default"


@dataclass
class LoRAConfig:
    """The `model.lora` block of a config: adapters are trained in place of the model's weights."""

    rank: int = 16
    alpha: float = 32.0
    """The adapters' product is scaled by alpha / rank."""
    target_modules: list[str] | None = None
    """Names of the linear layers that get one, such as [q_proj, v_proj]; null: all but the lm head."""
    export: Literal["merged", "adapter"] = "merged"
    """What `output_dir`/model is: merged, a plain model; adapter, PEFT's folder. Checkpoints hold adapters."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"model.lora.rank: expected an integer >= 1, got {self.rank}")
        if not self.alpha > 0:
            raise ValueError(f"model.lora.alpha: expected a number above 0, got {self.alpha}")
        if self.target_modules is not None and not self.target_modules:
            raise ValueError("model.lora.target_modules: expected null or at least one name, got an empty list")

    def adapt(self, model: Any, seed: int = 0) -> Any:
        """Puts adapters into `model`, in place, freezes the rest, and returns PEFT's wrapper of it.

        Args:
            model: a Hugging Face causal LM without adapters. It stays usable, and then computes with them.
            seed: of the random matrices; the global generator is left alone.

        Raises:
            ValueError: PEFT is not installed, a name that no linear layer of the decoder has, or a model that has
                adapters already.
        """
        require_peft("model.lora")
        from peft import LoraConfig, get_peft_model

        if has_adapters(model):
            raise ValueError("model.lora: expected a model without adapters, got one that has some")
        names = self._targets(model)
        settings = LoraConfig(r=self.rank, lora_alpha=self.alpha, target_modules=names, task_type="CAUSAL_LM")
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return get_peft_model(model, settings)

    def _targets(self, model: Any) -> list[str]:
        """Names of the layers that get adapters. They have to be the decoder's: the loss takes the lm head's matrix
        itself, past any adapter on it."""
        linear = {n.rpartition(".")[2] for n, m in model.base_model.named_modules() if isinstance(m, nn.Linear)}
        names = sorted(linear) if self.target_modules is None else list(self.target_modules)
        unknown = sorted(set(names) - linear)
        if unknown or not names:
            raise ValueError(
                f"model.lora.target_modules: expected names of the decoder's linear layers "
                f"({', '.join(sorted(linear)) or 'it has none'}), got {unknown[0] if unknown else None!r}"
            )
        return names


def require_peft(what: str) -> None:
    """Raises ValueError where the package peft is missing, naming what needs it."""
    if importlib.util.find_spec("peft") is None:
        raise ValueError(f"{what}: expected the package peft (pip install 'manus-fast[lora]'), got none")


def base_model(model: Any) -> Any:
    """The Hugging Face model inside PEFT's wrapper, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def has_adapters(model: nn.Module) -> bool:
    return any(is_adapter(name) for name, _ in model.named_parameters())


def is_adapter(name: str) -> bool:
    """Whether a tensor's name is one that PEFT gives to adapters."""
    return ".lora_A." in name or ".lora_B." in name


def _merged(layer: Any) -> torch.Tensor:
    """W + (alpha / rank) · B · A of a layer with an adapter, whole, summed in float32 and rounded to W's dtype."""
    weight, a, b = (_whole(x.weight) for x in (layer.base_layer, layer.lora_A[_NAME], layer.lora_B[_NAME]))
    return weight.float().addmm(b.float(), a.float(), alpha=layer.scaling[_NAME]).to(weight.dtype)


def merged_weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights that a causal LM comes to, by Hugging Face parameter name, one at a time, detached.

    What has an adapter is W + (alpha / rank) · B · A, summed in float32 and rounded to W's dtype; all other tensors
    are the model's own. Where ranks divide them they come whole, and all ranks have to ask for all of them.
    """
    base = base_model(model)
    for name, parameter in base.named_parameters():
        if is_adapter(name):
            continue
        owner, _, leaf = name.partition(".base_layer.")
        whole = _merged(base.get_submodule(owner)) if leaf == "weight" else _whole(parameter)
        yield name.replace(".base_layer.", "."), whole


def apart_weights(model: nn.Module, base: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """The adapters of a causal LM by PEFT's names, detached, for what keeps them apart from the weights too: A as it
    is, and (alpha / rank) · B. Where ranks divide them they come whole, and all ranks have to ask for all of them.

    Args:
        base: before them the weights that they are added to, by Hugging Face parameter name.
    """
    inner = base_model(model)
    parameters = list(inner.named_parameters())
    if base:
        for name, parameter in parameters:
            if not is_adapter(name):
                yield name.replace(".base_layer.", "."), _whole(parameter)
    for name, parameter in parameters:
        owner, found, _ = name.partition(".lora_B.")
        if found:
            scaling = inner.get_submodule(owner).scaling[_NAME]
            yield f"base_model.model.{owner}.lora_B.weight", scaling * _whole(parameter)
        elif ".lora_A." in name:
            yield f"base_model.model.{name.partition('.lora_A.')[0]}.lora_A.weight", _whole(parameter)


@torch.no_grad()
def merge(module: nn.Module) -> None:
    """Adds the adapters' products to the weights, in place, and takes the adapters out: a plain model stays."""
    for name, layer in [(n, m) for n, m in module.named_modules() if hasattr(m, "base_layer")]:
        layer.base_layer.weight.copy_(_merged(layer))
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, layer.base_layer)
    if hasattr(module, "peft_config"):  # PEFT's note on the model that it adapted
        del module.peft_config
    module.requires_grad_(True)


def plain_copy(module: nn.Module) -> nn.Module:
    """A copy of a decoder, its adapters merged; all of it trains."""
    copied = copy.deepcopy(module)
    merge(copied)
    return copied


class AdapterFolder:
    """A model's adapter, ready to be written in PEFT's format.

    Args:
        settings: PEFT's config of it.
        tensors: by PEFT's own names, whole.
    """

    def __init__(self, settings: Any, tensors: dict[str, torch.Tensor]):
        self._settings, self._tensors = settings, tensors

    @classmethod
    def of(cls, model: Any) -> AdapterFolder:
        """That of a PeftModel. Where ranks divide the tensors, all of them have to call it."""
        from peft import get_peft_model_state_dict

        own = {name: _whole(parameter) for name, parameter in model.named_parameters() if is_adapter(name)}
        tensors = get_peft_model_state_dict(model, own, _NAME, save_embedding_layers=False)
        settings = copy.deepcopy(model.peft_config[_NAME])
        settings.inference_mode = True  # as PEFT writes it: who loads it does not train it unless told so
        settings.target_modules = sorted(settings.target_modules)
        path = Path(settings.base_model_name_or_path or "")
        if settings.base_model_name_or_path and path.is_dir():
            settings.base_model_name_or_path = str(path.resolve())
        return cls(settings, tensors)

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        from safetensors.torch import save_file

        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        self._settings.save_pretrained(path)
        on_host = {name: tensor.detach().cpu().contiguous() for name, tensor in self._tensors.items()}
        save_file(on_host, path / WEIGHTS_FILE, metadata={"format": "pt"})


def is_adapter_folder(folder: Path) -> bool:
    return (folder / CONFIG_FILE).is_file()


def base_of(folder: Path) -> str:
    """Path or hub name of the model that an adapter's folder is for. Raises ValueError where it names none."""
    name = json.loads((folder / CONFIG_FILE).read_text()).get("base_model_name_or_path")
    if not name:
        raise ValueError(f"model: expected {CONFIG_FILE} in {str(folder)!r} to name its base model, got none")
    return str(name)


def load_adapter(model: Any, folder: Path) -> None:
    """Merges the adapter of a folder in PEFT's format into its base model, in place.

    Raises:
        ValueError: PEFT is not installed, an adapter that is no LoRA, or one that does not fit.
    """
    require_peft("model")
    from peft import PeftConfig, PeftModel, get_peft_model_state_dict
    from peft.utils.save_and_load import load_peft_weights

    settings = PeftConfig.from_pretrained(folder)
    if settings.peft_type != "LORA":
        raise ValueError(f"model: expected a LoRA adapter in {str(folder)!r}, got {settings.peft_type}")
    try:
        wrapped = PeftModel.from_pretrained(model, folder, adapter_name=_NAME)
        # PEFT only warns of tensors that the file lacks, and leaves their products at 0.
        wanted = get_peft_model_state_dict(wrapped, adapter_name=_NAME).keys()
        absent = sorted(wanted - load_peft_weights(str(folder), device="cpu").keys())
        if not absent:
            wrapped.merge_and_unload()
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"model: cannot add the adapter in {str(folder)!r} to its base model: {error}") from error
    if absent:
        raise ValueError(
            f"model: expected all {len(wanted)} tensors of the adapter in {str(folder)!r}, got none for {absent[0]!r} "
            f"({len(absent)} are missing)"
        )
    model.requires_grad_(True)  # PEFT froze what it wrapped, and merging leaves it so


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    tensor = parameter.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
