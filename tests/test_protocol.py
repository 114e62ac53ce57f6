"""The ReAct protocol: what the prompt shows is what the parser reads, and nothing is guessed out of malformed text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manus_fast.agent.protocol import NO_ACTION, STYLES, Protocol

# One line, no outer space, none of the protocol's own marks.
LINES = (
    st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Zl", "Zp", "Cs"), exclude_characters="<>:"))
    .map(str.strip)
    .filter(lambda s: s.splitlines() == [s])
)


@pytest.mark.parametrize("style", STYLES)
@given(thought=LINES | st.just(""), action=LINES)
def test_parse_gives_back_what_render_wrote(style, thought, action):
    protocol = Protocol(style)
    parsed = protocol.parse(protocol.render(thought, action))
    assert parsed.action == action and parsed.format_ok
    assert parsed.thought == ("" if style == "act" else thought)


PIECES = st.sampled_from(["Act:", "Action:", "Think:", "Act", "<act>", "</act>", "<think>", "<", ":", " ", "a", "b[c]"])


@pytest.mark.parametrize("style", STYLES)
@given(st.lists(PIECES, max_size=6).map("".join), st.lists(PIECES, min_size=1, max_size=6).map("".join))
def test_a_target_is_what_the_parser_reads_back(style, thought, action):
    thought, action = thought.strip(), action.strip() or "look"
    protocol = Protocol(style)
    text = protocol.render(thought, action)
    expected = text if protocol.parse(text).action == action else None
    assert protocol.target(thought, action) == expected


@pytest.mark.parametrize("style", STYLES)
def test_the_prompt_shows_a_form_that_the_parser_reads(style):
    protocol = Protocol(style)
    prompt = protocol.system_prompt("  Play.\n")
    assert prompt.startswith("Play.\n")
    example = prompt.split("form:\n", 1)[1]
    parsed = protocol.parse(example)
    assert parsed.format_ok and parsed.action == "one command"


@pytest.mark.parametrize(
    "text, thought, action, format_ok",
    [
        ("Think: it is hot\nAct: go to fridge 1", "it is hot", "go to fridge 1", True),
        ("Think: it is hot\nAction: go to fridge 1", "it is hot", "go to fridge 1", True),
        ("  Think:it is hot \n\n Act:  go to fridge 1  \n", "it is hot", "go to fridge 1", True),
        ("Think: it is hot Act: look", "it is hot", "look", True),
        ("Think: first\nsecond line\nAct: look", "first\nsecond line", "look", True),
        ("Think:\nAct: look", "", "look", True),
        # more than the form asks for: the last complete block counts, the format does not
        ("Think: a\nAct: look\nAct: go to bed 1", "a", "go to bed 1", False),
        ("Think: a\nAct: look\nThink: b\nAct: inventory", "a", "inventory", False),
        ("Think: a\nAct: look\nAct:", "a", "look", False),
        ("Sure!\nThink: a\nAct: look", "a", "look", False),
        ("Think: a\nAct: look\nObservation: a mug", "a", "look", False),
        # nothing to act on
        ("Think: a", "", NO_ACTION, False),
        ("Act: look", "", NO_ACTION, False),
        ("Act: look\nThink: a", "", NO_ACTION, False),
        ("Think: a\nAct:", "a", NO_ACTION, False),
        ("Think: a\nAct:   \n", "a", NO_ACTION, False),
        ("Think: a\nReact: look", "", NO_ACTION, False),
        ("go to fridge 1", "", NO_ACTION, False),
        ("", "", NO_ACTION, False),
    ],
)
def test_react_by_hand(text, thought, action, format_ok):
    parsed = Protocol("react").parse(text)
    assert (parsed.thought, parsed.action, parsed.format_ok) == (thought, action, format_ok)


@pytest.mark.parametrize(
    "text, thought, action, format_ok",
    [
        ("<think>hot</think><act>look</act>", "hot", "look", True),
        ("<think>\nhot\n</think>\n<action> look </action>\n", "hot", "look", True),
        ("<think>hot</think><act>look</act><act>go</act>", "hot", "go", False),
        ("<think>hot</think><act>look</act> done", "hot", "look", False),
        ("<think>hot</think><act>look", "hot", NO_ACTION, False),
        ("<think>hot</think><act>look\ngo</act>", "hot", NO_ACTION, False),  # an action is one line
        ("<think>hot<act>look</act>", "", NO_ACTION, False),
        ("<act>look</act>", "", NO_ACTION, False),
    ],
)
def test_tags_by_hand(text, thought, action, format_ok):
    parsed = Protocol("tags").parse(text)
    assert (parsed.thought, parsed.action, parsed.format_ok) == (thought, action, format_ok)


@pytest.mark.parametrize(
    "text, action, format_ok",
    [
        ("Act: look", "look", True),
        ("Action: look\n", "look", True),
        ("well, Act: look", "look", False),
        ("Act: look\nAct: go", "go", False),
        ("look", NO_ACTION, False),
    ],
)
def test_act_by_hand(text, action, format_ok):
    parsed = Protocol("act").parse(text)
    assert (parsed.thought, parsed.action, parsed.format_ok) == ("", action, format_ok)


def test_admissible_actions_are_shown_when_asked():
    assert Protocol().user_message("You see a mug.", ["look"]) == "You see a mug."
    shown = Protocol(show_admissible=True)
    assert shown.user_message("You see a mug.", ["look", "go"]) == "You see a mug.\nAdmissible: look, go."
    assert shown.user_message("You see a mug.") == "You see a mug."


def test_refusals():
    with pytest.raises(ValueError, match=r"agent\.style: expected one of react, tags, act, got 'json'"):
        Protocol("json")
    with pytest.raises(ValueError, match="action: expected one line"):
        Protocol().render("a", "go\nto")
    with pytest.raises(ValueError, match="thought: expected one line"):
        Protocol().render("a\nb", "go")
