"""Learning from rows: one policy-gradient core and supervised fine-tuning, over one policy and one backend.

`update.py` and `sft.py` open with an example each.
"""

from manus_fast.learn.advantages import Episodes
from manus_fast.learn.backend import BackendConfig, make_backend
from manus_fast.learn.losses import PPOConfig
from manus_fast.learn.policy import Policy, Reference
from manus_fast.learn.sft import SFTConfig, train_sft
from manus_fast.learn.update import PolicyGradientUpdate

__all__ = [
    "BackendConfig",
    "Episodes",
    "PPOConfig",
    "Policy",
    "PolicyGradientUpdate",
    "Reference",
    "SFTConfig",
    "make_backend",
    "train_sft",
]
