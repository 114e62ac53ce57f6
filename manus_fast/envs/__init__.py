"""Environments: importing this package registers those that come with it, and imports neither torch nor an engine."""

from manus_fast.envs import alfworld as alfworld
