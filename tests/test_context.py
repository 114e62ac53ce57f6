"""Chat formats and contexts: the ids that are sent equal what the template renders, without encoding a reply twice."""

import numpy as np
import pytest

from manus_fast.agent.context import ChatFormat, Context
from manus_fast.modeling.tiny import make_tokenizer

WORDS = ["System User Assistant: Walk to the end. You are at 1 of 9, go left or right? Think: on Act: no\n"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OBSERVATIONS = ["You are at 1 of 9.", "You are at 2 of 9.\ngo left or right?", "You are at 1."]
REPLIES = ["Think: on\nAct: go right", "Think: no\nAct: go left", "Act: go"]


def make(kind):
    tokenizer = make_tokenizer([*WORDS, "user assistant system"])
    if kind == "plain":
        tokenizer.chat_template = None
    if kind == "chatml":
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
        tokenizer.chat_template = CHATML
    return tokenizer


KINDS = ("tiny", "chatml", "plain")


def render_plain(messages, eos):
    names = {"system": "System", "user": "User", "assistant": "Assistant"}
    end = {"assistant": eos}
    return "".join(f"{names[m['role']]}:\n{m['content']}{end.get(m['role'], '')}\n" for m in messages) + "Assistant:\n"


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_equal_the_rendered_conversation(kind):
    tokenizer = make(kind)
    chat = ChatFormat(tokenizer)
    conversation = Context(chat).start("Walk to the end.", OBSERVATIONS[0])
    messages = [{"role": "system", "content": "Walk to the end."}, {"role": "user", "content": OBSERVATIONS[0]}]
    for reply, observation in zip(REPLIES, [*OBSERVATIONS[1:], "You are at 9."], strict=True):
        if kind == "plain":
            text = render_plain(messages, tokenizer.eos_token)
        else:
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        expected = tokenizer.encode(text, add_special_tokens=False)
        prompt = conversation.prompt()
        assert prompt.dtype == np.int32 and prompt.tolist() == expected
        conversation.add(chat.reply(reply), observation)
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": observation}]


@pytest.mark.parametrize("kind", KINDS)
def test_a_cut_reply_gets_the_end_token_it_lacks(kind):
    chat = ChatFormat(make(kind))
    whole, cut = Context(chat).start("", OBSERVATIONS[0]), Context(chat).start("", OBSERVATIONS[0])
    reply = chat.reply(REPLIES[0])
    whole.add(reply, OBSERVATIONS[1])
    cut.add(reply[:-1], OBSERVATIONS[1])
    np.testing.assert_array_equal(whole.prompt(), cut.prompt())


def test_end_tokens():
    tiny, chatml = make("tiny"), make("chatml")
    assert ChatFormat(tiny).end_ids == {tiny.eos_token_id}
    end = chatml.convert_tokens_to_ids("<|im_end|>")
    chat = ChatFormat(chatml, extra_end_ids=[3])
    assert chat.end_id == end and chat.end_ids == {end, chatml.eos_token_id, 3}
    reply = chat.reply("Act: go")
    assert reply[-1] == end and chat.decode(reply) == "Act: go"
    assert chat.decode([*reply[:-1], chatml.eos_token_id]) == "Act: go"


def test_a_reply_that_ended_with_another_end_token_is_not_ended_twice():
    chatml = make("chatml")
    chat = ChatFormat(chatml)
    conversation = Context(chat).start("", "go")
    start = len(conversation.prompt())
    reply = np.asarray([*chat.reply("Act: go")[:-1], chatml.eos_token_id], np.int32)
    conversation.add(reply, "on")
    after = conversation.prompt()[start:]
    assert after[: len(reply)].tolist() == reply.tolist()  # what was sampled stays as it was
    assert chat.end_id not in after[len(reply) : len(reply) + 1]


@pytest.mark.parametrize("kind", ["full", "window"])
def test_sampled_ids_are_never_encoded_again(kind):
    """Ids that no text encodes to, such as an unknown token, stay as they were sampled."""
    chat = ChatFormat(make("tiny"))
    conversation = Context(chat, kind, 3).start("Walk.", OBSERVATIONS[0])
    odd = np.asarray([5, 5, chat.tokenizer.unk_token_id, 11, chat.end_id], np.int32)
    before = len(conversation.prompt())
    conversation.add(odd, OBSERVATIONS[1])
    assert conversation.prompt()[before : before + 5].tolist() == odd.tolist()


def test_window_by_hand():
    chat = ChatFormat(make("tiny"))
    head = chat.head("Walk.", "a")
    conversation = Context(chat, "window", 2).start("Walk.", "a")
    segments = []
    for i in range(5):
        expected = np.concatenate([head, *segments[-2:]])
        np.testing.assert_array_equal(conversation.prompt(), expected)
        reply = chat.reply(f"Act: {i}")
        conversation.add(reply, f"at {i}")
        segments.append(np.concatenate([reply, chat.bridge(f"at {i}", True)]))


@pytest.mark.parametrize("kind", ["full", "window"])
def test_a_clone_goes_its_own_way(kind):
    chat = ChatFormat(make("tiny"))
    one = Context(chat, kind, 2).start("Walk.", "a")
    one.add(chat.reply("Act: go"), "b")
    two = one.clone()
    np.testing.assert_array_equal(one.prompt(), two.prompt())
    before = one.prompt().copy()
    two.add(chat.reply("Act: no"), "c")
    np.testing.assert_array_equal(one.prompt(), before)
    assert len(two.prompt()) > len(before)


def test_refusals():
    tokenizer = make("tiny")
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="end-of-sequence"):
        ChatFormat(tokenizer)
    tokenizer = make("tiny")
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}{% endfor %}"
    )
    with pytest.raises(ValueError, match="assistant's content"):
        ChatFormat(tokenizer)
    chat = ChatFormat(make("tiny"))
    with pytest.raises(ValueError, match=r"agent\.context"):
        Context(chat, "summary")
    with pytest.raises(ValueError, match=r"agent\.window"):
        Context(chat, "window", 0)


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_tokenizer_is_set_to_changes_nothing(kind):
    tokenizer = make(kind)
    chat = ChatFormat(tokenizer)
    bridge, text = chat.bridge(OBSERVATIONS[0], True), "Think: go  to\nAct: no ?" + tokenizer.eos_token
    ids = tokenizer.encode(text, add_special_tokens=False)
    tokenizer([text, "Act"], truncation=True, max_length=2, padding="max_length")
    fresh = ChatFormat(tokenizer)
    tokenizer([text, "Act"], truncation=True, max_length=2, padding="max_length")
    np.testing.assert_array_equal(fresh.bridge(OBSERVATIONS[0], True), bridge)
    np.testing.assert_array_equal(fresh.reply(text)[:-1], ids)
    assert fresh.decode(ids) == text[: -len(tokenizer.eos_token)] and len(bridge) > 2
    np.testing.assert_array_equal(fresh.bridge(OBSERVATIONS[0], True), bridge)  # remembered, not to be written to
    with pytest.raises(ValueError, match="read-only"):
        fresh.bridge(OBSERVATIONS[0], False)[:] = 0


