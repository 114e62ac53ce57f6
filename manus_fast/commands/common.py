"""What several commands share: the field's common flags as config keys, shipped folders, printing."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from manus_fast.errors import UserError
from manus_fast.paths import check_path
from manus_fast.ranks import world_size
from manus_fast.tracking import METRICS_FILE
from manus_fast.versions import VERSIONS_FILE

_PACKAGE = Path(__file__).resolve().parent.parent
_OF_A_RUN = (METRICS_FILE, VERSIONS_FILE)
"""What lies beside a run's config.json."""


def shipped(name: str) -> Path:
    """The folder `configs` or `benchmarks`: inside an installed package, beside it in a checkout."""
    inside = _PACKAGE / name
    return inside if inside.is_dir() else _PACKAGE.parent / name


def find_config(path: str | Path | None, default: str) -> Path:
    """A config by path, else by name among the shipped ones ("ppo_household" or "ppo_household.yaml")."""
    wanted = str(path or default)
    check_path("--config", wanted)
    file = Path(wanted)
    if file.is_file():
        return file
    folder = shipped("configs")
    for name in (wanted, f"{wanted}.yaml"):
        if (folder / name).is_file():
            return folder / name
    names = ", ".join(sorted(item.stem for item in folder.glob("*.yaml")))
    raise UserError(f"--config: expected a YAML file or the name of a shipped one ({names}), got {wanted!r}")


def config_beside(model: str | None) -> Path | None:
    """The resolved config of the run that a model came from, so that it plays in the form that it was trained in."""
    if model is None:
        return None
    check_path("--model_path", model)
    for folder in (Path(model), *list(Path(model).resolve().parents)[:3]):
        file = folder / "config.json"
        if file.is_file() and _is_of_a_run(file, own=folder == Path(model)):
            return file
    return None


def _is_of_a_run(file: Path, own: bool) -> bool:
    """Whether a config.json is a run's. One in the model's own folder that cannot be read is the model's, and refused
    where that is opened.

    Raises:
        UserError: one above the model cannot be read where a run was written: the model would play in another form than
            it was trained in.
    """
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        if own or not any((file.parent / name).exists() for name in _OF_A_RUN):
            return False
        why = error.strerror if isinstance(error, OSError) else "it is no JSON"
        raise UserError(
            f"--model_path: expected the config.json of the run that the model came from, got {str(file)!r}, which "
            f"cannot be read: {why} (mend it, or name a config by --config)"
        ) from error
    return isinstance(values, dict) and "environment" in values


def overrides(flags: Mapping[str, Any], extra: Sequence[str]) -> list[str]:
    """Dotted overrides: those of the flags that were given, then the words after them, which win."""
    words = [f"{key}={_yaml(value)}" for key, value in flags.items() if value is not None]
    return [*words, *extra]


def truth(flag: str, text: str | None) -> bool | None:
    """The value of a flag that takes true or false, as the field's trainers write it."""
    if text is None:
        return None
    word = text.strip().lower()
    if word not in ("true", "false", "1", "0", "yes", "no"):
        raise UserError(f"{flag}: expected true or false, got {text!r}")
    return word in ("true", "1", "yes")


class Relaunch(Exception):
    """The command is to run once on each of `ranks` ranks; the caller knows the command line to repeat."""

    def __init__(self, ranks: int):
        super().__init__(f"{ranks} ranks")
        self.ranks = ranks


def on_gpus(count: int | None) -> None:
    """What --gpus asks for: goes on in a process that is one of that many ranks already, or of one rank.

    Raises:
        Relaunch: the ranks are still to be started.
        UserError: fewer than 1, more than there are GPUs, or not as many as another launcher started.
    """
    if count is None:
        return
    if count < 1:
        raise UserError(f"--gpus: expected an integer >= 1, got {count}")
    started = world_size()
    if started > 1 and started != count:
        raise UserError(f"--gpus: expected {started}, the number of ranks that the launcher started, got {count}")
    if count == 1 or started == count:
        return
    import torch

    if torch.cuda.is_available() and torch.cuda.device_count() < count:
        raise UserError(f"--gpus: expected at most the {torch.cuda.device_count()} GPUs of this machine, got {count}")
    raise Relaunch(count)


def benchmarks(module: str) -> ModuleType:
    """Imports a module of the shipped folder `benchmarks` under that name, wherever the folder lies."""
    if "benchmarks" not in sys.modules:
        folder = shipped("benchmarks")
        if not (folder / "__init__.py").is_file():
            raise UserError(f"benchmarks: expected the folder that ships with manus_fast, found none at {folder}")
        spec = importlib.util.spec_from_file_location(
            "benchmarks", folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None and spec.loader is not None
        package = importlib.util.module_from_spec(spec)
        sys.modules["benchmarks"] = package
        spec.loader.exec_module(package)
    return importlib.import_module(f"benchmarks.{module}")


def prepare() -> None:
    """Before work that loads models: no progress bars and notices of other libraries between our own lines."""
    from transformers.utils import logging as theirs

    theirs.disable_progress_bar()
    theirs.set_verbosity_error()


def _yaml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value)  # a JSON string is a YAML string whatever it holds
    return repr(value) if isinstance(value, float) else str(value)
