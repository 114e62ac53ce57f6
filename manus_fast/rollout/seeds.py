"""Seeds and random numbers that depend on names, never on order: every draw is a pure function of its counters.

The mixer is the one of csrc/common/rng.h: splitmix64's finaliser (Steele, Lea, Flood, "Fast splittable pseudorandom
number generators", OOPSLA 2014). Seeds are 63 bits wide, so that every consumer's int64 holds them.
"""

from __future__ import annotations

import functools

import numpy as np

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def mix64(x: int) -> int:
    """The mixer on Python integers modulo 2^64."""
    x = (x + _GOLDEN) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def derive(*parts: int) -> int:
    """A seed in [0, 2^63) from any integers; the order of the parts matters."""
    return _mixed(*parts) >> 1


def _mixed(*parts: int) -> int:
    key = 0
    for part in parts:
        key = mix64(key ^ (part & _MASK))
    return key


_of_member = functools.lru_cache(1 << 14)(_mixed)


def episode_seed(run_seed: int, iteration: int, group: int) -> int:
    """What the world of a group is reset with: all members of a group play the same instance."""
    return derive(run_seed, iteration, group)


def turn_seed(episode: int, group: int, member: int, turn: int) -> int:
    """What a reply is sampled with. `episode` is the `episode_seed`."""
    return mix64(_of_member(episode, group, member) ^ turn) >> 1  # derive(episode, group, member, turn)


def uniforms(seeds: np.ndarray, counters: np.ndarray) -> np.ndarray:
    """float64 in [0, 1) with 53 bits, one for each pair (seed, counter).

    Args:
        seeds: uint64 [n].
        counters: uint64 [n], e.g. the index of the token to sample.
    """
    with np.errstate(over="ignore"):
        bits = _mix64_array(_mix64_array(seeds) ^ counters)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix64_array(x: np.ndarray) -> np.ndarray:
    x = x + np.uint64(_GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
