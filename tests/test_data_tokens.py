"""For each row of each adapter, under each chat template: the trained tokens decode to exactly the trainable text of
the assistant, each reply followed by its end of turn; everything else is there and not trained."""

import json
import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manus_fast.agent.context import ChatFormat, Context
from manus_fast.agent.protocol import Protocol
from manus_fast.agent.trajectory import SCHEMA
from manus_fast.cli import main
from manus_fast.data.load import load_conversations
from manus_fast.data.react import message_rows, spans
from manus_fast.modeling.tiny import make_tokenizer

WORDS = ["look", "buy", "mug", "7", "the", "it's", "in/on", ",", "in", "A", "lamp", "now", "?"]
LINE = st.lists(st.sampled_from(WORDS), min_size=1, max_size=5).map(" ".join)
TEMPLATES = {
    "tiny": None,
    "chatml": (
        ("<|im_start|>", "<|im_end|>"),
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    ),
    "llama3": (
        ("<|begin|>", "<|head|>", "<|tail|>", "<|eot|>"),
        "{% if messages %}<|begin|>{% endif %}{% for m in messages %}<|head|>{{ m['role'] }}<|tail|>\n\n"
        "{{ m['content'] | trim }}<|eot|>{% endfor %}"
        "{% if add_generation_prompt %}<|head|>assistant<|tail|>\n\n{% endif %}",
    ),
    # The system message inside the first user's, and only the tokenizer's EOS after a reply.
    "instruct": (
        ("[INST]", "[/INST]"),
        "{% set sys = messages[0]['content'] + '\n\n' if messages[0]['role'] == 'system' else '' %}"
        "{% for m in messages %}{% if m['role'] == 'user' %}[INST]{{ sys if loop.index0 <= 1 else '' }}"
        "{{ m['content'] }}[/INST]{% elif m['role'] == 'assistant' %}{{ m['content'] }}{{ eos_token }}"
        "{% endif %}{% endfor %}",
    ),
    "plain": ((), None),
}


FURTHER = (
    'User:\nAssistant:\nSystem:\nuser assistant system Think: Act: Thought: Action: Input: [ ] { } " ` < > / _ '
    "bash sql SELECT click search q get tool_call name arguments Action , Thought"
)


def make_format(kind):
    tokenizer = make_tokenizer([" ".join(WORDS), *WORDS, FURTHER])
    if TEMPLATES[kind] is not None:
        special, template = TEMPLATES[kind]
        if special:
            tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
        tokenizer.chat_template = template
    return ChatFormat(tokenizer)


FORMATS = {kind: make_format(kind) for kind in TEMPLATES}


def turns(keys, words, pairs, system=False):
    user, assistant = words
    role, content, loss = keys
    out = [{role: "system", content: "the lamp", loss: False}] if system else []
    for seen, reply, flag in pairs:
        out += [{role: user, content: seen, loss: None}, {role: assistant, content: reply, loss: flag}]
    return out


def rollout(pairs):
    turn = {"finish_reason": "stop", "admissible": True}
    made = [{**turn, "observation": seen, "text": reply, "format_ok": flag} for seen, reply, flag in pairs]
    return {"schema": SCHEMA, "id": "a", "env": "webshop", "task": "t", "valid": True, "success": True, "turns": made}


FROM, ROLE = ("from", "value", "loss"), ("role", "content", "loss")
ADAPTERS = {
    "agent_instruct": lambda p: {"id": "os_1", "conversations": turns(FROM, ("human", "gpt"), p)},
    "agent_traj": lambda p: {"item_id": "maze_1", "conversations": turns(FROM, ("human", "gpt"), p)},
    "agent_flan": lambda p: {"id": "x", "conversation": turns(ROLE, ("user", "assistant"), p, system=True)},
    "openmanus_rl": lambda p: {
        "item_id": "x", "data_source": "babyai", "conversations": turns(FROM, ("human", "gpt"), p),
    },
    "openmanus_rl chat": lambda p: {"id": "x", "conversations": turns(ROLE, ("user", "assistant"), p)},
    "rollouts": rollout,
}  # fmt: skip
# (how a dataset writes a reply, the action that it means)
FORMS = {
    "Act:": lambda thought, word: (f"Think: {thought}\nAct: click[{word}]", f"click[{word}]"),
    "Action:": lambda thought, word: (f"Thought:\n{thought}\n\nAction:\nsearch[{word}]", f"search[{word}]"),
    "input": lambda thought, word: (
        f'Thought: {thought}\nAction: get\nAction Input: {{"q": "{word}"}}', f'get {{"q": "{word}"}}',
    ),
    "code": lambda thought, word: (f"{thought}\n```sql\nSELECT {word}\n```", f"sql[SELECT {word}]"),
    "tool": lambda thought, word: (
        f'{thought}<tool_call>{{"name": "get", "arguments": {{"q": "{word}"}}}}</tool_call>', f'get {{"q": "{word}"}}',
    ),
}  # fmt: skip
REPLIES = st.tuples(LINE, LINE, st.sampled_from(sorted(FORMS)), st.sampled_from(WORDS), st.booleans())


