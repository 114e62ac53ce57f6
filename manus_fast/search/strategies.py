"""The strategies by name."""

from __future__ import annotations

from manus_fast.search.base import Strategy
from manus_fast.search.beam import beam
from manus_fast.search.config import SearchConfig
from manus_fast.search.dfsdt import dfsdt
from manus_fast.search.episodes import best_of_n, greedy
from manus_fast.search.got import got
from manus_fast.search.mcts import MCTS
from manus_fast.search.tot import tot

_BY_NAME: dict[str, Strategy] = {
    "greedy": greedy,
    "best_of_n": best_of_n,
    "beam": beam,
    "tot": tot,
    "got": got,
    "dfsdt": dfsdt,
}


def make_strategy(config: SearchConfig, slots: int) -> Strategy:
    """The strategy that `config.strategy` names, for at most `slots` trees at a time."""
    return MCTS(config, slots) if config.strategy == "mcts" else _BY_NAME[config.strategy]
