"""The shop's pages and the environment `webshop`: search, results, item, sub page, done, in four observation modes."""

from __future__ import annotations

import html
import json
import re
import sqlite3
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from manus_fast.envs.base import InlineEnvs, Task
from manus_fast.envs.webshop.catalogue import goals, products
from manus_fast.envs.webshop.reward import Goal, Product, reward

MODES = ("html", "text", "text_rich", "url")
SPLITS = ("train", "dev", "test")
SUBPAGES = ("description", "features", "reviews")
INSTRUCTIONS = """You are in a web shop and have an instruction to follow. You act by one command per turn:
search[keywords]: search for products
click[value]: click on a button, a product or an option of the page
Choose the options that are asked for before you click[buy now]."""

_ACTION = re.compile(r"(search|click)\[(.+)\]", re.DOTALL)
_PER_PAGE, _TOP = 10, 50


class Store:
    """Products, goals in their constant order, and the search index (SQLite FTS5, ranked by BM25)."""

    def __init__(self, catalogue: Sequence[Product], wishes: Sequence[Goal]):
        self.products = {item.asin.lower(): item for item in catalogue}
        self.goals = list(wishes)
        self._order = [item.asin.lower() for item in catalogue]
        self._index = sqlite3.connect(":memory:", check_same_thread=False)
        self._index.execute("create virtual table doc using fts5(text)")
        self._index.executemany("insert into doc(rowid, text) values (?, ?)", enumerate(map(_document, catalogue)))

    def search(self, keywords: str) -> tuple[str, ...]:
        """Lower-cased asins of the best 50 matches, best first; ties in the catalogue's order."""
        words = re.findall(r"\w+", keywords.lower())
        if not words:
            return ()
        query = " OR ".join(f'"{word}"' for word in words)
        found = self._index.execute(
            f"select rowid from doc where doc match ? order by bm25(doc), rowid limit {_TOP}", (query,)
        )
        return tuple(self._order[row] for (row,) in found)


def _document(item: Product) -> str:
    options = ", and ".join(f"{name}: {', '.join(values)}" for name, values in item.options.items())
    return " ".join((item.title, item.description, *item.bullets[:1], options)).lower()


@lru_cache(2)
def store(count: int, wishes: int, seed: int) -> Store:
    """The store of a generated catalogue, one a process however many worlds use it."""
    catalogue = products(count, seed)
    return Store(catalogue, goals(catalogue, wishes, seed))


