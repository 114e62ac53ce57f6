"""The rules of the tree search, in plain Python: the specification that the C++ engine equals bit for bit.

One `Tree` here is one tree of `engine.TreeBatch`. All arithmetic is in doubles, in the written order, without fused
multiply-add; priors, rewards and the values of closed nodes are float32, because so they are stored. Sources: PUCT
with the parent's mean for unvisited children (Silver et al., Nature 2017), min-max normalised Q (Schrittwieser et
al., Nature 2020), Gumbel root with sequential halving (Danihelka et al., ICLR 2022), UCT (Kocsis and Szepesvari, 2006).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

EVALUATE, TERMINAL, COLLISION, FULL = range(4)
MASK = (1 << 64) - 1


def f32(x: float) -> float:
    return struct.unpack("f", struct.pack("f", x))[0]


@dataclass
class Config:
    rule: str = "puct"
    c: float = 1.25
    discount: float = 1.0
    normalize: bool = False
    gumbel_considered: int = 0
    gumbel_simulations: int = 0
    gumbel_visit: float = 50.0
    gumbel_scale: float = 1.0
    seed: int = 0
    max_nodes: int = 1 << 30
    max_edges: int = 1 << 30


@dataclass(eq=False)
class Node:
    parent: Node | None = None
    action: int = -1
    reward: float = 0.0  # of the edge into this node; 0 until its first answer
    n: int = 0  # visits
    w: float = 0.0  # sum of returns from here on
    flying: int = 0  # descents through here that were not backed up yet: n + 1 and w - 1 each (virtual loss)
    priors: list[float] | None = None  # None: not expanded; an entry below 0: that action failed
    children: list[Node | None] = field(default_factory=list)
    closed: float | None = None  # value of a terminal node
    pending: bool = False

    def mean(self) -> float:
        n = self.n + self.flying
        return (self.w - self.flying) / n if n else 0.0

    def visits(self, action: int) -> int:
        child = self.children[action]
        return child.n + child.flying if child else 0

    def path(self) -> Iterator[Node]:
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent


class Tree:
    def __init__(self, config: Config, index: int = 0):
        self.config, self.index, self.epoch = config, index, 0
        self.empty()

    def empty(self) -> None:
        self.root, self.nodes, self.edges, self.full = Node(), 1, 0, False
        self.low, self.high = math.inf, -math.inf  # of all Q seen
        self.gumbel: tuple[list[float], list[int], list[int]] | None = None

    def q(self, node: Node, action: int) -> float:
        """Q of a child: reward + discount · mean; of an unvisited one the parent's mean value."""
        child = node.children[action]
        return child.reward + self.config.discount * child.mean() if node.visits(action) else node.mean()

    def score(self, node: Node, action: int) -> float:
        config, visits = self.config, node.visits(action)
        total = sum(node.visits(a) for a in range(len(node.priors)))
        if config.rule == "uct" and visits == 0:
            return math.inf
        q = self.q(node, action)
        if config.normalize and self.high > self.low:
            q = (q - self.low) / (self.high - self.low)
        if config.rule == "uct":
            return q + config.c * math.sqrt(math.log(total) / visits)
        return q + config.c * node.priors[action] * math.sqrt(total) / (1 + visits)

    def best(self, node: Node) -> int | None:
        if node is self.root and self.gumbel:
            return self.gumbel_choice(final=False)
        allowed = [a for a, p in enumerate(node.priors) if p >= 0]
        return max(allowed, key=lambda a: self.score(node, a)) if allowed else None  # max: the first of equals

    def select(self) -> tuple[int, Node | None]:
        """One descent. EVALUATE: the leaf waits for `answer`; TERMINAL: backed up already; else nothing happened."""
        if self.config.gumbel_considered and not self.gumbel:
            self.begin_gumbel()
        node = self.root
        while node.priors is not None and node.closed is None:
            action = self.best(node)
            if action is None:  # every action failed
                node.closed = f32(node.mean())
            elif node.children[action]:
                node = node.children[action]
            elif self.full or self.nodes == self.config.max_nodes:
                self.full = True
                return FULL, None
            else:
                node.children[action] = child = Node(node, action)
                node, self.nodes = child, self.nodes + 1
        if node.closed is not None:
            self.backup(node, node.closed, flying=0)
            return TERMINAL, node
        if node.pending:
            return COLLISION, node
        if self.full:
            return FULL, None
        node.pending = True
        for above in node.path():
            above.flying += 1
        return EVALUATE, node

    def answer(self, leaf: Node, priors: list[float], value: float, reward: float = 0.0, terminal: bool = False):
        """Expands or closes a leaf and backs its value up. No action closes it too; no memory leaves it as it is."""
        leaf.pending, leaf.reward = False, f32(reward) if leaf.parent else 0.0
        if terminal or not priors:
            value = leaf.closed = f32(value)
        elif self.edges + len(priors) > self.config.max_edges:
            self.full = True
        else:
            total = 0.0
            for prior in priors:
                total += f32(prior)
            leaf.priors, leaf.children = [f32(f32(p) / total) for p in priors], [None] * len(priors)
            self.edges += len(priors)
        self.backup(leaf, value, flying=1)

    def backup(self, leaf: Node, value: float, flying: int) -> None:
        for node in leaf.path():
            node.w, node.n, node.flying = node.w + value, node.n + 1, node.flying - flying
            mean = node.w / node.n
            q = node.reward + self.config.discount * mean if node.parent else mean
            self.low, self.high = min(self.low, q), max(self.high, q)
            value = node.reward + self.config.discount * value

    def drop(self, leaf: Node, fail: bool = False) -> None:
        """Takes a leaf out of flight; with `fail` its edge is never chosen again."""
        leaf.pending = False
        for node in leaf.path():
            node.flying -= 1
        if fail and leaf.parent:
            leaf.parent.priors[leaf.action] = -1.0

    def advance_root(self, action: int) -> None:
        """The child becomes the root, its subtree stays; an unvisited or failed child gives an empty tree."""
        node, old = None, self.root
        if old.closed is None and old.priors is not None and action >= 0 and old.priors[action] >= 0:
            node = old.children[action]
        self.epoch += 1
        self.empty()
        if node is None or node.n == 0:
            return
        node.parent, node.action, node.reward, self.root, self.nodes = None, -1, 0.0, node, 0
        stack = [node]
        while stack:
            node = stack.pop()
            self.nodes += 1
            if node.n:
                q = node.reward + self.config.discount * node.mean() if node.parent else node.mean()
                self.low, self.high = min(self.low, q), max(self.high, q)
            if node.closed is None and node.priors is not None:
                self.edges += len(node.priors)
                stack.extend(child for child in node.children if child)

    def begin_gumbel(self) -> None:
        if self.root.priors is None or self.root.closed is not None:
            return
        draws, logits = Draws(self, stream=2), []
        for prior in self.root.priors:
            gumbel = -math.log(-math.log(draws.uniform()))
            logits.append(gumbel + (math.log(prior) if prior > 0 else -math.inf))
        before = [self.root.visits(a) for a in range(len(logits))]
        considered = min(self.config.gumbel_considered, len(logits))
        self.gumbel = logits, before, halving_schedule(considered, self.config.gumbel_simulations)

    def gumbel_choice(self, final: bool) -> int | None:
        """Of the actions with the scheduled visits (else, and finally, with the most), the best gumbel score."""
        root, (logits, before, schedule) = self.root, self.gumbel
        since = [root.visits(a) - b for a, b in enumerate(before)]
        allowed = [a for a, p in enumerate(root.priors) if p >= 0]
        if not allowed:
            return None
        qs = {a: self.q(root, a) for a in allowed}
        low, high = min(qs.values()), max(qs.values())
        scale = (self.config.gumbel_visit + max(root.visits(a) for a in allowed)) * self.config.gumbel_scale
        wanted = max(since[a] for a in allowed)
        if not final and sum(since) < len(schedule) and any(since[a] == schedule[sum(since)] for a in allowed):
            wanted = schedule[sum(since)]
        score = {a: logits[a] + scale * ((qs[a] - low) / (high - low) if high > low else 0.0) for a in allowed}
        return max((a for a in allowed if since[a] == wanted), key=score.__getitem__)

    def add_root_noise(self, alpha: float, fraction: float) -> None:
        draws = Draws(self, stream=1)
        noise = [draws.gamma(alpha) for _ in self.root.priors]
        total = 0.0
        for x in noise:
            total += x
        for a, prior in enumerate(self.root.priors):
            if total and prior >= 0:
                self.root.priors[a] = f32((1.0 - fraction) * prior + fraction * (noise[a] / total))


