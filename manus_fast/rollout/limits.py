"""Limits on what is sent to a paid endpoint: requests and tokens a minute, dollars in all."""

from __future__ import annotations

from collections import deque


class Pace:
    """Lets at most `limit` units through in any `window` seconds. Times are whatever clock the caller keeps.

    A log of the window rather than a token bucket: a bucket that begins full lets twice its limit through in its
    first minute, and the endpoint would answer 429.
    """

    def __init__(self, limit: int | None, window: float = 60.0):
        self._limit, self._window = limit, window
        self._log: deque[tuple[float, float]] = deque()
        self._sum = 0.0

    def wait(self, amount: float, now: float) -> float:
        """Seconds until `amount` may go; 0: at once. More than the limit itself goes when the window is empty."""
        if self._limit is None:
            return 0.0
        while self._log and self._log[0][0] <= now - self._window:
            self._sum -= self._log.popleft()[1]
        excess = self._sum + min(amount, self._limit) - self._limit
        for at, units in self._log:
            if excess <= 0:
                break
            excess -= units
            if excess <= 0:
                return at + self._window - now
        return 0.0

    def note(self, amount: float, now: float) -> None:
        """`amount` goes now."""
        if self._limit is not None:
            self._log.append((now, amount))
            self._sum += amount


class Budget:
    """Dollars that were spent and that requests in flight may spend at most; together never above `limit`.

    Args:
        limit: US dollars, None for no limit.
        price_input, price_output: US dollars a million tokens; None counts as 0 (the cost is then not known).
        spent: by earlier runs.
    """

    def __init__(self, limit: float | None, price_input: float | None, price_output: float | None, spent: float = 0.0):
        self.limit, self.spent, self.reserved = limit, spent, 0.0
        self._input, self._output = price_input or 0.0, price_output or 0.0

    def cost(self, prompt_tokens: int, sampled_tokens: int) -> float:
        return (prompt_tokens * self._input + sampled_tokens * self._output) / 1e6

    def admits(self, bound: float) -> bool:
        return self.limit is None or self.spent + self.reserved + bound <= self.limit

    def reserve(self, bound: float) -> None:
        self.reserved += bound

    def settle(self, bound: float, cost: float) -> None:
        """A request that had reserved `bound` is over and cost `cost`."""
        self.reserved -= bound
        self.spent += cost
