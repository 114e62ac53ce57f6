"""The policy made on the spot: text comes back letter for letter, and the folder loads like any other."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from manus_fast.agent.context import ChatFormat
from manus_fast.agent.protocol import STYLES, Protocol
from manus_fast.modeling.tiny import make_policy, make_tokenizer

TEXTS = [
    "-= Welcome! =-\n\nYou see a bed 1, a cabinet 1.\n\nYour task is to: put a mug in/on shelf.",
    "Think: the mug may be in a cabinet\nAct: put mug 1 in/on shelf 12",
    "Reply in this form: don't guess",
]
WORDS = sorted(
    {"bed", "cabinet", "mug", "shelf", "put", "in/on", "Act:", "Think:", "don't", ".", ",", "7", "20", "\n", "=-"}
)


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer(TEXTS)


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip_of_the_vocabulary_texts(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids) == text


@given(
    st.lists(st.sampled_from(WORDS), max_size=12), st.lists(st.sampled_from(["", " ", "  "]), min_size=12, max_size=12)
)
def test_round_trip_of_any_arrangement_of_known_words(tokenizer, words, gaps):
    text = "".join(word + gap for word, gap in zip(words, gaps, strict=False))
    ids = tokenizer.encode(text, add_special_tokens=False)
    # Words that run together make new words; where all are known, the text comes back.
    if tokenizer.unk_token_id not in ids:
        assert tokenizer.decode(ids) == text


def test_words_numbers_and_labels_are_one_token_each(tokenizer):
    ids = tokenizer.encode("Think: put mug 12 in/on shelf 1,\nAct: don't", add_special_tokens=False)
    pieces = tokenizer.convert_ids_to_tokens(ids)
    assert [piece.lstrip("\u2581") for piece in pieces] == [
        "Think:", "put", "mug", "12", "in/on", "shelf", "1", ",", "\n", "Act:", "don't",
    ]  # fmt: skip


def test_a_word_is_known_at_the_start_of_a_line_too(tokenizer):
    ids = tokenizer.encode("shelf\nmug", add_special_tokens=False)
    assert len(ids) == 3 and tokenizer.unk_token_id not in ids


def test_the_vocabulary_does_not_depend_on_the_order_of_texts():
    assert make_tokenizer(TEXTS).get_vocab() == make_tokenizer(reversed(TEXTS)).get_vocab()


@pytest.mark.parametrize("style", STYLES)
def test_the_parser_reads_what_the_expert_wrote(style):
    protocol = Protocol(style)
    text = protocol.render("the mug may be in a cabinet", "put mug 1 in/on shelf 12")
    tokenizer = make_tokenizer([*TEXTS, text])
    chat = ChatFormat(tokenizer)
    ids = chat.reply(text)
    assert ids[-1] == tokenizer.eos_token_id
    parsed = protocol.parse(chat.decode(ids))
    assert parsed.action == "put mug 1 in/on shelf 12" and parsed.format_ok


def test_an_episode_of_prompts_extends_itself(tokenizer):
    """Head + reply + bridge is what the template renders for the whole conversation."""
    chat = ChatFormat(tokenizer)
    reply = "Think: the mug may be in a cabinet\nAct: put mug 1 in/on shelf 12"
    joined = [
        *chat.head("Reply in this form:", "You see a bed 1."),
        *chat.reply(reply),
        *chat.bridge("You see a mug.", True),
    ]
    messages = [
        {"role": "system", "content": "Reply in this form:"},
        {"role": "user", "content": "You see a bed 1."},
        {"role": "assistant", "content": reply},
        {"role": "user", "content": "You see a mug."},
    ]
    whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert joined == tokenizer.encode(whole, add_special_tokens=False)


def test_policy_folder_loads_and_is_reproducible(tmp_path):
    sizes = {"hidden": 16, "layers": 1, "heads": 2, "kv_heads": 1, "intermediate": 24, "max_length": 64}
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    one = make_policy(tmp_path / "one", TEXTS, **sizes, seed=3)
    assert torch.equal(before, torch.random.get_rng_state())
    two = make_policy(tmp_path / "two", TEXTS, **sizes, seed=3)
    other = make_policy(tmp_path / "other", TEXTS, **sizes, seed=4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "other", "two"]
    states = [AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (one, two, other)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert any(not torch.equal(states[0][name], states[2][name]) for name in states[0])
    tokenizer = AutoTokenizer.from_pretrained(one)
    model = AutoModelForCausalLM.from_pretrained(one)
    assert model.config.vocab_size == len(tokenizer)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    ids = torch.tensor([tokenizer.encode(TEXTS[1], add_special_tokens=False)])
    assert model(ids).logits.shape == (1, ids.shape[1], len(tokenizer))
    assert tokenizer.decode(tokenizer.encode(TEXTS[0], add_special_tokens=False)) == TEXTS[0]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"hidden": 30, "heads": 4}, "hidden: expected an even multiple of heads"),
        ({"heads": 4, "kv_heads": 3}, "kv_heads: expected a divisor of heads"),
    ],
)
def test_bad_sizes_are_one_sentence_and_write_nothing(tmp_path, sizes, message):
    with pytest.raises(ValueError, match=message):
        make_policy(tmp_path / "p", TEXTS, **sizes)
    assert not list(tmp_path.iterdir())


def test_a_folder_in_use_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="folder: expected a new or empty folder"):
        make_policy(tmp_path, TEXTS)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_no_words_at_all():
    with pytest.raises(ValueError, match="texts: expected at least one text"):
        make_tokenizer(["", "12"])
