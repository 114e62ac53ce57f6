"""What is known about an OpenAI-compatible endpoint: the teachers by name, and the config's `endpoint` block.

Prices are the makers' list prices in US dollars a million tokens (gpt-4o: 2.50 in, 10.00 out; deepseek-reasoner: 0.55
and 2.19) and change: `endpoint.price_input` and `endpoint.price_output` go before them.
"""

from __future__ import annotations

from dataclasses import dataclass

from manus_fast import settings


@dataclass(frozen=True)
class Teacher:
    """A model behind an endpoint, ready to be asked."""

    name: str
    model: str
    """What the endpoint calls it."""
    base_url: str | None = None
    """None: the openai package's own default."""
    api_key: str | None = None
    price_input: float | None = None
    """US dollars a million prompt tokens; None: not known."""
    price_output: float | None = None
    max_tokens: int = 512
    """Sampled tokens of one reply, reasoning included."""
    temperature: float = 0.0
    """Where nothing else is asked for."""
    reasoning: bool = False
    """Its replies begin with reasoning that ends in </think>; it is left out of the conversation."""
    seeds: bool = True
    """The endpoint takes a seed."""


@dataclass(frozen=True)
class _Preset:
    model: str
    endpoint: str
    """Key of settings.ENDPOINTS."""
    base_url: str | None = None
    needs_url: bool = False
    price_input: float | None = None
    price_output: float | None = None
    max_tokens: int = 512
    temperature: float = 0.0
    reasoning: bool = False
    seeds: bool = True


# R1 and QwQ loop when they are sampled greedily; their makers name 0.6.
TEACHERS = {
    "gpt-4o": _Preset("gpt-4o", "openai", price_input=2.5, price_output=10.0),
    "deepseek-r1": _Preset(
        "deepseek-reasoner", "deepseek", "https://api.deepseek.com", price_input=0.55, price_output=2.19,
        max_tokens=8192, temperature=0.6, reasoning=True, seeds=False,
    ),
    "qwq-32b": _Preset(
        "Qwen/QwQ-32B", "qwq", needs_url=True, max_tokens=8192, temperature=0.6, reasoning=True
    ),
}  # fmt: skip


@dataclass
class EndpointConfig:
    """The config's `endpoint` block: how an OpenAI-compatible endpoint is asked, and what it may cost.

    Raises:
        ValueError: a number out of range.
    """

    base_url: str | None = None
    """Such as http://127.0.0.1:8000/v1; null: the teacher's environment variable, else its maker's."""
    model: str | None = None
    """What the endpoint calls the model; null: the preset's word, else model.path as it is."""
    max_tokens: int | None = None
    """Sampled tokens of one reply, reasoning included; null: the teacher's own."""
    reasoning: bool | None = None
    """Leave out what stands before </think>; null: the teacher's own."""
    concurrency: int = 16
    """Requests at the same time."""
    requests_per_minute: int | None = None
    """Most requests in any 60 s; null: no limit of ours."""
    tokens_per_minute: int | None = None
    """Most tokens in any 60 s, prompts (estimated) and max_tokens together; null: no limit of ours."""
    max_cost: float | None = None
    """US dollars after which no request is sent, earlier runs in the same folder included; null: no limit."""
    price_input: float | None = None
    """US dollars a million prompt tokens; null: the teacher's list price."""
    price_output: float | None = None
    timeout: float = 300.0
    """Seconds that one request may take in all."""
    retries: int = 6
    """Further tries of a request after a 408, 409, 429 or 5xx, a timeout, a closed stream or an answer that is none."""
    backoff: float = 1.0
    """Seconds before the first of them, doubled each time up to 60; a Retry-After goes before it where it is longer."""

    def __post_init__(self) -> None:
        for name in ("concurrency", "max_tokens", "requests_per_minute", "tokens_per_minute"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"endpoint.{name}: expected an integer >= 1, got {value}")
        for name in ("max_cost", "price_input", "price_output", "retries", "backoff"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ValueError(f"endpoint.{name}: expected a number >= 0, got {value}")
        if not self.timeout > 0:
            raise ValueError(f"endpoint.timeout: expected a number above 0, got {self.timeout}")


def find_teacher(name: str, config: EndpointConfig) -> Teacher:
    """The teacher of that name: a preset, or whatever the endpoint calls by this name.

    Raises:
        ValueError: no name, a preset without an address, or a cost limit without prices.
    """
    if not name:
        raise ValueError(
            f"model.path: expected a teacher ({', '.join(TEACHERS)}) or an endpoint's model name, got none"
        )
    preset = TEACHERS.get(name, _Preset(name, "openai"))
    variables = settings.ENDPOINTS[preset.endpoint]
    url, key = settings.endpoint(preset.endpoint)
    base_url = config.base_url or url or preset.base_url
    if base_url is None and preset.needs_url:
        raise ValueError(f"endpoint.base_url: expected the address of {name}, got none (set it or {variables[0]})")
    price_input = preset.price_input if config.price_input is None else config.price_input
    price_output = preset.price_output if config.price_output is None else config.price_output
    if config.max_cost is not None and (price_input is None or price_output is None):
        raise ValueError(
            f"endpoint.max_cost: expected endpoint.price_input and endpoint.price_output beside it, got none for {name}"
        )
    return Teacher(
        name=name,
        model=config.model or preset.model,
        base_url=base_url,
        api_key=key,
        price_input=price_input,
        price_output=price_output,
        max_tokens=config.max_tokens or preset.max_tokens,
        temperature=preset.temperature,
        reasoning=preset.reasoning if config.reasoning is None else config.reasoning,
        seeds=preset.seeds,
    )


def strip_reasoning(text: str) -> str:
    """What stands after the last </think>; a reply that never closes its <think> has said nothing yet."""
    _before, closed, after = text.rpartition("</think>")
    if closed:
        return after.strip()
    return text[: text.index("<think>")].strip() if "<think>" in text else text
