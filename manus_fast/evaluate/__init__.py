"""Fixed panels, their reports, and the comparison of two models on one panel."""

from manus_fast.evaluate.comparison import Comparison, compare
from manus_fast.evaluate.metrics import Report, Summary, TaskRecord, summarize
from manus_fast.evaluate.panels import Panel, evaluate, make_panel

__all__ = ["Comparison", "Panel", "Report", "Summary", "TaskRecord", "compare", "evaluate", "make_panel", "summarize"]
