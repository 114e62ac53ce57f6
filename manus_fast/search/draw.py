"""A search tree as an SVG: one row a leaf, the root on the left, the path that is played in green.

Circles are situations, filled where the environment was asked, hollow where an action was only proposed. A label is
the action with the prior of its reply, then visits and mean return where the tree engine kept them.
"""

from __future__ import annotations

from html import escape

from manus_fast.search.base import Node, Proposal, Tree

_ROW, _COLUMN, _LEFT, _TOP = 22, 215, 24, 64
_CHARACTERS = 24
_COLOURS = {"played": "#15803d", "dead": "#b91c1c", "open": "#1e40af", "idea": "#9ca3af"}


def draw(tree: Tree, title: str | None = None) -> str:
    """The SVG's text. `title`: None takes the task's last line as the player was shown it."""
    played = {tree.root, *tree.played.path}
    parts: list[str] = []
    rows = 0
    depth = 0

    def place(node: Node) -> float:
        """Draws a subtree and returns the height of its root."""
        nonlocal rows, depth
        depth = max(depth, node.depth)
        x = _LEFT + _COLUMN * node.depth
        heights: list[tuple[Proposal, float]] = []
        for proposal in node.proposals:
            if proposal.child is not None:
                heights.append((proposal, place(proposal.child)))
            else:
                depth = max(depth, node.depth + 1)
                heights.append((proposal, _TOP + _ROW * rows))
                rows += 1
        if not heights:
            rows += 1
            y = float(_TOP + _ROW * (rows - 1))
        else:
            y = (heights[0][1] + heights[-1][1]) / 2
        for proposal, height in heights:
            parts.extend(_edge(tree, proposal, x, y, height, played))
        colour, fill = _colour(tree, node, played)
        parts.append(f'<circle cx="{x}" cy="{y:g}" r="5" fill="{fill}" stroke="{colour}"><title>{_about(node)}</title>'
                     "</circle>")  # fmt: skip
        return y

    place(tree.root)
    lines = [line for line in tree.root.observation.splitlines() if line.strip()]
    heading = title or (lines[-1] if lines else tree.task.id)
    facts = f"{tree.config.strategy}: {len(tree.nodes)} nodes, {tree.tokens} generated tokens, " + (
        f"solved after {tree.solved_at}" if tree.solved_at is not None else "not solved"
    )
    width, height = _LEFT + _COLUMN * (depth + 1), _TOP + _ROW * (rows + 1)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">',
            '<rect width="100%" height="100%" fill="white"/>',
            f'<text x="{_LEFT - 8}" y="22" font-size="14" font-weight="bold">{escape(heading)}</text>',
            f'<text x="{_LEFT - 8}" y="40" fill="#4b5563">{escape(facts)}</text>',
            *parts,
            "</svg>",
            "",
        ]
    )


def _edge(tree: Tree, proposal: Proposal, x: float, y: float, end: float, played: set[Node]) -> list[str]:
    child = proposal.child
    colour = _COLOURS["idea"] if child is None else _colour(tree, child, played)[0]
    there, bend = x + _COLUMN, x + 24
    label = f"{_short(proposal.action)} {proposal.prior:.2f}".strip()
    if child is not None and child.visits:
        label += f" · {child.visits} · {child.q:.2f}"
    wide = 2 if child in played else 1
    shapes = [
        f'<path d="M{x + 5:g} {y:g} C{bend:g} {y:g} {x + 8:g} {end:g} {bend + 6:g} {end:g} H{there - 5:g}" fill="none" '
        f'stroke="{colour}" stroke-width="{wide}"/>',
        f'<text x="{bend + 8:g}" y="{end - 3:g}" fill="{colour}">{escape(label)}</text>',
    ]
    if child is None:
        shapes.append(f'<circle cx="{there:g}" cy="{end:g}" r="3" fill="white" stroke="{colour}"/>')
    return shapes


def _colour(tree: Tree, node: Node, played: set[Node]) -> tuple[str, str]:
    """Stroke and fill."""
    if node in played:
        return _COLOURS["played"], _COLOURS["played"] if node.success or node is tree.root else "white"
    if tree.dead(node):
        return _COLOURS["dead"], "#fecaca"
    return _COLOURS["open"], "#dbeafe"


def _about(node: Node) -> str:
    """What a viewer shows where the pointer rests: the thought, the observation and how it ended."""
    words = [f"Think: {node.proposal.thought}", f"Act: {node.proposal.action}"] if node.proposal is not None else []
    ends = (
        ("solved", node.success),
        ("cut", node.truncated),
        ("a circle", node.repeats),
        ("merged", node.merged_into is not None),
        (f"failed: {node.error}", node.error is not None),
    )
    return escape("\n".join([*words, node.observation, *(name for name, holds in ends if holds)]))


def _short(action: str) -> str:
    return action if len(action) <= _CHARACTERS else action[: _CHARACTERS - 1] + "…"