class Session:
    """One shopper. The whole state is `state`, JSON-compatible."""

    def __init__(self, shop: Store, state: dict[str, Any]):
        self.shop, self.state = shop, state

    @classmethod
    def start(cls, shop: Store, goal: int) -> Session:
        return cls(shop, {"goal": goal, "page": "search", "query": None, "number": 1, "asin": None, "sub": None,
                          "options": {}, "steps": 0})  # fmt: skip

    @property
    def goal(self) -> Goal:
        return self.shop.goals[self.state["goal"]]

    def results(self) -> list[str]:
        found = self.shop.search(self.state["query"])
        start = (self.state["number"] - 1) * _PER_PAGE
        return list(found[start : start + _PER_PAGE])

    def clickables(self) -> list[str]:
        """What `click` takes on this page, in the page's order."""
        page = self.state["page"]
        if page == "search":
            return []
        if page == "results":
            return ["back to search", *(["< prev"] if self.state["number"] > 1 else []), "next >", *self.results()]
        if page == "sub":
            return ["back to search", "< prev"]
        if page == "done":
            return []
        values = (value.lower() for values in self.product.options.values() for value in values)
        return ["back to search", "< prev", *values, *SUBPAGES, "buy now"]

    @property
    def product(self) -> Product:
        return self.shop.products[self.state["asin"]]

    def act(self, action: str) -> tuple[float, bool]:
        """Plays a command: (reward, whether the episode is over). What isn't valid changes nothing."""
        match = _ACTION.fullmatch(action.strip())
        state = self.state
        if match is None or state["page"] == "done":
            return 0.0, False
        kind, value = match[1], match[2].strip().lower()
        if kind == "search":
            if value:
                state.update(page="results", query=value, number=1, asin=None, sub=None, options={})
            return 0.0, False
        if value not in self.clickables():
            return 0.0, False
        if value == "back to search":
            state.update(page="search", query=None, number=1, asin=None, sub=None, options={})
        elif value == "next >":
            state["number"] += 1
        elif value == "< prev" and state["page"] == "results":
            state["number"] -= 1
        elif value == "< prev" and state["page"] == "sub":
            state.update(page="item", sub=None)
        elif value == "< prev":
            state.update(page="results", asin=None, options={})
        elif state["page"] == "results":
            state.update(page="item", asin=value, options={})
        elif value in SUBPAGES:
            state.update(page="sub", sub=value)
        elif value == "buy now":
            state["page"] = "done"
            return reward(self.product, self.goal, list(state["options"].values())), True
        else:
            name = next(n for n, values in self.product.options.items() if value in (v.lower() for v in values))
            state["options"] = {**state["options"], name: value}
        return 0.0, False

    def observe(self, mode: str) -> str:
        """The page in one of MODES."""
        if mode == "url":
            state = self.state
            parts = [state["page"], str(state["goal"]), state["asin"], state["query"], state["sub"]]
            return "/".join(["http://shop", *(str(part).replace(" ", "+") for part in parts if part)])
        pieces = self._pieces()
        if mode == "text":
            return " [SEP] ".join(text for _, text in pieces)
        if mode == "html":
            tags = {"text": "p", "button": "button", "clicked": "b"}
            return "".join(f"<{tags[kind]}>{html.escape(text)}</{tags[kind]}>" for kind, text in pieces)
        marks = {"button": "[button] {} [button_]", "clicked": "[clicked button] {} [clicked button_]", "text": "{}"}
        chosen = [f"You have clicked {value}." for value in self.state["options"].values()]
        return "\n".join([*chosen, *(marks[kind].format(text) for kind, text in pieces)])

    def _pieces(self) -> list[tuple[str, str]]:
        page = self.state["page"]
        head = [("text", "Instruction:"), ("text", self.goal.instruction)]
        if page == "done":
            return [("text", "Thank you for shopping with us!")]
        if page == "search":
            return [("text", "WebShop"), *head, ("button", "Search")]
        head.append(("button", "Back to Search"))
        if page == "results":
            total = len(self.shop.search(self.state["query"]))
            head.append(("text", f"Page {self.state['number']} (Total results: {total})"))
            head += [("button", "< Prev")] if self.state["number"] > 1 else []
            head.append(("button", "Next >"))
            for asin in self.results():
                item = self.shop.products[asin]
                head += [("button", item.asin), ("text", item.title), ("text", f"${item.price:.2f}")]
            return head
        item = self.product
        head.append(("button", "< Prev"))
        if page == "sub":
            reviews = ("No reviews.",)
            texts = {"description": (item.description,), "features": item.bullets, "reviews": reviews}
            return head + [("text", text) for text in texts[self.state["sub"]]]
        for name, values in item.options.items():
            clicked = self.state["options"].get(name)
            head.append(("text", name))
            head += [("clicked" if value.lower() == clicked else "button", value) for value in values]
        head += [("text", item.title), ("text", f"Price: ${item.price:.2f}"), ("text", "Rating: N.A.")]
        return head + [("button", name) for name in ("Description", "Features", "Reviews", "Buy Now")]


class Commands(list):
    """The valid clicks of a page as commands; any search counts as valid too, since the shop takes it anywhere."""

    def __contains__(self, action: object) -> bool:
        if not isinstance(action, str):
            return False
        match = _ACTION.fullmatch(action.strip())
        if match is None or not match[2].strip():
            return False
        return match[1] == "search" or super().__contains__(f"click[{match[2].strip().lower()}]")