TEMPLATES = {
    "as it is": CHATML,
    "stripped": CHATML.replace("m['content'] }}", "m['content'] | trim }}"),
    "shortened": CHATML.replace("m['content'] }}", "m['content'][:16] }}"),
    "of tools": CHATML.replace(
        "{{ m['content'] }}", "{% if '<tool>' in m['content'] %}tool: {% endif %}{{ m['content'] }}"
    ),
    "louder": CHATML.replace("{{ m['content'] }}", "{{ m['content'] | replace('You', 'YOU') }}"),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_is_put_together_is_what_the_template_gives(name):
    tokenizer = make("chatml")
    tokenizer.chat_template = TEMPLATES[name]
    chat = ChatFormat(tokenizer)
    asked = []
    render = chat._render
    chat._render = lambda *given, **options: asked.append(given) or render(*given, **options)
    users = [
        "You are at 1.",
        " You are at 2 of 9.\n",
        "<tool>go left</tool>",
        "a",
        "",
        "on\n\nright?",
        "no <|im_end|> on",
    ]
    for user in users:
        for system in ("Walk to the end.", "Walk  on <|im_end|>\n", ""):
            messages = [{"role": "system", "content": system}] * bool(system) + [{"role": "user", "content": user}]
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            assert chat.head(system, user).tolist() == tokenizer.encode(text, add_special_tokens=False)
        messages = [
            {"role": "user", "content": "u"}, {"role": "assistant", "content": "on"}, {"role": "user", "content": user},
        ]  # fmt: skip
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        tail = text[text.rindex("<|im_start|>assistant", 0, text.rindex("<|im_start|>user")) :].partition("\non")[2]
        asked.clear()
        assert chat.bridge(user, False).tolist() == tokenizer.encode(tail, add_special_tokens=False)
        if name in ("as it is", "of tools") and user in ("You are at 1.", "a"):
            assert not asked  # put together without the template
    first = chat.bridge("You are at 1.", True)
    chat.forget()
    np.testing.assert_array_equal(chat.bridge("You are at 1.", True), first)


def test_a_system_message_is_encoded_once():
    chat = ChatFormat(make("chatml"))
    texts, encode = [], chat._encode
    chat._encode = lambda text: texts.append(text) or encode(text)
    chat._beginning = chat._encode
    for user in OBSERVATIONS:
        chat.head("Walk to the end.", user)
    assert len(set(texts)) == 1 + len(OBSERVATIONS)
    assert all("Walk" not in text or "You" not in text for text in texts)