@pytest.mark.parametrize("adapter", ADAPTERS)
@settings(max_examples=15, deadline=None)
@given(data=st.lists(REPLIES, min_size=1, max_size=4), style=st.sampled_from(["react", "act"]))
def test_trained_tokens_decode_to_the_trainable_text_and_its_end(tmp_path_factory, adapter, data, style):
    data[-1] = (*data[-1][:4], True)
    protocol, pairs, expected = Protocol(style), [], []
    for seen, thought, form, word, flag in data:
        reply, action = FORMS[form](thought, word)
        pairs.append((seen, reply, flag))
        if flag:
            expected.append(protocol.render(thought, action))
    file = tmp_path_factory.mktemp("rows") / "a.jsonl"
    file.write_text(json.dumps(ADAPTERS[adapter](pairs)))
    dropped = Counter()
    (item,) = load_conversations(str(file), dropped, protocol)
    assert not dropped
    for kind, chat in FORMATS.items():
        tokenizer, end = chat.tokenizer, chat.tokenizer.decode([chat.end_id])
        (row,) = message_rows(chat, item.messages)
        assert tokenizer.decode(row.token_ids[row.loss_mask].tolist()) == "".join(t + end for t in expected), kind
        # Turn by turn too, and each turn's last trained token is the end of turn.
        trained = [row.token_ids[row.turn_id == n].tolist() for n in sorted(set(row.turn_id[row.turn_id >= 0]))]
        assert [tokenizer.decode(ids) for ids in trained] == [t + end for t in expected]
        assert all(ids[-1] == chat.end_id and chat.end_id not in ids[:-1] for ids in trained)
        parts = [(tokenizer.decode(ids.tolist()), trained) for ids, trained in spans(row)]
        assert [text for text, trained in parts if trained] == [t + end for t in expected]
        assert "".join(text for text, _ in parts) == tokenizer.decode(row.token_ids.tolist())
        # What the other turns say is in the row, in order, without loss.
        text, place = tokenizer.decode(row.token_ids.tolist()), 0
        for message in item.messages:
            place = text.index(message["content"], place) + len(message["content"])
        assert not row.loss_mask[0] and tokenizer.unk_token_id not in row.token_ids
        # Under a window every trainable reply is trained on once, with the same tokens.
        rows = message_rows(Context(chat, "window", 1), item.messages)
        again = np.concatenate([r.token_ids[r.loss_mask] for r in rows])
        assert again.tolist() == row.token_ids[row.loss_mask].tolist()


def test_show_colours_the_very_tokens(tmp_path, capsys, monkeypatch):
    chat = FORMATS["chatml"]
    chat.tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "model/config.json").write_text("{}")
    row = ADAPTERS["agent_instruct"]([("look", "Think: now\nAct: click[mug]", False), ("A", "Act: look", True)])
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    monkeypatch.setenv("FORCE_COLOR", "1")
    command = ["data", "show", str(tmp_path / "a.jsonl"), "--model_path", str(tmp_path / "model")]
    assert main(command) == 0
    shown = capsys.readouterr().out
    green = re.findall(r"\x1b\[32m(.*?)\x1b\[0m", shown, re.DOTALL)
    assert "".join(green) == "Think: Act: look<|im_end|>"  # a line break ends the colour
    assert "<|im_start|>user\nlook<|im_end|>" in shown and "tokens are trained on" in shown
    assert main([*command[:-1], str(tmp_path / "none")]) == 2
