"""WebShop's own data files as products and goals, where the user has them.

    items_shuffle*.json     products: a list of objects
    items_ins*.json         {asin: {attributes, instruction, instruction_attributes}}: attributes, synthetic goals
    items_human_ins.json    {asin: [{instruction, instruction_attributes, instruction_options}]}: goals by people

Which rows are products, how prices are read and how limits are drawn follows the project's loader. What is drawn there
from a generator that is seeded after the draw (a price out of a range, a limit) is drawn here by the product's asin, so
that every machine has the same goals.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manus_fast.envs.webshop.reward import Goal, Product
from manus_fast.paths import check_path

NO_LIMIT = 1_000_000.0
"""The limit of a product that costs so much that no two steps of ten dollars are left above it."""

MOST_GOALS = 5_000_000
"""Goals that a store may have: some 3 GB while it is made."""


@dataclass(frozen=True)
class Source:
    """The files that one store is made from."""

    products: Path
    attributes: Path
    human: Path | None
    num_products: int | None

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(file for file in (self.products, self.attributes, self.human) if file is not None)

    @classmethod
    def find(cls, folder: str, num_products: int | None, human: bool) -> Source:
        """The files in a folder: those with `_1000` in their names for 1 000 products where they are there, the whole
        ones otherwise, of which the first `num_products` are taken.

        Raises:
            ValueError: no such folder, or a file is missing.
        """
        check_path(_KEY, folder)
        root = Path(folder).expanduser()
        if not root.is_dir():
            raise ValueError(f"{_KEY}: expected a folder with WebShop's items_shuffle*.json, got {folder!r}")
        products = _pick(root, "items_shuffle", num_products)
        attributes = _pick(root, "items_ins", num_products)
        people = root / "items_human_ins.json"
        if human and not people.is_file():
            raise ValueError(
                f"environment.options.human_goals: expected items_human_ins.json in {folder!r} for true, found none"
            )
        return cls(products, attributes, people if human else None, num_products)


def _pick(root: Path, stem: str, num_products: int | None) -> Path:
    found = sorted(file for file in root.glob(f"{stem}*.json") if file.is_file())
    small = [file for file in found if file.stem.endswith("_1000")]
    whole = [file for file in found if file not in small]
    chosen = small if small and (num_products == 1000 or not whole) else whole
    if not chosen:
        raise ValueError(f"{_KEY}: expected {stem}*.json in {str(root)!r}, found none")
    return chosen[-1]


def read_source(source: Source) -> tuple[list[Product], list[Goal]]:
    """Products in the file's order, and goals in the order of the constant shuffle.

    Rows without an asin, with one that is "nan", longer than ten characters or taken before are no products, as in the
    project's loader.

    Raises:
        ValueError: a file that cannot be read, is no JSON or has another shape, products or goals that there are none
            of, or more goals than MOST_GOALS; the sentence names the file and the place in it.
    """
    rows = _read(source.products, list)[: source.num_products]
    known = _read(source.attributes, dict)
    products: dict[str, Product] = {}
    for number, row in enumerate(rows):
        at = (source.products.name, number)
        asin = _expect((str, type(None)), _expect(dict, row, *at).get("asin"), *at, "asin")
        if asin is None or not asin.strip() or asin == "nan" or len(asin) > 10 or asin in products:
            continue
        products[asin] = _product(row, at, _texts(_told(known, source, asin).get("attributes", ["DUMMY_ATTR"]),
                                                  source.attributes.name, asin, "attributes"))  # fmt: skip
    if not products:
        raise ValueError(f"{_KEY}: expected products in {source.products.name}, found none")
    goals = _human_goals(source, products) if source.human is not None else _synthetic_goals(source, products, known)
    if not goals:
        wishes = source.attributes if source.human is None else source.human
        raise ValueError(f"{_KEY}: expected goals for the products of {source.products.name} in {wishes.name}, "
                         "found none")  # fmt: skip
    random.Random(233).shuffle(goals)
    return list(products.values()), goals


_KEY = "environment.options.data"
_NOTHING = object()
"""What stands at a key that is not there."""
_WORDS = {dict: "an object", list: "a list", str: "text", type(None): "null", bool: "true or false", int: "a number",
          float: "a number", object: "nothing"}  # fmt: skip


def _read(file: Path, kind: type) -> Any:
    try:
        value = json.loads(file.read_bytes())
    except OSError as error:
        raise ValueError(f"{_KEY}: expected a file that can be read, got {str(file)!r} ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{_KEY}: expected JSON in {str(file)!r}, got something else ({error})") from error
    return _expect(kind, value, file.name)


def _expect(kinds: type | tuple[type, ...], value: Any, *way: str | int) -> Any:
    """The value, where it is of one of the kinds, and text can be written; `way` leads to it: a file's name, keys."""
    if isinstance(value, kinds):
        if not isinstance(value, str) or value.isascii() or _encodable(value):
            return value
        got = "text with half a character"
    else:
        got = _WORDS[type(value)]
    wanted = " or ".join(_WORDS[kind] for kind in (kinds if isinstance(kinds, tuple) else (kinds,)))
    raise ValueError(f"{_KEY}: expected {wanted} at {_place(way)}, got {got}")


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON's \u escapes can write one half of a pair
        return False
    return True


