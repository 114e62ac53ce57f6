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
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manus_fast.envs.webshop.reward import Goal, Product

NO_LIMIT = 1_000_000.0
"""The limit of a product that costs so much that no two steps of ten dollars are left above it."""


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
        root = Path(folder).expanduser()
        if not root.is_dir():
            raise ValueError(f"data: expected a folder with WebShop's items_shuffle*.json, got {folder!r}")
        products = _pick(root, "items_shuffle", num_products)
        attributes = _pick(root, "items_ins", num_products)
        people = root / "items_human_ins.json"
        if human and not people.is_file():
            raise ValueError(f"human_goals: expected items_human_ins.json in {folder!r} for true, found none")
        return cls(products, attributes, people if human else None, num_products)


def _pick(root: Path, stem: str, num_products: int | None) -> Path:
    found = sorted(root.glob(f"{stem}*.json"))
    small = [file for file in found if file.stem.endswith("_1000")]
    whole = [file for file in found if file not in small]
    chosen = small if small and (num_products == 1000 or not whole) else whole
    if not chosen:
        raise ValueError(f"data: expected {stem}*.json in {str(root)!r}, found none")
    return chosen[-1]


def read_source(source: Source) -> tuple[list[Product], list[Goal]]:
    """Products in the file's order, and goals in the order of the constant shuffle.

    Raises:
        ValueError: a file that is no JSON or has another shape; the sentence names it.
    """
    rows = _read(source.products, list)[: source.num_products]
    attributes = _read(source.attributes, dict)
    products: dict[str, Product] = {}
    for number, row in enumerate(rows):
        asin = row.get("asin") if isinstance(row, dict) else None
        if not isinstance(asin, str) or asin == "nan" or len(asin) > 10 or asin in products:
            continue
        try:
            products[asin] = _product(asin, row, attributes.get(asin) or {})
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            what = f"{type(error).__name__}: {error}"
            raise ValueError(f"data: expected a WebShop product in {source.products.name}[{number}], {what}") from error
    if not products:
        raise ValueError(f"data: expected products in {source.products.name}, found none")
    goals: list[Goal] = []
    if source.human is not None:
        people = _read(source.human, dict)
        for item in products.values():
            goals += [made for wish in people.get(item.asin, ()) if (made := _human(item, wish)) is not None]
    else:
        for item in products.values():
            goals += _synthetic(item, attributes.get(item.asin) or {})
    random.Random(233).shuffle(goals)
    return list(products.values()), goals


def _read(file: Path, kind: type) -> Any:
    try:
        value = json.loads(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"data: expected JSON in {str(file)!r}, got something else ({error})") from error
    if not isinstance(value, kind):
        raise ValueError(f"data: expected a JSON {kind.__name__} in {str(file)!r}, got a {type(value).__name__}")
    return value


def _product(asin: str, row: dict[str, Any], known: dict[str, Any]) -> Product:
    bullets = row["small_description"]
    options = {
        name.lower(): tuple(value["value"].strip().replace("/", " | ").lower() for value in values)
        for name, values in (row["customization_options"] or {}).items()
        if values is not None
    }
    price, tag = read_price(row.get("pricing"), asin)
    return Product(
        asin, row["query"].lower().strip(), row["product_category"], row["name"], row["full_description"] or "",
        tuple(text or "" for text in (bullets if isinstance(bullets, list) else [bullets])),
        tuple(known.get("attributes", ["DUMMY_ATTR"])), options, price, tag,
    )  # fmt: skip


def read_price(text: str | None, asin: str) -> tuple[float, str]:
    """(price, what the pages show) of "$9.99" or "$9.99 - $19.99"; 100 dollars where there is none.

    A range's price is drawn uniformly from it, by the asin.
    """
    prices = [float(re.sub(r"[^\d.]", "", part)) for part in (text or "").split("$")[1:]][:2]
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


def _human(item: Product, wish: dict[str, Any]) -> Goal | None:
    if not wish["instruction_attributes"]:
        return None
    limit, words = price_limit(item.price, f"{item.asin} {wish['instruction']}")
    given = wish["instruction_options"]
    options = given if isinstance(given, dict) else {str(number): value for number, value in enumerate(given)}
    return Goal(item.asin, item.query, item.category, item.title, tuple(wish["instruction_attributes"]), dict(options),
                limit, wish["instruction"].strip(".") + words)  # fmt: skip


def _synthetic(item: Product, known: dict[str, Any]) -> list[Goal]:
    """One goal for every combination of the product's options, all with one limit."""
    text = known.get("instruction")
    if text is None:
        return []
    limit, words = price_limit(item.price, item.asin)
    names = sorted(item.options)
    goals = []
    for values in itertools.product(*(item.options[name] for name in names)):
        options = dict(zip(names, values, strict=True))
        wanted = ", and ".join(f"{name}: {value}" for name, value in options.items())
        goals.append(
            Goal(item.asin, item.query, item.category, item.title, tuple(known["instruction_attributes"]), options,
                 limit, f"{text}{' with ' if wanted else ''}{wanted}{words}")
        )  # fmt: skip
    return goals
