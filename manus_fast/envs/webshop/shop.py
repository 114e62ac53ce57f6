"""The environment `webshop`: shoppers in a store, in batches; the splits of its goals; an expert."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from manus_fast.envs.base import InlineEnvs, Task
from manus_fast.envs.webshop import store as stores
from manus_fast.envs.webshop.files import MOST_GOALS
from manus_fast.envs.webshop.nouns import tagger
from manus_fast.envs.webshop.pages import MODES, PER_PAGE, Pages, State
from manus_fast.envs.webshop.reward import Goal, reward
from manus_fast.envs.webshop.store import Store

SPLITS = ("train", "dev", "test")
EXPERTS = ("planner", "reader")
PRICE = ", and price lower than"
"""Where the wishes of an instruction end."""
TEST, DEV = 500, 1500
"""Goals below TEST are the split test, those below DEV the split dev."""
INSTRUCTIONS = """You are in a web shop and have an instruction to follow. You act by one command per turn:
search[keywords]: search for products
click[value]: click on a button, a product or an option of the page
Choose the options that are asked for before you click[buy now]."""


class WebShopBatch:
    """`EnvBatch` over shoppers in one store."""

    def __init__(self, shop: Store, slots: int, max_steps: int, pages: Pages, nouns: Callable[[str], Sequence[str]]):
        self.slots = slots
        self._shop, self._pages, self._max_steps, self._nouns = shop, pages, max_steps, nouns
        self._states: dict[int, State] = {}

    def reset(
        self, slots: Sequence[int], tasks: Sequence[Task], seeds: Sequence[int]
    ) -> tuple[list[str], list[dict[str, Any]]]:
        """Starts one task a slot; the worlds have no chance in them."""
        for slot, task, _ in zip(slots, tasks, seeds, strict=True):
            self._states[slot] = State(task.data["goal"])
        states = [self._states[slot] for slot in slots]
        return [self._pages.observe(state) for state in states], [self._info(state, 0.0) for state in states]

    def step(
        self, slots: Sequence[int], actions: Sequence[str]
    ) -> tuple[list[str], np.ndarray, np.ndarray, np.ndarray, list[dict[str, Any]]]:
        """Plays one command a slot: texts, reward float32 `[n]`, terminated and truncated bool `[n]`, infos."""
        texts, infos = [], []
        rewards, over = np.zeros(len(slots), np.float32), np.zeros((2, len(slots)), bool)
        for i, (slot, action) in enumerate(zip(slots, actions, strict=True)):
            state, bought = self._pages.act(self._state(slot), action)
            state = self._states[slot] = state._replace(steps=state.steps + 1)
            score = 0.0
            if bought:
                score = rewards[i] = self._score(state)
            over[:, i] = bought, not bought and state.steps >= self._max_steps
            texts.append(self._pages.observe(state))
            infos.append(self._info(state, score))
        return texts, rewards, over[0], over[1], infos

    def expert(self, slots: Sequence[int], kind: str | None = None) -> tuple[list[str], list[str]]:
        """The next command of an expert that knows which of the products found is the goal's, and why.

        Args:
            kind: planner (default) searches for the goal's kind of product, attributes and options, and reader for the
                words of the instruction as they stand, up to the price.
        """
        if kind not in (None, *EXPERTS):
            raise ValueError(f"data.expert: expected one of {', '.join(EXPERTS)}, got {kind!r}")
        moves = [_advise(self._shop, self._state(slot), self._pages.per_page, kind == "reader") for slot in slots]
        return [action for action, _ in moves], [thought for _, thought in moves]

    def clone(self, src: int, dst: int) -> None:
        self._states[dst] = self._state(src)  # immutable: shared until one of the two moves on

    def save(self, slot: int) -> bytes:
        return self._state(slot).to_bytes()

    def restore(self, slot: int, state: bytes) -> None:
        self._states[slot] = State.from_bytes(state)

    def close(self) -> None:
        self._states.clear()

    def _score(self, state: State) -> float:
        goal, _ = self._shop.goal(state.goal)
        return reward(self._shop.product(state.row), goal, [value for _, value in state.options], self._nouns)

    def _state(self, slot: int) -> State:
        if slot not in self._states:
            raise ValueError(f"slots: expected one with a task, got {slot}")
        return self._states[slot]

    def _info(self, state: State, score: float) -> dict[str, Any]:
        return {"admissible": self._pages.page(state).commands, "success": score == 1.0, "score": score}


def _advise(shop: Store, state: State, per_page: int, reads: bool) -> tuple[str, str]:
    goal, row = shop.goal(state.goal)
    if state.page == "search":
        words = " ".join([goal.query, *goal.attributes, *goal.options.values()])  # what the instruction says
        if reads:
            words = goal.instruction.partition(PRICE)[0].removeprefix("Find me ")
        return f"search[{words.lower()}]", "search for what is wanted"
    if state.page == "results":
        found = shop.search(state.query)
        if row in found[(state.number - 1) * per_page : state.number * per_page]:
            return f"click[{goal.asin.lower()}]", "this product fits"
        later = row in found[state.number * per_page :]
        return ("click[next >]", "look further") if later else ("click[back to search]", "search again")
    if state.page == "sub":
        return "click[< prev]", "back to the product"
    if state.row != row:
        return "click[back to search]", "another product is wanted"
    missing = _missing(shop, state, goal, row)
    if missing is not None:
        return f"click[{missing[1]}]", f"choose the {missing[0]}"
    return "click[buy now]", "everything is chosen"


def _missing(shop: Store, state: State, goal: Goal, row: int) -> tuple[str, str] | None:
    """The first option that the product offers as it is wanted and that is not chosen yet."""
    chosen, wanted = dict(state.options), {value.lower() for value in goal.options.values()}
    for name, values in shop.product(row).options.items():
        fitting = next((value.lower() for value in values if value.lower() in wanted), None)
        if name in goal.options:
            fitting = goal.options[name].lower()
        if fitting is not None and chosen.get(name) != fitting:
            return name, fitting
    return None


class WebShop:
    """`Environment` `webshop`: over a generated catalogue, or over the project's own data files.

    Options:
        max_steps: commands after which an episode is cut (15).
        mode: how pages read: html, text (the default), text_rich or url.
        per_page: products on a page of results (10, as in the original).
        num_products, num_goals, seed: of the generated catalogue (5 040, 3 500, 0); with `data`, `num_products` takes
            the first ones of the file, and goals come as the file has them.
        data: a folder with items_shuffle*.json and items_ins*.json; null: the generated catalogue.
        human_goals: the goals of items_human_ins.json (default) or synthetic ones.
        nouns: rule, spacy, or auto: spacy where it is installed. What was used stands in results.
        train_from: the first goal of the split train: 1500, or 500, which takes dev's goals too (verl-agent's split).
        backend: native or auto.

    Goals 0–499 are the split test, 500–1499 dev, the rest train. Raises ValueError for a value it cannot serve.
    """

    name = "webshop"
    splits = SPLITS
    task_types = ("buy",)
    instructions = INSTRUCTIONS

    def __init__(
        self, max_steps: int = 15, mode: str = "text", per_page: int = PER_PAGE, num_products: int | None = None,
        num_goals: int | None = None, seed: int = 0, data: str | None = None, human_goals: bool = True,
        nouns: str = "auto", train_from: int = DEV, backend: str = "native",
    ):  # fmt: skip
        if mode not in MODES:
            raise ValueError(f"mode: expected one of {', '.join(MODES)}, got {mode!r}")
        if backend not in ("native", "auto"):
            raise ValueError(f"backend: expected native or auto, got {backend!r}")
        if type(train_from) is not int or train_from not in (TEST, DEV):
            raise ValueError(f"train_from: expected {DEV} or {TEST}, got {train_from!r}")
        if type(seed) is not int:
            raise ValueError(f"seed: expected an integer, got {seed!r}")
        if type(human_goals) is not bool:
            raise ValueError(f"human_goals: expected true or false, got {human_goals!r}")
        if data is not None and not isinstance(data, str):
            raise ValueError(f"data: expected a folder or null, got {data!r}")
        for name, value, least in (("max_steps", max_steps, 1), ("per_page", per_page, 1),
                                   ("num_products", num_products, 1), ("num_goals", num_goals, DEV + 1)):  # fmt: skip
            if value is None and name in ("num_products", "num_goals"):
                continue
            if type(value) is not int or not least <= value <= MOST_GOALS:  # true and false are no numbers here
                raise ValueError(f"{name}: expected an integer from {least} to {MOST_GOALS:,}, got {value!r}")
        if data is not None and num_goals is not None:
            raise ValueError(f"num_goals: expected none beside data, whose files hold the goals, got {num_goals!r}")
        tagged, self._nouns = tagger(nouns)
        if data is None:
            self._open = partial(stores.generated, num_products or 5040, num_goals or 3500, seed)
        else:
            self._open = partial(stores.from_files, data, num_products, human_goals)
        self.max_steps, self._mode, self._per_page, self._first = max_steps, mode, per_page, train_from
        self.settings = {
            "nouns": tagged, "mode": mode, "per_page": per_page, "max_steps": max_steps, "train_from": train_from,
        }  # fmt: skip
        """What results say about how they came about."""

    def readable(self, observation: str) -> str:
        """An observation as `manus-fast play` shows it to a person: one part of the page a line."""
        return observation.replace(" [SEP] ", "\n") if self._mode == "text" else observation

    def tasks(self, split: str) -> list[Task]:
        if split not in SPLITS:
            raise ValueError(f"split: expected one of {', '.join(SPLITS)}, got {split!r}")
        shop = self._open()
        if shop.goals <= DEV:
            raise ValueError(
                f"environment.options.data: expected more than {DEV} goals, which test and dev take, got {shop.goals}"
            )
        numbers = {"test": range(TEST), "dev": range(TEST, DEV), "train": range(self._first, shop.goals)}[split]
        return [Task(f"webshop/{shop.name}/{n}", "buy", split, {"goal": n}) for n in numbers]

    def make_batch(self, slots: int) -> WebShopBatch:
        shop = self._open()
        return WebShopBatch(shop, slots, self.max_steps, Pages(shop, self._mode, self._per_page), self._nouns)

    def make_async(self, slots: int) -> InlineEnvs:
        return InlineEnvs(self.make_batch(slots))