def _place(way: tuple[str | int, ...]) -> str:
    """items_shuffle.json[3].name; keys that are no plain word stand in brackets."""
    file, *keys = way
    return str(file) + "".join(
        f".{key}" if re.fullmatch(r"[a-z_]+", str(key)) else f"[{repr(key)[:60]}]" for key in keys
    )


def _texts(value: Any, *way: str | int) -> tuple[str, ...]:
    return tuple(_expect(str, text, *way, number) for number, text in enumerate(_expect(list, value, *way)))


def _field(row: dict[str, Any], name: str, at: tuple[str | int, ...], *kinds: type) -> Any:
    return _expect(kinds, row.get(name, _NOTHING), *at, name)


def _told(known: dict[str, Any], source: Source, asin: str) -> dict[str, Any]:
    """What the file of attributes says of a product."""
    return _expect(dict, known.get(asin, {}), source.attributes.name, asin)


def _product(row: dict[str, Any], at: tuple[str | int, ...], attributes: tuple[str, ...]) -> Product:
    asin, bullets = row["asin"], _field(row, "small_description", at, list, str, type(None))
    if isinstance(bullets, list):
        bullets = [_expect((str, type(None)), text, *at, "small_description", n) for n, text in enumerate(bullets)]
    else:
        bullets = [bullets]
    pricing = _expect((str, type(None)), row.get("pricing"), *at, "pricing")
    try:
        price, tag = read_price(pricing, asin)
    except ValueError as error:
        raise ValueError(f"{_KEY}: {error} at {_place((*at, 'pricing'))}") from error
    return Product(
        asin, _field(row, "query", at, str).lower().strip(), _field(row, "product_category", at, str),
        _field(row, "name", at, str), _field(row, "full_description", at, str, type(None)) or "",
        tuple(text or "" for text in bullets), attributes, _options(row, at), price, tag,
    )  # fmt: skip


def _options(row: dict[str, Any], at: tuple[str | int, ...]) -> dict[str, tuple[str, ...]]:
    """Each option's values as they can be clicked: on one line, and not empty. Without any it is none."""
    given = _field(row, "customization_options", at, dict, str, type(None)) or {}
    at = (*at, "customization_options")
    options = {}
    for name, entries in _expect(dict, given, *at).items():
        _expect(str, name, *at, name)
        values = []
        for number, entry in enumerate(_expect((list, type(None)), entries, *at, name) or ()):
            value = _field(_expect(dict, entry, *at, name, number), "value", (*at, name, number), str)
            values.append(" ".join(value.replace("/", " | ").lower().split()))
        if any(values):
            options[name.lower()] = tuple(value for value in values if value)
    return options