def halving_schedule(considered: int, simulations: int) -> list[int]:
    """Visits that an action must have to be chosen at each simulation: sequential halving over `considered` ones."""
    if considered <= 1:
        return list(range(simulations))
    phases, visits, schedule, left = math.ceil(math.log2(considered)), [0] * considered, [], considered
    while len(schedule) < simulations:
        for _ in range(max(1, simulations // (phases * left))):
            schedule += visits[:left]
            visits[:left] = [v + 1 for v in visits[:left]]
        left = max(2, left // 2)
    return schedule[:simulations]


def mix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


class Draws:
    """The random stream of one root: a function of (seed, tree, how often the root changed, stream, counter)."""

    def __init__(self, tree: Tree, stream: int):
        root = mix64(mix64(mix64(tree.config.seed) ^ tree.index) ^ tree.epoch)
        self.key, self.counter = mix64(mix64(root) ^ stream), 0

    def uniform(self) -> float:
        bits = mix64(self.key ^ self.counter)
        self.counter += 1
        return ((bits >> 12) + 0.5) * 2.0**-52

    def gamma(self, alpha: float) -> float:
        """Marsaglia and Tsang, 2000."""
        boost = 1.0
        if alpha < 1.0:
            boost, alpha = self.uniform() ** (1.0 / alpha), alpha + 1.0
        d = alpha - 1.0 / 3.0
        c = 1.0 / (3.0 * math.sqrt(d))
        while True:
            radius = math.sqrt(-2.0 * math.log(self.uniform()))
            x = radius * math.cos(6.283185307179586 * self.uniform())
            t = 1.0 + c * x
            v = t * t * t
            if t > 0.0 and math.log(self.uniform()) < 0.5 * x * x + d - d * v + d * math.log(v):
                return d * v * boost
