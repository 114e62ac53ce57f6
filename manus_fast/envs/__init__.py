"""Environments: importing this package registers those that come with it, and imports neither torch nor an engine."""

from typing import Any

from manus_fast.envs import alfworld as alfworld
from manus_fast.envs.base import Environment, make, register, registered

__all__ = ["Environment", "alfworld", "make", "register", "registered"]


def _household(**options: Any) -> Environment:
    from manus_fast.envs.household import Household

    return Household(**options)


register("household", _household)


def _webshop(**options: Any) -> Environment:
    from manus_fast.envs.webshop.shop import WebShop

    return WebShop(**options)


register("webshop", _webshop)
