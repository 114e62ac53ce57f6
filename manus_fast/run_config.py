"""The root of the config: every block that a YAML file may hold, and how a run's parts are opened from it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from manus_fast.agent.config import AgentConfig
from manus_fast.config import load_config, read_values
from manus_fast.envs.config import EnvironmentConfig
from manus_fast.learn.backend import BackendConfig
from manus_fast.learn.curriculum import CurriculumConfig
from manus_fast.learn.dpo import DPOConfig
from manus_fast.learn.expert_iteration import ExpertIterationConfig
from manus_fast.learn.losses import PPOConfig
from manus_fast.learn.presets import group_size, preset
from manus_fast.learn.reward_model import RewardModelConfig
from manus_fast.learn.schedules import Schedule, schedule
from manus_fast.learn.sft import SFTConfig
from manus_fast.modeling.load import load_model
from manus_fast.modeling.lora import LoRAConfig
from manus_fast.rewards.episode import check_rewards
from manus_fast.rollout.endpoint import EndpointConfig
from manus_fast.rollout.scheduler import RolloutConfig
from manus_fast.search.config import SearchConfig


@dataclass
class ModelConfig:
    """The `model` block."""

    path: str = ""
    """A Hugging Face folder or hub name; under rollout.engine openai a teacher's or an endpoint's model name."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the computation; master weights are float32 either way."""
    device: str = "auto"
    """As torch names it; auto: the GPU where there is one."""
    gradient_checkpointing: bool = False
    """Keep only layer inputs for the backward pass and compute the rest again."""
    compile: bool = False
    """Compile the decoder's layers (torch.compile): faster steps on a GPU, for tens of seconds at the start."""
    use_flash_attention_2: bool = False
    """Use flash-attn where it is installed; without it a sentence says so and torch's own kernels serve."""
    lora: LoRAConfig | None = None
    """Train low-rank adapters (PEFT) in place of the weights; null: the weights."""

    def place(self) -> str:
        """The device as torch names it."""
        if self.device != "auto":
            return self.device
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"

    def open(self) -> tuple[Any, Any]:
        """(model, tokenizer) with float32 weights: a trainer casts what it computes with, and keeps these.

        Raises:
            ValueError: no path, or what `load_model` refuses.
        """
        if not self.path:
            raise ValueError("model.path: expected a model folder or hub name, got none (set it or --model_path)")
        return load_model(self.path, "float32", self.place(), self.use_flash_attention_2)

    def adapted(self, model: Any, seed: int) -> Any:
        """What a policy is made of: `model` itself, or with `lora` PEFT's wrapper around it (see LoRAConfig.adapt)."""
        return model if self.lora is None else self.lora.adapt(model, seed)

    @property
    def exports_adapter(self) -> bool:
        """Whether the model that a run leaves is an adapter's folder."""
        return self.lora is not None and self.lora.export == "adapter"


@dataclass
class DataConfig:
    """The `data` block: what supervised fine-tuning learns from."""

    name: str | None = None
    """A JSONL, JSON or parquet file, a folder of them, or a hub name (owner/set or owner/set:split); null: the
    environment's own expert plays."""
    streaming: bool = False
    """Read a hub dataset over the network row by row, instead of from the cache that it is loaded into."""
    expert: str | None = None
    """Kind of expert, by the environment's own names; null: the environment's first."""
    demonstrations: int = 1000
    """Episodes that the expert plays."""

    def __post_init__(self) -> None:
        if self.demonstrations < 1:
            raise ValueError(f"data.demonstrations: expected an integer >= 1, got {self.demonstrations}")


@dataclass
class EvaluationConfig:
    """The `evaluation` block: what a run measures itself on while it trains."""

    split: str = "valid_seen"
    tasks: int | None = 100
    """Tasks, spread over the split; null: all of them."""
    temperature: float = 0.0
    """0 plays greedily."""
    freq: int | None = None
    """Environment steps between evaluations of a policy-gradient run; null: only at the end."""

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ValueError(f"evaluation.temperature: expected a number >= 0, got {self.temperature}")
        if self.freq is not None and self.freq < 1:
            raise ValueError(f"evaluation.freq: expected null or an integer >= 1, got {self.freq}")


