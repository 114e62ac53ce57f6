"""Tree search: strategies over environment actions (`Searcher`, config.SearchConfig), and the engine beneath (C++
`TreeBatch`, whose specification in plain Python is `reference`)."""

from manus_fast.search.engine import COLLISION, EVALUATE, FULL, TERMINAL, Leaves, TreeBatch, TreeView

__all__ = ["COLLISION", "EVALUATE", "FULL", "TERMINAL", "Leaves", "TreeBatch", "TreeView"]
