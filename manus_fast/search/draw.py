"""A search tree as an SVG, written like an outline: a row a node, children indented under their parent.

Circles are situations, filled where the environment was asked, hollow where an action was only proposed. A row has the
action, what the environment answered or how the branch ended, and in columns the prior of the reply and, where the tree
engine kept them, visits and mean return. What is played is green and bold. The width depends on the depth alone, so
that a page shows the drawing unscaled; a deep tree is long, not small.
"""

from __future__ import annotations

from html import escape

from manus_fast.search.base import Node, Proposal, Tree

_ROW, _INDENT, _LEFT, _TOP = 19, 16, 18, 92
_ACTION, _ANSWER, _COLUMN = 34, 46, 52  # characters, characters, pixels
_CHARACTER = 6.0  # pixels, of the font size below
_COLOURS = {"played": "#15803d", "dead": "#b91c1c", "open": "#1e40af", "idea": "#6b7280"}
_LEGEND = (("played", "played"), ("dead", "ended, or given up"), ("open", "open"), ("idea", "proposed, never played"))


def draw(tree: Tree, title: str | None = None) -> str:
    """The SVG's text. `title`: None takes the task's last line as the player was shown it."""
    played = {tree.root, *tree.played.path}
    rows = _rows(tree)
    depth = max(level for level, _, _ in rows)
    text = _LEFT + _INDENT * depth + 12
    answer = text + 7.0 * _ACTION  # bold is wider
    columns = [answer + _CHARACTER * _ANSWER + _COLUMN * k for k in range(1, 4)]
    width, height = columns[-1] + 14, _TOP + _ROW * len(rows)
    lines = [line for line in tree.root.observation.splitlines() if line.strip()]
    heading = title or (lines[-1] if lines else tree.task.id)
    facts = f"{tree.config.strategy}: {len(tree.nodes)} nodes, {tree.tokens:,} generated tokens, " + (
        f"solved after {tree.solved_at:,}" if tree.solved_at is not None else "not solved"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}" font-family="DejaVu Sans, Verdana, sans-serif" font-size="10.5">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{_LEFT - 8}" y="22" font-size="14" font-weight="bold">{escape(heading)}</text>',
        f'<text x="{_LEFT - 8}" y="41" fill="#374151">{escape(facts)}</text>',
        *_legend(),
    ]
    for x, name in zip(columns, ("prior", "visits", "return"), strict=True):
        parts.append(f'<text x="{x:g}" y="{_TOP - 14}" text-anchor="end" fill="#374151">{name}</text>')
    above: dict[int, float] = {}  # by level: the height of the last node there, which the next level's edges leave from
    edges: list[str] = []
    marks: list[str] = []
    for row, (level, node, proposal) in enumerate(rows):
        x, y = _LEFT + _INDENT * level, _TOP + _ROW * row
        colour, fill = (_COLOURS["idea"], "white") if node is None else _colour(tree, node, played)
        on_path = node is not None and node in played
        if level:
            edge = f'<path d="M{x - _INDENT} {above[level - 1]:g} V{y} H{x}" fill="none" stroke="{colour}" '
            if on_path:
                marks.insert(0, f'{edge}stroke-width="2.5"/>')  # over the others' edges, under the circles
            else:
                edges.append(f'{edge}stroke-width="1"/>')
        tip = f"<title>{_about(node)}</title>" if node is not None else ""
        marks.append(
            f'<circle cx="{x}" cy="{y}" r="{3 if node is None else 4.5}" fill="{fill}" stroke="{colour}">{tip}</circle>'
        )
        weight = ' font-weight="bold"' if on_path else ""
        first = "start" if proposal is None else _short(proposal.action, _ACTION - 2)
        marks.append(f'<text x="{text}" y="{y + 4}" fill="{colour}"{weight}>{escape(first)}</text>')
        if node is not None:
            above[level] = y
            if level:
                what = _short(_answer(tree, node), _ANSWER)
                marks.append(f'<text x="{answer:g}" y="{y + 4}" fill="#374151">{escape(what)}</text>')
        for x, figure in zip(columns, _figures(node, proposal), strict=True):
            if figure:
                marks.append(f'<text x="{x:g}" y="{y + 4}" text-anchor="end" fill="{colour}">{figure}</text>')
    return "\n".join([*parts, *edges, *marks, "</svg>", ""])


def _rows(tree: Tree) -> list[tuple[int, Node | None, Proposal | None]]:
    """Level, node (None: never played) and proposal (None: the root) of every row, parents before children."""
    rows: list[tuple[int, Node | None, Proposal | None]] = []
    stack: list[tuple[int, Node | None, Proposal | None]] = [(0, tree.root, None)]
    while stack:
        level, node, proposal = stack.pop()
        rows.append((level, node, proposal))
        if node is not None:
            stack += [(level + 1, below.child, below) for below in reversed(node.proposals)]
    return rows


def _legend() -> list[str]:
    parts: list[str] = []
    x = float(_LEFT)
    for key, words in _LEGEND:
        fill = {"played": _COLOURS["played"], "dead": "#fecaca", "open": "#dbeafe", "idea": "white"}[key]
        parts.append(f'<rect x="{x - 4:g}" y="54" width="9" height="9" fill="{fill}" stroke="{_COLOURS[key]}"/>')
        parts.append(f'<text x="{x + 10:g}" y="62" fill="{_COLOURS[key]}">{words}</text>')
        x += 34 + _CHARACTER * len(words)
    return parts


def _figures(node: Node | None, proposal: Proposal | None) -> tuple[str, str, str]:
    """Prior, visits and mean return, empty where there is none."""
    prior = "" if proposal is None else f"{proposal.prior:.2f}"
    if node is None or not node.visits:
        return prior, "", ""
    return prior, str(node.visits), "" if node.q is None else f"{node.q:.2f}"


def _colour(tree: Tree, node: Node, played: set[Node]) -> tuple[str, str]:
    """Stroke and fill."""
    if node in played:
        return _COLOURS["played"], _COLOURS["played"] if node.success or node is tree.root else "white"
    if tree.dead(node):
        return _COLOURS["dead"], "#fecaca"
    return _COLOURS["open"], "#dbeafe"


def _endings(node: Node) -> list[str]:
    ends = (
        ("solved", node.success),
        ("cut", node.truncated),
        ("a circle", node.repeats),
        ("merged", node.merged_into is not None),
        (f"failed: {node.error}", node.error is not None),
    )
    return [name for name, holds in ends if holds]


def _answer(tree: Tree, node: Node) -> str:
    """How the branch ended here, then what the environment said."""
    ends = _endings(node) if node.success or tree.dead(node) else []
    said = " ".join(node.observation.split())
    return ": ".join([", ".join(ends), said]) if ends else said


def _about(node: Node) -> str:
    """What a viewer shows where the pointer rests: the thought, the observation and how it ended."""
    words = [f"Think: {node.proposal.thought}", f"Act: {node.proposal.action}"] if node.proposal is not None else []
    return escape("\n".join([*words, node.observation, *_endings(node)]))


def _short(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
