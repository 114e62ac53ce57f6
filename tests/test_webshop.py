"""The shop: pages by hand in four modes, random walks that stay on the page graph, clones, and an expert that buys what
is wanted."""

import json
import os
import random
import subprocess
import sys
import threading
import tracemalloc

import pytest

from manus_fast import envs
from manus_fast.envs.base import EnvBatch
from manus_fast.envs.webshop.pages import Pages, State
from manus_fast.envs.webshop.reward import Goal, Product
from manus_fast.envs.webshop.store import Store, write


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """One cache for the module: the user's own stays as it is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MANUS_FAST_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def shop(cache):
    return envs.make("webshop")


def test_splits_by_goal_number(shop):
    assert [len(shop.tasks(s)) for s in ("test", "dev", "train")] == [500, 1000, 2000]
    assert [shop.tasks(s)[0].data["goal"] for s in ("test", "dev", "train")] == [0, 500, 1500]
    wide = envs.make("webshop", train_from=500)
    assert [len(wide.tasks(s)) for s in ("test", "dev", "train")] == [500, 1000, 3000]
    with pytest.raises(ValueError, match="split"):
        shop.tasks("valid")
    for options in ({"mode": "pdf"}, {"num_goals": 10}, {"num_goals": 10**9}, {"max_steps": 0}, {"per_page": 0},
                    {"per_page": True}, {"per_page": 2.0}, {"num_products": "9"}, {"backend": "java"}, {"seed": "../x"},
                    {"train_from": 501}, {"train_from": 500.0}, {"nouns": "guess"}, {"human_goals": "no"},
                    {"data": "/no/such/folder"}, {"data": 3}, {"num_goals": 2000, "data": "x"}):  # fmt: skip
        option = next(iter(options))
        block = "environment" if option in ("max_steps", "backend") else "environment.options"
        with pytest.raises(ValueError, match=rf"^{block}\.{option}: expected .*, got "):
            envs.make("webshop", **options).tasks("test")


@pytest.mark.parametrize(
    "mode, kind, per_page",
    [("html", None, 10), ("text", "planner", 10), ("text_rich", None, 10), ("url", None, 10), ("text", "reader", 3)],
)
def test_expert_buys_with_full_score_in_every_mode(mode, kind, per_page):
    environment = envs.make("webshop", mode=mode, per_page=per_page)
    tasks = environment.tasks("test")[:50]
    batch = environment.make_batch(50)
    assert isinstance(batch, EnvBatch)
    texts, _ = batch.reset(range(50), tasks, [0] * 50)
    assert len(set(texts)) == 50
    live, scores = list(range(50)), {}
    while live:
        _, rewards, terminated, truncated, infos = batch.step(live, batch.expert(live, kind)[0])
        for slot, score, info in zip(live, rewards, infos, strict=True):
            scores[slot] = score
            assert info["success"] == (score == 1)
        live = [s for s, over in zip(live, terminated | truncated, strict=True) if not over]
    assert list(scores.values()) == [1.0] * 50


def test_fewer_products_on_a_page_and_a_reader_of_the_instruction(shop):
    batch = envs.make("webshop", per_page=3).make_batch(1)
    (text,), _ = batch.reset([0], shop.tasks("test")[:1], [0])
    wishes = text.partition("Find me ")[2].partition(", and price lower than")[0]
    ((action,), _) = batch.expert([0], "reader")
    assert action == f"search[{wishes}]"
    (text,), *_, (info,) = batch.step([0], [action])
    first = [c for c in info["admissible"] if c.startswith("click[b0")]
    assert len(first) == 3 and "Page 1 (Total results: 50)" in text
    *_, (info,) = batch.step([0], ["click[next >]"])
    second = [c for c in info["admissible"] if c.startswith("click[b0")]
    whole = shop.make_batch(1)
    whole.reset([0], shop.tasks("test")[:1], [0])
    *_, (info,) = whole.step([0], [action])
    assert first + second == [c for c in info["admissible"] if c.startswith("click[b0")][:6]
    with pytest.raises(ValueError, match=r"data\.expert: expected one of planner, reader"):
        batch.expert([0], "oracle")


def test_pages_by_hand(shop):
    batch = shop.make_batch(2)
    (text,), (info,) = batch.reset([0], shop.tasks("test")[:1], [0])
    assert text.startswith("WebShop [SEP] Instruction: [SEP] Find me ") and text.endswith(" [SEP] Search")
    assert "search[x]" in info["admissible"] and "click[buy now]" not in info["admissible"]
    (text,), *_, (info,) = batch.step([0], ["search[lamp]"])
    assert "Page 1 (Total results: 50)" in text and "click[< prev]" not in info["admissible"]
    assert len([c for c in info["admissible"] if c.startswith("click[b0")]) == 10
    before = batch.save(0)
    assert len(before) < 1024
    (same,), rewards, *_ = batch.step([0], ["click[no such thing]"])
    assert same == text and rewards[0] == 0
    for _ in range(6):  # beyond the last page nothing blocks
        (text,), *_ = batch.step([0], ["click[Next >]"])
    assert "Page 7 (Total results: 50)" in text
    batch.restore(1, before)
    (text,), *_ = batch.step([1], ["click[next >]"])
    assert "Page 2 (Total results: 50)" in text


@pytest.fixture
def tiny(tmp_path):
    lamp = Product("B1", "lamp", "Home › Lighting", "Blue & white lamp", "For the desk.", ("bright", "small"),
                   ("bright",), {"color": ("Red", "blue"), "size": ("s",)}, 12.5)  # fmt: skip
    chair = Product("B2", "chair", "Home › Seats", "Chair", "To sit.", ("oak",), ("oak",), {}, 80.0, "$80.0 to $90.0")
    goal = Goal("B1", "lamp", "Home › Lighting", "Lamp", ("bright",), {"color": "red"}, 20.0, "a <bright> lamp")
    write(tmp_path, "tiny", [lamp, chair], [goal])
    return Store(tmp_path)


def play(pages, *actions):
    state, bought = State(0), False
    for action in actions:
        state, bought = pages.act(state, action)
    return state, bought


ITEM = ("search[lamp]", "click[b1]", "click[Red]")


def test_every_page_reads_as_written_by_hand(tiny):
    pages = Pages(tiny, "text")
    texts = {
        (): "WebShop [SEP] Instruction: [SEP] a <bright> lamp [SEP] Search",
        ("search[ Desk lamps ]",): "Instruction: [SEP] a <bright> lamp [SEP] Back to Search [SEP] Page 1 (Total "
        "results: 1) [SEP] Next > [SEP] B1 [SEP] Blue & white lamp [SEP] $12.50",
        ("search[oak]", "click[next >]"): "Instruction: [SEP] a <bright> lamp [SEP] Back to Search [SEP] Page 2 (Total "
        "results: 1) [SEP] < Prev [SEP] Next >",
        ITEM: "Instruction: [SEP] a <bright> lamp [SEP] Back to Search [SEP] < Prev [SEP] color [SEP] Red [SEP] blue "
        "[SEP] size [SEP] s [SEP] Blue & white lamp [SEP] Price: $12.50 [SEP] Rating: N.A. [SEP] Description "
        "[SEP] Features [SEP] Reviews [SEP] Buy Now",
        (*ITEM, "click[Features]"): "Instruction: [SEP] a <bright> lamp [SEP] Back to Search [SEP] < Prev [SEP] bright "
        "[SEP] small",
        (*ITEM, "click[buy now]"): "Thank you for shopping with us!",
    }  # fmt: skip
    for actions, expected in texts.items():
        assert pages.observe(play(pages, *actions)[0]) == expected
    assert "$80.0 to $90.0" in pages.observe(play(pages, "search[sit]")[0])
    assert play(pages, *ITEM, "click[buy now]")[1] and not play(pages, *ITEM)[1]


def test_the_other_modes_by_hand(tiny):
    rich = Pages(tiny, "text_rich")
    assert rich.observe(play(rich, *ITEM)[0]) == (
        "You have clicked Red.\nInstruction:\na <bright> lamp\n[button] Back to Search [button_]\n"
        "[button] < Prev [button_]\ncolor\n"
        "  [clicked button] Red [clicked button_]\n  [button] blue [button_]\nsize\n  [button] s [button_]\n"
        "Blue & white lamp\nPrice: $12.50\nRating: N.A.\n[button] Description [button_]\n[button] Features [button_]\n"
        "[button] Reviews [button_]\n[button] Buy Now [button_]"
    )
    assert "\n\n[clicked button] B1 [clicked button_]\n" in rich.observe(play(rich, *ITEM, "click[< prev]")[0])
    assert "\n\n[button] B1 [button_]\n" in rich.observe(play(rich, "search[lamp]")[0])
    page = Pages(tiny, "html")
    text = page.observe(play(page, *ITEM)[0])
    assert "<h4>a &lt;bright&gt; lamp</h4>" in text and "<p>Blue &amp; white lamp</p>" in text
    assert '<label><input type="radio" name="color" value="red" checked>Red</label>' in text
    assert '<a class="product-link">B1</a>' in page.observe(play(page, "search[lamp]")[0])
    url = Pages(tiny, "url")
    assert [url.observe(play(url, *actions)[0]).partition(":3000/")[2] for actions in (
        (), ("search[desk lamp]", "click[next >]"), ITEM, (*ITEM, "click[reviews]"), (*ITEM, "click[buy now]"))] == [
        "0", "search_results/0/desk+lamp/2", 'item_page/0/B1/lamp/1/{"color": "red"}',
        'item_sub_page/0/B1/lamp/1/Reviews/{"color": "red"}', 'done/0/B1/{"color": "red"}']  # fmt: skip


def test_options_are_kept_on_a_sub_page_and_dropped_by_leaving(tiny):
    pages = Pages(tiny, "text")
    red = (("color", "red"),)
    assert play(pages, *ITEM, "click[description]", "click[< prev]")[0].options == red
    assert play(pages, *ITEM, "click[blue]", "click[s]")[0].options == (("color", "blue"), ("size", "s"))
    for leave in ("click[< prev]", "click[back to search]", "search[x]"):
        state = play(pages, *ITEM, leave)[0]
        assert state.options == () and state.row == -1 and state.visited == (0,)
    for nothing in ("click[green]", "click[]", "search[ ]", "buy now", "click[buy now] please", "", "click[b2]"):
        assert play(pages, *ITEM, nothing)[0] == play(pages, *ITEM)[0]


# By hand: where each kind of command leads. A search leads to results from everywhere but the end.
EDGES = {
    "search": {},
    "results": {"back to search": "search", "next >": "results", "< prev": "results", "b": "item"},
    "item": {"back to search": "search", "< prev": "results", "description": "sub", "features": "sub", "reviews": "sub",
             "buy now": "done", "option": "item"},
    "sub": {"back to search": "search", "< prev": "item"},
    "done": {},
}  # fmt: skip


def test_a_thousand_random_episodes_stay_on_the_page_graph(shop):
    pages, rng, seen = Pages(shop.make_batch(1)._shop, "text"), random.Random(0), set()
    for goal in range(1000):
        state = State(goal)
        for _ in range(12):
            clicks = list(pages.page(state).clicks)
            value = rng.choice([*clicks, "?", "search"])
            action = rng.choice(("dance", "click[nothing]", "search[!]")) if value == "?" else f"click[{value}]"
            if value == "search" or (not clicks and value != "?"):
                action = f"search[{rng.choice(('lamp', 'red', 'easy to use', 'zzz'))}]"
            after, bought = pages.act(state, action)
            if action.startswith("search["):
                assert after.page == ("done" if state.page == "done" else "results")
            elif value == "?":
                assert after == state
            else:
                kind = value if value in EDGES[state.page] else "b" if state.page == "results" else "option"
                seen.add((state.page, kind, after.page))
                assert after.page == EDGES[state.page][kind] and bought == (kind == "buy now")
            assert after.goal == goal and pages.observe(after) and len(after.to_bytes()) < 1024
            assert State.from_bytes(after.to_bytes()) == after
            state = after
    assert seen == {(page, kind, to) for page, edges in EDGES.items() for kind, to in edges.items()}


def test_clones_go_their_own_ways_and_cost_little(shop):
    batch = shop.make_batch(2000)
    batch.reset([0], shop.tasks("train")[:1], [0])
    batch.step([0], batch.expert([0])[0])
    batch.clone(0, 1)
    one, *_ = batch.step([0, 1], ["click[next >]"] * 2)
    assert one[0] == one[1]
    two, *_ = batch.step([0, 1], ["click[next >]", "click[< prev]"])
    assert "Page 3" in two[0] and "Page 1" in two[1]
    tracemalloc.start()
    for slot in range(2, 2000):
        batch.clone(0, slot)
        batch.step([slot], ["dance"])
    taken = tracemalloc.get_traced_memory()[0] / 1998
    tracemalloc.stop()
    assert taken < 1024


def test_processes_make_the_store_once_and_agree(tmp_path):
    program = (
        "from manus_fast import envs; e = envs.make('webshop', num_products=200, num_goals=1600); b = e.make_batch(1); "
        "print(e.tasks('dev')[3].id, b.reset([0], e.tasks('dev')[3:4], [0])[0], b.step([0], ['search[lamp]'])[0], "
        "'torch' in __import__('sys').modules)"
    )
    environment = {**os.environ, "MANUS_FAST_CACHE": str(tmp_path)}
    processes = [
        subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    outputs = {process.communicate()[0] for process in processes}
    assert len(outputs) == 1 and "webshop/200-1600-0/503" in (text := outputs.pop()) and text.endswith("False\n")
    assert [f.name for f in (tmp_path / "webshop").iterdir() if not f.name.startswith(".")] == ["v1-200-1600-0"]
    assert json.loads((tmp_path / "webshop/v1-200-1600-0/meta.json").read_text())["products"] == 200


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MANUS_FAST_CACHE", str(tmp_path / "file"))
    with pytest.raises(ValueError, match="MANUS_FAST_CACHE"):
        envs.make("webshop", num_products=100, num_goals=1600).tasks("test")


def test_a_task_is_the_same_whatever_seed_slot_or_batch_it_is_played_with(shop):
    """Prices, limits and pages hang on the task alone, so that a panel measures the same everywhere."""
    task = shop.tasks("test")[7]
    played = set()
    for slots, slot, seed in ((1, 0, 0), (5, 3, 1), (5, 4, 2**40)):
        batch = shop.make_batch(slots)
        (text,), _ = batch.reset([slot], [task], [seed])
        pages = [text]
        for action in ("search[red chair]", "click[next >]", batch.expert([slot])[0][0], "click[buy now]"):
            (text,), (reward,), *_ = batch.step([slot], [action])
            pages.append(f"{text} {reward}")
        played.add(tuple(pages))
    assert len(played) == 1


def test_batches_that_come_and_go_leave_no_file_or_thread_open(shop):
    def opened():
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    tasks = shop.tasks("test")[:4]
    for number in range(101):
        worlds = shop.make_async(4)
        batch = shop.make_batch(4)
        batch.reset(range(4), tasks, [0] * 4)
        batch.step(range(4), batch.expert(range(4))[0])
        batch.close()
        worlds.close()
        if number == 0:
            before = opened()
    assert opened() == before
    with pytest.raises(ValueError, match="expected one with a task"):
        batch.step([0], ["search[x]"])


def test_what_a_model_may_write_neither_breaks_nor_moves_a_world(shop):
    """Whatever is no command leaves the page as it is; a search may hold anything."""
    batch = shop.make_batch(1)
    (first,), _ = batch.reset([0], shop.tasks("test")[:1], [0])
    odd = ["", "search[]", "search[ ]", "click[]", "click", "search", "buy now", "[x]", "\x00", "click[buy now",
           "CLICK[back to search]", "(no action)", "click[\ud83d]", "x" * 100_000]  # fmt: skip
    for action in odd[:10]:
        (text,), (reward,), (over,), _, _ = batch.step([0], [action])
        assert (text, reward, over) == (first, 0, False), action
    batch.reset([0], shop.tasks("test")[:1], [0])
    for action in odd[10:]:
        assert batch.step([0], [action])[0] == [first], action[:20]
    for words in ("\ud83d", "' OR 1=1 --", "%s {0} \x00", "word " * 3000, "火 🙂", "]", "a]b["):
        (text,), *_ = batch.step([0], [f"search[{words}]"])
        assert "Page 1" in text
        batch.reset([0], shop.tasks("test")[:1], [0])