@dataclass
class TrainingConfig:
    """The `training` block."""

    total_steps: int = 100_000
    """Environment steps after which a policy-gradient run ends."""
    max_seconds: float | None = None
    """Wall time for it: an iteration begins only where most of it will fit, by the time of those before. Schedules
    follow steps or time, whichever is further on."""
    num_rollouts: int = 128
    """Trajectories an iteration, over all ranks."""
    group_size: int = 1
    """Trajectories of one task among them; group advantages need 2 or more, and their presets set 8."""
    collect: Literal["play", "search"] = "play"
    """What an iteration learns from. play: sampled episodes of num_rollouts / group_size tasks; search: that many tasks
    are searched as the `search` block says, and the proposals of each node are a group (search_trainer.py)."""
    rollout_workers: int | None = None
    """Processes of an environment that plays in them (ALFWorld's own engine); null: the environment's choice."""
    learning_rate: float | Schedule = 1e-6
    gradient_accumulation_steps: int = 1
    """Micro-batches an optimizer step: they only bound memory, the gradient is the same."""
    save_strategy: Literal["no", "steps", "epoch"] = "steps"
    """Checkpoints: steps: every save_freq and at the end; epoch: after each pass (SFT) or iteration; no: none."""
    save_freq: int = 50_000
    """Environment steps (SFT: optimizer steps) between checkpoints."""
    keep_checkpoints: int = 2
    logging_steps: int = 1
    """Iterations (SFT: optimizer steps) between records."""
    save_trajectories: int = 4
    """Episodes of each iteration that go into trajectories.jsonl."""
    output_dir: str = "runs/latest"
    resume: bool = False
    """Go on from the newest whole checkpoint in output_dir."""
    seed: int = 0
    use_wandb: bool = False

    def __post_init__(self) -> None:
        for name in (
            "total_steps",
            "num_rollouts",
            "group_size",
            "gradient_accumulation_steps",
            "save_freq",
            "keep_checkpoints",
            "logging_steps",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"training.{name}: expected an integer >= 1, got {getattr(self, name)}")
        if not self.output_dir.strip():
            raise ValueError("training.output_dir: expected a folder, got none")
        self.output_dir = os.path.expanduser(self.output_dir)  # a shell leaves the ~ of key=~/folder alone
        if self.save_trajectories < 0:
            raise ValueError(f"training.save_trajectories: expected an integer >= 0, got {self.save_trajectories}")
        if not 0 <= self.seed < 1 << 63:
            raise ValueError(f"training.seed: expected an integer in [0, 2^63), got {self.seed}")
        if self.rollout_workers is not None and self.rollout_workers < 1:
            raise ValueError(f"training.rollout_workers: expected null or an integer >= 1, got {self.rollout_workers}")
        if self.max_seconds is not None and not self.max_seconds > 0:
            raise ValueError(f"training.max_seconds: expected null or a number above 0, got {self.max_seconds}")
        if self.num_rollouts % self.group_size:
            raise ValueError(
                f"training.num_rollouts: expected a multiple of training.group_size ({self.group_size}), "
                f"got {self.num_rollouts}"
            )
        schedule(self.learning_rate, "training.learning_rate")


@dataclass
class Config:
    """Everything that a run is made from. The resolved one is written beside the run."""

    algorithm: str = "ppo"
    """A preset of the `ppo` block (learn/presets.py); keys that are set otherwise win."""
    model: ModelConfig = field(default_factory=ModelConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    rewards: dict[str, float] = field(default_factory=dict)
    """What a turn's reward is made of: part → weight (rewards/shaping.py); empty: the environment's own reward."""
    reward_fn: str | None = None
    """Short for `rewards` with this one part at weight 1, in place of that block."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    search: SearchConfig = field(default_factory=SearchConfig)
    endpoint: EndpointConfig = field(default_factory=EndpointConfig)
    ppo: PPOConfig = field(default_factory=PPOConfig)
    sft: SFTConfig = field(default_factory=SFTConfig)
    dpo: DPOConfig = field(default_factory=DPOConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    backend: BackendConfig = field(default_factory=BackendConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    expert_iteration: ExpertIterationConfig = field(default_factory=ExpertIterationConfig)

    def __post_init__(self) -> None:
        if self.reward_fn is not None:
            self.rewards, self.reward_fn = {self.reward_fn: 1.0}, None
        check_rewards(self.rewards)

    @classmethod
    def load(cls, path: str | os.PathLike[str] | None = None, overrides: Sequence[str] = ()) -> Config:
        """Reads a YAML file and dotted overrides over the algorithm's preset.

        Raises:
            ValueError: see config.load_config; an unknown algorithm.
        """
        algorithm = read_values(path, overrides).get("algorithm", cls.algorithm)
        if not isinstance(algorithm, str):
            raise ValueError(f"algorithm: expected a name, got {algorithm!r}")
        beneath = {"ppo": preset(algorithm), "training": {"group_size": group_size(algorithm)}}
        return load_config(cls, path, overrides, beneath=beneath)
