"""The shop's pages: what a shopper's state is, what a command does to it, and how a page reads in four modes.

A state is an immutable tuple, so a clone shares it. A page without the instruction is the same for every shopper who
stands on it: it is rendered once and kept, as long as it is among those that were looked at last.
"""

from __future__ import annotations

import html
import json
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from manus_fast.envs.webshop.reward import Product
from manus_fast.envs.webshop.store import Store

MODES = ("html", "text", "text_rich", "url")
SUBPAGES = ("description", "features", "reviews")
PER_PAGE = 10

_ACTION = re.compile(r"(search|click)\[(.+)\]", re.DOTALL)


class State(NamedTuple):
    """Where a shopper is. Everything that the future depends on."""

    goal: int
    page: str = "search"
    """search, results, item, sub or done."""
    query: str = ""
    number: int = 1
    """Of the page of results."""
    row: int = -1
    """The product that is looked at."""
    sub: str = ""
    options: tuple[tuple[str, str], ...] = ()
    """(name, value) in the order of choosing."""
    visited: tuple[int, ...] = ()
    """Rows of products that were opened."""
    steps: int = 0

    def to_bytes(self) -> bytes:
        return json.dumps(self, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> State:
        fields = json.loads(data)
        fields[6] = tuple((name, value) for name, value in fields[6])
        fields[7] = tuple(fields[7])
        return cls(*fields)


class Commands(list):
    """The valid clicks of a page as commands; any search counts as valid too, since the shop takes it anywhere."""

    def __contains__(self, action: object) -> bool:
        parsed = parse(action) if isinstance(action, str) else None
        return parsed is not None and (parsed[0] == "search" or super().__contains__(f"click[{parsed[1]}]"))


def parse(action: str) -> tuple[str, str] | None:
    """(search or click, lower-cased argument), or None for what is no command."""
    match = _ACTION.fullmatch(action.strip())
    value = match[2].strip().lower() if match else ""
    return (match[1], value) if match and value else None


@dataclass(frozen=True, slots=True)
class Page:
    """A rendered page, all but its instruction. `clicks` maps what `click` takes to (kind, argument)."""

    before: str
    after: str
    clicks: dict[str, tuple[str, str | int]]
    commands: Commands


class Pages:
    """Pages of a store in one mode. `page(state)` costs a look-up where that page is known."""

    def __init__(self, store: Store, mode: str, per_page: int = PER_PAGE):
        self.store, self.mode, self.per_page = store, mode, per_page
        self._rendered = lru_cache(1024)(self._render)

    def page(self, state: State) -> Page:
        # Only the rich mode shows which products were opened, and only on pages of results.
        visited = state.visited if self.mode == "text_rich" and state.page == "results" else ()
        return self._rendered(state[1:7], visited)

    def observe(self, state: State) -> str:
        """What the shopper sees."""
        if self.mode == "url":
            return _url(state, self.store)
        page = self.page(state)
        if state.page == "done":
            return page.before
        instruction = self.store.goal(state.goal)[0].instruction
        return f"{page.before}{html.escape(instruction) if self.mode == 'html' else instruction}{page.after}"

    def act(self, state: State, action: str) -> tuple[State, bool]:
        """(the state after a command, whether something was bought); what isn't valid changes nothing."""
        parsed = parse(action)
        if parsed is None or state.page == "done":
            return state, False
        kind, value = parsed
        if kind == "search":
            return state._replace(page="results", query=value, number=1, row=-1, sub="", options=()), False
        found = self.page(state).clicks.get(value)
        if found is None:
            return state, False
        return _click(state, *found), found[0] == "buy"

    def _render(self, key: tuple, visited: tuple[int, ...]) -> Page:
        state = State(0, *key, visited)
        pieces, clicks = _pieces(state, self.store, self.per_page)
        before, after = _write(pieces, self.mode) if self.mode != "url" else ("", "")
        return Page(before, after, clicks, Commands(f"click[{value}]" for value in clicks))


def _click(state: State, kind: str, argument: str | int) -> State:
    if kind == "home":
        return State(state.goal, visited=state.visited, steps=state.steps)
    if kind == "turn":
        return state._replace(page="results", number=argument, row=-1, options=())
    if kind == "open":
        visited = state.visited if argument in state.visited else (*state.visited, argument)
        return state._replace(page="item", row=argument, options=(), visited=visited)
    if kind == "sub":
        return state._replace(page="sub", sub=argument)
    if kind == "item":
        return state._replace(page="item", sub="")
    if kind == "buy":
        return state._replace(page="done")
    name, value = json.loads(argument)
    return state._replace(options=(*(pair for pair in state.options if pair[0] != name), (name, value)))


# A piece of a page: (what it is, text, which option it is a value of).
_INSTRUCTION = ("instruction", "", "")


def _pieces(
    state: State, store: Store, per_page: int
) -> tuple[list[tuple[str, str, str]], dict[str, tuple[str, str | int]]]:
    """A page's pieces in order, and what can be clicked on it."""
    if state.page == "done":
        return [("text", "Thank you for shopping with us!", "")], {}
    head = [("text", "Instruction:", ""), _INSTRUCTION]
    if state.page == "search":
        return [("text", "WebShop", ""), *head, ("button", "Search", "")], {}
    pieces, clicks = [*head, ("button", "Back to Search", "")], {"back to search": ("home", "")}
    if state.page == "results":
        rows = store.search(state.query)
        pieces.append(("text", f"Page {state.number} (Total results: {len(rows)})", ""))
        if state.number > 1:
            pieces.append(("button", "< Prev", ""))
            clicks["< prev"] = ("turn", state.number - 1)
        pieces.append(("button", "Next >", ""))
        clicks["next >"] = ("turn", state.number + 1)
        for row in rows[(state.number - 1) * per_page : state.number * per_page]:
            item = store.product(row)
            pieces += [("seen" if row in state.visited else "product", item.asin, ""), ("text", item.title, "")]
            pieces.append(("text", price_text(item), ""))
            clicks[item.asin.lower()] = ("open", row)
        return pieces, clicks
    item = store.product(state.row)
    pieces.append(("button", "< Prev", ""))
    if state.page == "sub":
        clicks["< prev"] = ("item", "")
        texts = {"description": (item.description,), "features": item.bullets, "reviews": ("No reviews.",)}
        return pieces + [("text", text, "") for text in texts[state.sub]], clicks
    clicks["< prev"] = ("turn", state.number)
    chosen = dict(state.options)
    options: dict[str, tuple[str, str | int]] = {}
    for name, values in item.options.items():
        pieces.append(("text", name, ""))
        for value in values:
            pieces.append(("chosen" if chosen.get(name) == value.lower() else "option", value, name))
            options[value.lower()] = ("option", json.dumps([name, value.lower()]))
    pieces += [("text", item.title, ""), ("text", f"Price: {price_text(item)}", ""), ("text", "Rating: N.A.", "")]
    pieces += [("button", name, "") for name in ("Description", "Features", "Reviews", "Buy Now")]
    buttons = {**{name: ("sub", name) for name in SUBPAGES}, "buy now": ("buy", "")}
    # A value that reads like a button takes its place, as in the original.
    return pieces, {**clicks, **options, **{name: to for name, to in buttons.items() if name not in options}}


def price_text(item: Product) -> str:
    return item.price_tag or f"${item.price:.2f}"


_TAGS = {
    "text": "<p>{0}</p>",
    "instruction": "<h4>{0}</h4>",
    "button": '<button class="btn">{0}</button>',
    "product": '<a class="product-link">{0}</a>',
    "seen": '<a class="product-link">{0}</a>',
    "option": '<label><input type="radio" name="{1}" value="{2}">{0}</label>',
    "chosen": '<label><input type="radio" name="{1}" value="{2}" checked>{0}</label>',
}
_MARKS = {
    "text": "{0}",
    "instruction": "{0}",
    "button": "[button] {0} [button_]",
    "product": "\n[button] {0} [button_]",
    "seen": "\n[clicked button] {0} [clicked button_]",
    "option": "  [button] {0} [button_]",
    "chosen": "  [clicked button] {0} [clicked button_]",
}


def _write(pieces: list[tuple[str, str, str]], mode: str) -> tuple[str, str]:
    """The texts before and after the instruction."""
    if mode == "text":
        texts, joint = [text.strip() for _, text, _ in pieces], " [SEP] "
    elif mode == "html":
        escape = html.escape
        texts = [_TAGS[kind].format(escape(text), escape(name), escape(text.lower())) for kind, text, name in pieces]
        joint = ""
    else:
        texts, joint = [_MARKS[kind].format(text) for kind, text, _ in pieces], "\n"
        # The last on the page comes first, for each is put before what was there.
        texts = [f"You have clicked {text}." for kind, text, _ in reversed(pieces) if kind == "chosen"] + texts
    if _INSTRUCTION not in pieces:
        return joint.join(texts), ""
    place = len(texts) - len(pieces) + pieces.index(_INSTRUCTION)
    left, right = ("<h4>", "</h4>") if mode == "html" else ("", "")
    before = joint.join([*texts[:place], ""]) + left
    return before, right + joint.join(["", *texts[place + 1 :]])


def _url(state: State, store: Store) -> str:
    """The original's routes; the session is the goal's number."""
    parts = [str(state.goal)]
    words = state.query.replace(" ", "+")
    options = json.dumps(dict(state.options))
    if state.page == "results":
        parts = ["search_results", *parts, words, str(state.number)]
    elif state.page != "search":
        asin = store.product(state.row).asin
        if state.page == "item":
            parts = ["item_page", *parts, asin, words, str(state.number), options]
        elif state.page == "sub":
            parts = ["item_sub_page", *parts, asin, words, str(state.number), state.sub.capitalize(), options]
        else:
            parts = ["done", *parts, asin, options]
    return "/".join(["http://127.0.0.1:3000", *parts])
