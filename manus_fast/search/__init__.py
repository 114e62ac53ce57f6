"""Tree search: `TreeBatch` is the engine (C++), `reference` its specification in plain Python."""

from manus_fast.search.engine import COLLISION, EVALUATE, FULL, TERMINAL, Leaves, TreeBatch, TreeView

__all__ = ["COLLISION", "EVALUATE", "FULL", "TERMINAL", "Leaves", "TreeBatch", "TreeView"]