def read_price(text: str | None, asin: str) -> tuple[float, str]:
    """(price, what the pages show) of "$9.99" or "$9.99 - $19.99"; 100 dollars where there is none.

    A range's price is drawn uniformly from it, by the asin.

    Raises:
        ValueError: after a $ stands no number.
    """
    parts = [re.sub(r"[^\d.]", "", part) for part in (text or "").split("$")[1:]][:2]
    if not all(re.fullmatch(r"\d{1,12}(\.\d*)?|\.\d+", part) for part in parts):
        raise ValueError(f"expected prices such as $9.99, got {text[:60]!r}")
    prices = list(map(float, parts))
    if not prices:
        return 100.0, "$100.0"
    if len(prices) == 1:
        return prices[0], f"${prices[0]}"
    return random.Random(f"price {asin}").uniform(*prices), f"${prices[0]} to ${prices[1]}"


def price_limit(price: float, key: str) -> tuple[float, str]:
    """(limit, words of the instruction): two of the next four multiples of ten up to 990, the larger of them."""
    above = [10.0 * step for step in range(1, 100) if 10.0 * step > price][:4]
    if len(above) < 2:
        return NO_LIMIT, ""
    limit = max(random.Random(f"limit {key}").sample(above, 2))
    return limit, f", and price lower than {limit:.2f} dollars"


def _human_goals(source: Source, products: dict[str, Product]) -> list[Goal]:
    """The goals that people wrote for the products; those without attributes are left out."""
    people, goals = _read(source.human, dict), []
    for item in products.values():
        file = source.human.name
        for number, wish in enumerate(_expect(list, people.get(item.asin, []), file, item.asin)):
            at = (file, item.asin, number)
            wanted = _field(_expect(dict, wish, *at), "instruction_attributes", at, list)
            if not wanted:
                continue
            text = _field(wish, "instruction", at, str)
            given = _field(wish, "instruction_options", at, list, dict)
            named = given.items() if isinstance(given, dict) else ((str(n), value) for n, value in enumerate(given))
            options = {name: _expect(str, value, *at, "instruction_options", name) for name, value in named}
            limit, words = price_limit(item.price, f"{item.asin} {text}")
            goals.append(
                Goal(item.asin, item.query, item.category, item.title,
                     _texts(wanted, *at, "instruction_attributes"), options, limit, text.strip(".") + words)
            )  # fmt: skip
    return goals


def _synthetic_goals(source: Source, products: dict[str, Product], known: dict[str, Any]) -> list[Goal]:
    """One goal for every combination of a product's options, all of a product with one limit."""
    goals: list[Goal] = []
    for item in products.values():
        told, at = _told(known, source, item.asin), (source.attributes.name, item.asin)
        text = _expect((str, type(None)), told.get("instruction"), *at, "instruction")
        if text is None:
            continue
        wanted = _texts(told.get("instruction_attributes", _NOTHING), *at, "instruction_attributes")
        combinations = math.prod(map(len, item.options.values()))
        if len(goals) + combinations > MOST_GOALS:
            raise ValueError(
                f"environment.options.num_products: expected so few products that their options have at most "
                f"{MOST_GOALS:,} combinations, each of which is a goal, got more with {item.asin} of "
                f"{source.products.name}, which has {combinations:,}"
            )
        limit, price = price_limit(item.price, item.asin)
        names = sorted(item.options)
        for values in itertools.product(*(item.options[name] for name in names)):
            options = dict(zip(names, values, strict=True))
            choice = ", and ".join(f"{name}: {value}" for name, value in options.items())
            goals.append(
                Goal(item.asin, item.query, item.category, item.title, wanted, options, limit,
                     f"{text}{' with ' if choice else ''}{choice}{price}")
            )  # fmt: skip
    return goals
