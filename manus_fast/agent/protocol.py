"""The one specification of how an agent talks: prompt text, parser, format check and SFT target come from here.

A turn in ReAct form (Yao et al., "ReAct: Synergizing Reasoning and Acting in Language Models", ICLR 2023):

    Think: the mug may be in a cabinet
    Act: go to cabinet 1

`Action:` is read like `Act:`. The style "tags" writes the same as `<think>…</think><act>…</act>`; the style
"act" has no thought. The prompt shows exactly what the parser accepts, because both are made from one `_Style`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

NO_ACTION = "(no action)"
"""What the environment is sent when a reply holds no action: fixed, and refused by every world, so that nothing is
guessed out of malformed text."""

STYLES = ("react", "tags", "act")


@dataclass(frozen=True)
class Parsed:
    """What a reply says. `action` is NO_ACTION when no complete action block was found."""

    thought: str
    action: str
    format_ok: bool


@dataclass(frozen=True)
class _Style:
    template: str
    thought: re.Pattern[str] | None
    action: re.Pattern[str]
    mark: str
    """Part of every mark of an action: text without it cannot be taken for one."""


# An action is one non-empty line. `complete` in the last match means that nothing but white space follows it.
_STYLES = {
    "react": _Style(
        "Think: %(thought)s\nAct: %(action)s",
        re.compile(r"Think:[ \t]*(.*?)\s*(?=(?:^|\n|\s)(?:Act|Action):)", re.DOTALL),
        re.compile(r"(?:^|\s)(?:Act|Action):[ \t]*(\S[^\n]*?)[ \t]*(?=\n|$)"),
        "Act",
    ),
    "tags": _Style(
        "<think>%(thought)s</think><act>%(action)s</act>",
        re.compile(r"<think>\s*(.*?)\s*</think>", re.DOTALL),
        re.compile(r"<(?:act|action)>\s*(\S[^\n]*?)\s*</(?:act|action)>", re.DOTALL),
        "<",
    ),
    "act": _Style(
        "Act: %(action)s",
        None,
        re.compile(r"(?:^|\s)(?:Act|Action):[ \t]*(\S[^\n]*?)[ \t]*(?=\n|$)"),
        "Act",
    ),
}


class Protocol:
    """Prompt, parser and target of one style.

    Args:
        style: "react" | "tags" | "act".
        show_admissible: list the environment's admissible actions under each observation.

    Raises:
        ValueError: unknown style.
    """

    def __init__(self, style: str = "react", show_admissible: bool = False):
        if style not in _STYLES:
            raise ValueError(f"agent.style: expected one of {', '.join(STYLES)}, got {style!r}")
        self.style = style
        self.show_admissible = show_admissible
        self._style = _STYLES[style]
        # What stands around the thought and the action: joining them is several times as fast as a template.
        self._around = re.split(r"%\(\w+\)s", self._style.template)

    def system_prompt(self, instructions: str) -> str:
        """The system message: the environment's own instructions, then the reply format."""
        example = self.render("your reasoning", "one command")
        return f"{instructions.strip()}\nReply in this form:\n{example}"

    def user_message(self, observation: str, admissible: Sequence[str] | None = None) -> str:
        """The user message of a turn."""
        if self.show_admissible and admissible:
            return f"{observation}\nAdmissible: {', '.join(admissible)}."
        return observation

    def render(self, thought: str, action: str) -> str:
        """The reply that means (thought, action): the SFT target. `parse(render(t, a))` gives back t and a."""
        if "\n" in thought or "\n" in action:
            name, value = ("thought", thought) if "\n" in thought else ("action", action)
            raise ValueError(f"{name}: expected one line, got {value!r}")
        return self._joined(thought, action)

    def target(self, thought: str, action: str) -> str | None:
        """`render(thought, action)`, or None where `parse` would not read this very action from it. Both are stripped
        lines."""
        text = self._joined(thought, action)
        # Text without a mark reads back by the form itself; only what may quote one needs the parser.
        mark = self._style.mark
        if (mark in thought or mark in action) and self.parse(text).action != action:
            return None
        return text

    def _joined(self, thought: str, action: str) -> str:
        if self._style.thought is None:
            before, after = self._around
            return f"{before}{action}{after}"
        before, between, after = self._around
        return f"{before}{thought}{between}{action}{after}"

    def parse(self, text: str) -> Parsed:
        """Reads a reply: the last complete action block that follows a thought.

        `format_ok` is True for exactly one thought followed by exactly one action and nothing else.
        """
        thought, start = "", 0
        lead_ok = True
        if self._style.thought is not None:
            match = self._style.thought.search(text)
            if match is None:
                return Parsed("", NO_ACTION, False)
            thought, start = match.group(1).strip(), match.end()
            lead_ok = not text[: match.start()].strip()
        actions = list(self._style.action.finditer(text, start))
        if not actions:
            return Parsed(thought, NO_ACTION, False)
        last = actions[-1]
        if self._style.thought is None:
            lead_ok = not text[: actions[0].start()].strip()
        gap_ok = not text[start : actions[0].start()].strip()
        tail_ok = not text[last.end() :].strip()
        format_ok = lead_ok and gap_ok and tail_ok and len(actions) == 1
        return Parsed(thought, last.group(1).strip(), format_ok)
