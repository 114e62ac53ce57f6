"""Loads YAML and dotted overrides into nested dataclasses, checks every key and type, and dumps the result.

It knows no component: the caller gives the root dataclass, each component keeps its own. OmegaConf reads, merges and
resolves interpolations; the checks are made here, because a message has to name the key, what was expected and what
came, in one sentence.

    config = load_config(Config, "configs/ppo_household.yaml", ["ppo.gamma=0.95", "training.seed=3"])
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from manus_fast.files import write_text
from manus_fast.paths import check_path

T = TypeVar("T")


def load_config(
    cls: type[T],
    path: str | os.PathLike[str] | None = None,
    overrides: Sequence[str] = (),
    beneath: Mapping[str, Any] | None = None,
) -> T:
    """Reads a YAML file (optional), lays the overrides over it, and builds `cls`.

    Args:
        cls: a dataclass whose fields are plain types, lists, dicts, Literals, Optionals or further dataclasses.
        path: a YAML file; None for the defaults alone.
        overrides: "dotted.key=value" with the value in YAML's own syntax, applied in order.
        beneath: nested values that go over the defaults and under the file (a preset).

    Raises:
        ValueError: no such file, bad YAML, an unknown key (the nearest one is named), a value of the wrong type,
            a malformed override, or whatever a dataclass's own __post_init__ refuses.
    """
    return from_mapping(cls, read_values(path, overrides, beneath))


def read_values(
    path: str | os.PathLike[str] | None = None,
    overrides: Sequence[str] = (),
    beneath: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The merged values as plain nested dicts, not yet checked against any dataclass; see `load_config`."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    merged = OmegaConf.create(dict(beneath or {}))
    if path is not None:
        merged = OmegaConf.merge(merged, read_yaml(path))
    for override in overrides:
        key, equals, _ = override.partition("=")
        if not equals or not key.strip() or any(not part for part in key.strip().split(".")):
            raise ValueError(f"override: expected dotted.key=value, got {override!r}")
        _check_above(merged, key.strip())
        try:
            merged = OmegaConf.merge(merged, OmegaConf.from_dotlist([override]))
        except Exception as error:  # YAML and OmegaConf errors share no base class
            raise ValueError(f"{key}: expected a value in YAML syntax, got {override!r} ({_first(error)})") from error
    try:
        return OmegaConf.to_container(merged, resolve=True)
    except OmegaConfBaseException as error:
        raise ValueError(f"config: {_first(error)}") from error


def _check_above(merged: Any, key: str) -> None:
    """Whether an override may go beneath what is there: nothing, null or a mapping, which it would else replace."""
    from omegaconf import OmegaConf

    parts = key.split(".")[:-1]
    for depth in range(1, len(parts) + 1):
        if OmegaConf.is_missing(merged, parts[depth - 1]) or OmegaConf.is_interpolation(merged, parts[depth - 1]):
            return
        merged = merged.get(parts[depth - 1])
        if merged is None:
            return
        if not OmegaConf.is_dict(merged):
            plain = OmegaConf.to_container(merged) if OmegaConf.is_list(merged) else merged
            raise ValueError(f"{'.'.join(parts[:depth])}: expected a mapping of keys, got {_describe(plain)}")


def read_yaml(path: str | os.PathLike[str]) -> Any:
    """The mapping in a YAML file as an OmegaConf node. Raises ValueError: missing file, bad syntax, not a mapping."""
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    check_path("config", path)
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"config: expected a YAML file, found none at {str(path)!r}")
    try:
        node = OmegaConf.load(file)
    except OmegaConfBaseException as error:
        raise ValueError(f"config: {file} holds what no config can: {_first(error)}") from error
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or _first(error)
        raise ValueError(f"config: {file} is not valid YAML{where}: {problem}") from error
    except (UnicodeDecodeError, OSError) as error:
        raise ValueError(f"config: {file} is not a readable YAML file: {_first(error)}") from error
    if not isinstance(node, DictConfig):
        raise ValueError(f"config: expected {file} to hold a mapping of keys, got a list or a single value")
    return node


def from_mapping(cls: type[T], values: Mapping[str, Any]) -> T:
    """Builds dataclass `cls` from plain nested values, with the same checks and errors as `load_config`."""
    return _dataclass(cls, values, "", None, cls)


def to_dict(config: Any) -> dict[str, Any]:
    """The resolved config as JSON-compatible nested dicts; `from_mapping(type(config), to_dict(config)) == config`."""
    return _plain(dataclasses.asdict(config))


def save_config(config: Any, path: str | os.PathLike[str]) -> None:
    """Writes the resolved config as JSON, whole or not at all."""
    write_text(path, json.dumps(to_dict(config), indent=2) + "\n")


def keys(cls: type[Any], prefix: str = "") -> Iterator[str]:
    """All dotted keys of a dataclass, nested ones included, in declaration order."""
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        key = f"{prefix}{field.name}"
        yield key
        for option in _options(hints[field.name]):
            if dataclasses.is_dataclass(option):
                yield from keys(option, f"{key}.")


def _dataclass(cls: type[Any], values: Any, key: str, base: Any, root: type[Any]) -> Any:
    if not isinstance(values, Mapping):
        raise ValueError(f"{key}: expected a mapping of keys, got {_describe(values)}")
    hints = get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    prefix = f"{key}." if key else ""
    for name in values:
        if name not in fields:
            raise ValueError(
                f"unknown key {prefix + str(name)!r}: did you mean {_nearest(prefix, str(name), fields, root)!r}?"
            )
    bound: dict[str, Any] = {}
    for name, field in fields.items():
        default = getattr(base, name) if base is not None else _default(field)
        if name in values:
            inner = default if dataclasses.is_dataclass(default) else None
            bound[name] = _bind(hints[name], values[name], prefix + name, inner, root)
        elif default is dataclasses.MISSING:
            raise ValueError(f"{prefix + name}: expected {_name(hints[name])}, got nothing: this key has no default")
        else:
            bound[name] = default
    return cls(**bound)


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default


def _bind(hint: Any, value: Any, key: str, base: Any, root: type[Any]) -> Any:
    """`value` as the type `hint`. Numbers are never made of text, nor truth values of numbers."""
    options = _options(hint)
    if Any in options:
        return value
    if value is None:
        if type(None) in options:
            return None
        raise ValueError(f"{key}: expected {_name(hint)}, got null")
    for option in options:
        if dataclasses.is_dataclass(option) and isinstance(value, Mapping):
            return _dataclass(option, value, key, base if isinstance(base, option) else None, root)
    # An exact match first, so that `int | float` keeps 3 an int.
    for option in options:
        if option in (bool, int, float, str) and type(value) is option:
            if option is float and not math.isfinite(value):
                raise ValueError(f"{key}: expected a finite number, got {value}")  # most comparisons let nan pass
            return value
    for option in options:
        origin, arguments = get_origin(option), get_args(option)
        if option is float and type(value) is int and abs(value) < 1 << 1000:
            return float(value)
        if option is int and type(value) is float and value.is_integer():
            return int(value)  # 1e6 is a float in YAML
        if option is Path and isinstance(value, str):
            return Path(value)
        if origin is Literal:
            # YAML 1.1 reads the bare words no, off, yes and on as truth values.
            words = () if type(value) is not bool else ("yes", "on") if value else ("no", "off")
            for choice in arguments:
                if choice in words or (value == choice and type(value) is type(choice)):
                    return choice
        if (option is list or origin is list) and isinstance(value, list):
            item = arguments[0] if arguments else Any
            return [_bind(item, part, f"{key}[{i}]", None, root) for i, part in enumerate(value)]
        if (option is tuple or origin is tuple) and isinstance(value, list):
            return _tuple(arguments, value, key, root)
        if (option is dict or origin is dict) and isinstance(value, Mapping):
            item = arguments[1] if arguments else Any
            return {str(name): _bind(item, part, f"{key}.{name}", None, root) for name, part in value.items()}
    raise ValueError(f"{key}: expected {_name(hint)}, got {_describe(value)}")


def _tuple(arguments: tuple[Any, ...], value: list[Any], key: str, root: type[Any]) -> tuple[Any, ...]:
    if not arguments or arguments[-1] is Ellipsis:
        items = [arguments[0] if arguments else Any] * len(value)
    elif len(arguments) != len(value):
        raise ValueError(f"{key}: expected a list of {len(arguments)} values, got {len(value)}")
    else:
        items = list(arguments)
    return tuple(
        _bind(item, part, f"{key}[{i}]", None, root) for i, (item, part) in enumerate(zip(items, value, strict=True))
    )


def _options(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _name(hint: Any) -> str:
    """A type in the user's words."""
    words = {
        bool: "true or false",
        int: "an integer",
        float: "a number",
        str: "text",
        type(None): "null",
        Path: "a path",
    }
    named = []
    for option in _options(hint):
        origin = get_origin(option)
        if option in words:
            named.append(words[option])
        elif origin is Literal:
            named.append("one of " + ", ".join(str(choice) for choice in get_args(option)))
        elif dataclasses.is_dataclass(option) or option is dict or origin is dict:
            named.append("a mapping of keys")
        elif option in (list, tuple) or origin in (list, tuple):
            named.append("a list")
        else:
            raise TypeError(f"config: no way to read a value of type {option}")
    return " or ".join(dict.fromkeys(named))


def _describe(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"{str(value).lower()} (true or false)"
    if isinstance(value, Mapping):
        return f"a mapping ({', '.join(map(str, value)) or 'empty'})"
    if isinstance(value, list | tuple):
        return f"a list ({list(value)!r})"
    return f"{value!r} ({ {int: 'an integer', float: 'a number', str: 'text'}.get(type(value), type(value).__name__) })"


def _nearest(prefix: str, name: str, fields: Mapping[str, Any], root: type[Any]) -> str:
    """The key most like the unknown one: a sibling, else a key of that name elsewhere, else the most similar of all."""
    siblings = difflib.get_close_matches(name, fields, 1, 0.6)
    if siblings:
        return prefix + siblings[0]
    everywhere = list(keys(root))
    same = [key for key in everywhere if key.rpartition(".")[2] == name]
    if same:
        return same[0]
    return max(everywhere, key=lambda key: difflib.SequenceMatcher(None, key, prefix + name).ratio())


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return str(value) if isinstance(value, Path) else value


def _first(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