class WebShopBatch:
    """`EnvBatch` over sessions of one store."""

    def __init__(self, shop: Store, slots: int, max_steps: int, mode: str):
        self.slots = slots
        self._shop, self._max_steps, self._mode = shop, max_steps, mode
        self._sessions: dict[int, Session] = {}

    def reset(
        self, slots: Sequence[int], tasks: Sequence[Task], seeds: Sequence[int]
    ) -> tuple[list[str], list[dict[str, Any]]]:
        """Starts one task a slot; the worlds have no chance in them."""
        for slot, task, _ in zip(slots, tasks, seeds, strict=True):
            self._sessions[slot] = Session.start(self._shop, task.data["goal"])
        return [self._sessions[slot].observe(self._mode) for slot in slots], [self._info(slot, 0.0) for slot in slots]

    def step(
        self, slots: Sequence[int], actions: Sequence[str]
    ) -> tuple[list[str], np.ndarray, np.ndarray, np.ndarray, list[dict[str, Any]]]:
        """Plays one command a slot: texts, reward float32 `[n]`, terminated and truncated bool `[n]`, infos."""
        texts, infos = [], []
        rewards, over = np.zeros(len(slots), np.float32), np.zeros((2, len(slots)), bool)
        for i, (slot, action) in enumerate(zip(slots, actions, strict=True)):
            session = self._session(slot)
            score, done = session.act(action)
            session.state["steps"] += 1
            rewards[i] = score
            over[:, i] = done, not done and session.state["steps"] >= self._max_steps
            texts.append(session.observe(self._mode))
            infos.append(self._info(slot, score))
        return texts, rewards, over[0], over[1], infos

    def expert(self, slots: Sequence[int], kind: str | None = None) -> tuple[list[str], list[str]]:
        """The next command of an expert that searches for what the instruction says and knows which of the products
        found is the goal's, and why."""
        if kind not in (None, "planner"):
            raise ValueError(f"data.expert: expected planner, got {kind!r}")
        moves = [_advise(self._session(slot)) for slot in slots]
        return [action for action, _ in moves], [thought for _, thought in moves]

    def clone(self, src: int, dst: int) -> None:
        self._sessions[dst] = Session(self._shop, dict(self._session(src).state))

    def save(self, slot: int) -> bytes:
        return json.dumps(self._session(slot).state).encode()

    def restore(self, slot: int, state: bytes) -> None:
        self._sessions[slot] = Session(self._shop, json.loads(state))

    def close(self) -> None:
        self._sessions.clear()

    def _session(self, slot: int) -> Session:
        if slot not in self._sessions:
            raise ValueError(f"slots: expected one with a task, got {slot}")
        return self._sessions[slot]

    def _info(self, slot: int, score: float) -> dict[str, Any]:
        clicks = Commands(f"click[{value}]" for value in self._session(slot).clickables())
        return {"admissible": clicks, "success": score == 1.0, "score": score}


def _advise(session: Session) -> tuple[str, str]:
    goal, state = session.goal, session.state
    if state["page"] == "search":
        words = " ".join([goal.query, *goal.attributes, *goal.options.values()])  # what the instruction says
        return f"search[{words.lower()}]", "search for what is wanted"
    if state["page"] == "results":
        wanted = goal.asin.lower()
        if wanted in session.results():
            return f"click[{wanted}]", "this product fits"
        found = session.shop.search(state["query"])
        later = wanted in found[state["number"] * _PER_PAGE :]
        return ("click[next >]", "look further") if later else ("click[back to search]", "search again")
    if state["page"] == "sub":
        return "click[< prev]", "back to the product"
    if state["asin"] != goal.asin.lower():
        return "click[back to search]", "another product is wanted"
    for name, value in goal.options.items():
        if state["options"].get(name) != value.lower():
            return f"click[{value.lower()}]", f"choose the {name}"
    return "click[buy now]", "everything is chosen"


class WebShop:
    """`Environment` `webshop` over a generated catalogue. Options: max_steps (15), mode (one of MODES; text),
    num_products (5 040), num_goals (3 500), seed (0), backend (native or auto).

    Goals 0–499 are the split test, 500–1499 dev, the rest train. Raises ValueError for a value it cannot serve.
    """

    name = "webshop"
    splits = SPLITS
    task_types = ("buy",)
    instructions = INSTRUCTIONS

    def __init__(
        self, max_steps: int = 15, mode: str = "text", num_products: int = 5040, num_goals: int = 3500, seed: int = 0,
        backend: str = "native",
    ):  # fmt: skip
        if mode not in MODES:
            raise ValueError(f"mode: expected one of {', '.join(MODES)}, got {mode!r}")
        if backend not in ("native", "auto"):
            raise ValueError(f"backend: expected native or auto, got {backend!r}")
        for name, value, least in (("max_steps", max_steps, 1), ("num_products", num_products, 1),
                                   ("num_goals", num_goals, 1501)):  # fmt: skip
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name}: expected an integer >= {least}, got {value!r}")
        self.max_steps, self._mode = max_steps, mode
        self._key = (num_products, num_goals, seed)

    def tasks(self, split: str) -> list[Task]:
        if split not in SPLITS:
            raise ValueError(f"split: expected one of {', '.join(SPLITS)}, got {split!r}")
        products_, count, seed = self._key
        numbers = {"test": range(500), "dev": range(500, 1500), "train": range(1500, count)}[split]
        return [Task(f"webshop/{products_}-{count}-{seed}/{n}", "buy", split, {"goal": n}) for n in numbers]

    def make_batch(self, slots: int) -> WebShopBatch:
        return WebShopBatch(store(*self._key), slots, self.max_steps, self._mode)

    def make_async(self, slots: int) -> InlineEnvs:
        return InlineEnvs(self.make_batch(slots))
