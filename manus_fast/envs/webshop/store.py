"""The shop's products, goals and search index: made once a machine, read by every process through memory maps.

A store is a folder in the cache (`MANUS_FAST_CACHE`): records as one JSON text after another with their offsets, and
the arrays of the index. Whoever needs it first makes it under a lock; the folder appears whole or not at all. A process
keeps only the records that it looked at last.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import mmap
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from manus_fast.envs.webshop import catalogue, index
from manus_fast.envs.webshop.files import Source, read_source
from manus_fast.envs.webshop.reward import Goal, Product
from manus_fast.settings import cache_folder

TOP = 50
"""Products that a search finds at most."""

_VERSION = 1
"""Of the format and of the generated catalogue: whatever changes what is written counts it up."""
_ARRAYS = ("words", "starts", "documents", "scores")


class Records:
    """JSON texts in one file, by number, through a memory map."""

    def __init__(self, folder: Path, name: str):
        self._offsets = np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r"))
        with (folder / f"{name}.bin").open("rb") as file:
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, number: int) -> Any:
        return json.loads(self._data[self._offsets[number] : self._offsets[number + 1]])

    @staticmethod
    def write(folder: Path, name: str, records: Iterator[Any]) -> None:
        """Writes NAME.bin and NAME.npy (int64 offsets, one more than records)."""
        offsets = [0]
        with (folder / f"{name}.bin").open("wb") as file:
            for record in records:
                offsets.append(offsets[-1] + file.write(json.dumps(record, ensure_ascii=False).encode()))
        np.save(folder / f"{name}.npy", np.asarray(offsets, np.int64))


class Store:
    """An open store. `name` tells its contents apart from any other's; tasks carry it in their ids."""

    def __init__(self, folder: Path):
        self.name: str = json.loads((folder / "meta.json").read_text())["name"]
        self._products, self._goals = Records(folder, "products"), Records(folder, "goals")
        arrays = {name: np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r")) for name in _ARRAYS}
        self._index = index.Index(**arrays, count=len(self._products))
        # Bounded: what is kept here is kept by every process.
        self.product = lru_cache(512)(self._product)
        self.goal = lru_cache(512)(self._goal)
        self.search = lru_cache(1024)(self._search)

    @property
    def goals(self) -> int:
        return len(self._goals)

    @property
    def products(self) -> int:
        return len(self._products)

    def _product(self, row: int) -> Product:
        asin, query, category, title, description, bullets, attributes, options, price, tag = self._products[row]
        return Product(asin, query, category, title, description, tuple(bullets), tuple(attributes),
                       {name: tuple(values) for name, values in options.items()}, price, tag)  # fmt: skip

    def _goal(self, number: int) -> tuple[Goal, int]:
        """A goal, and the row of the product that it was made from."""
        *fields, row = self._goals[number]
        fields[4] = tuple(fields[4])
        return Goal(*fields), row

    def _search(self, keywords: str) -> tuple[int, ...]:
        """Rows of the best TOP matches, best first; ties in the catalogue's order."""
        return tuple(self._index.search(keywords, TOP))


def document(item: Product) -> str:
    """The text that a product is found by: title, description, first bullet point, options."""
    options = ", and ".join(f"{name}: {', '.join(values)}" for name, values in item.options.items())
    return " ".join((item.title, item.description, *item.bullets[:1], options)).lower()


def write(folder: Path, name: str, products: Sequence[Product], goals: Sequence[Goal]) -> None:
    """Writes a store into an empty folder; there must be products and goals."""
    rows = {item.asin: row for row, item in enumerate(products)}
    Records.write(folder, "products", (list(vars(item).values()) for item in products))
    Records.write(folder, "goals", ([*vars(goal).values(), rows[goal.asin]] for goal in goals))
    made = index.build(map(document, products))
    for array in _ARRAYS:
        np.save(folder / f"{array}.npy", getattr(made, array))
    (folder / "meta.json").write_text(json.dumps({"name": name, "products": len(products), "goals": len(goals)}))


@lru_cache(4)
def generated(products: int, goals: int, seed: int) -> Store:
    """The store of a generated catalogue."""

    def make() -> tuple[list[Product], list[Goal]]:
        made = catalogue.products(products, seed)
        return made, catalogue.goals(made, goals, seed)

    return _open(f"{products}-{goals}-{seed}", make)


@lru_cache(4)
def from_files(folder: str, num_products: int | None, human: bool) -> Store:
    """The store of the project's own data files (see `files.Source`)."""
    source = Source.find(folder, num_products, human)
    state = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in source.files]
    digest = hashlib.sha256(json.dumps([state, num_products, human]).encode()).hexdigest()[:12]
    # Tasks are the same on every machine that has the same files, whenever they were copied there.
    sizes = hashlib.sha256(json.dumps([entry[:2] for entry in state]).encode()).hexdigest()[:6]
    name = f"files-{'human' if human else 'synthetic'}-{num_products or 'all'}-{sizes}"
    return _open(name, lambda: read_source(source), digest)


def _open(name: str, make: Callable[[], tuple[list[Product], list[Goal]]], digest: str = "") -> Store:
    root = cache_folder() / "webshop"
    folder = root / f"v{_VERSION}-{name}{digest and '-'}{digest}"
    if not folder.is_dir():
        try:
            root.mkdir(parents=True, exist_ok=True)
            with _locked(root / f".{folder.name}.lock"):
                if not folder.is_dir():
                    products, goals = make()
                    partial = root / f".{folder.name}.partial"
                    shutil.rmtree(partial, ignore_errors=True)  # of somebody who was killed: the lock is ours
                    try:
                        partial.mkdir()
                        write(partial, name, products, goals)
                        partial.rename(folder)
                    finally:
                        shutil.rmtree(partial, ignore_errors=True)
        except (PermissionError, NotADirectoryError, FileExistsError) as error:
            raise ValueError(
                f"MANUS_FAST_CACHE: expected a folder that can be written for the web shop's store, got {str(root)!r}"
            ) from error
    return Store(folder)


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    descriptor = os.open(file, os.O_CREAT | os.O_RDWR, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
