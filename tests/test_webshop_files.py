"""WebShop's own data files, in their published shape: which rows are products, prices, limits, goals, and the order."""

import json
import random

import pytest

from manus_fast import cli, envs
from manus_fast.envs.webshop.files import NO_LIMIT, Source, price_limit, read_price, read_source

ROW = {
    "name": "Red Lamp", "asin": "B000000001", "query": " Lamp ", "category": "home", "product_category": "Home › Lamps",
    "pricing": "$12.50", "full_description": "A lamp.", "small_description": ["bright", None], "images": ["x"],
    "customization_options": {"Color": [{"value": " Red/Blue "}, {"value": "Green"}], "Size": None,
                              "Cord": [{"value": "Long"}]},
}  # fmt: skip
HUMAN = {"instruction": "I want a lamp.", "instruction_attributes": ["bright"], "instruction_options": ["green"]}
TOLD = {"attributes": ["bright", "easy"], "instruction": "Find me a lamp", "instruction_attributes": ["bright"]}


def folder(root, rows, told=None, human=None, suffix=""):
    (root / f"items_shuffle{suffix}.json").write_text(json.dumps(rows))
    (root / f"items_ins_v2{suffix}.json").write_text(json.dumps(told or {}))
    if human is not None:
        (root / "items_human_ins.json").write_text(json.dumps(human))
    return str(root)


def read(root, num_products=None, human=True):
    return read_source(Source.find(str(root), num_products, human))


def test_products_and_both_kinds_of_goals(tmp_path):
    rows = [ROW, {**ROW, "name": "again"}, {**ROW, "asin": "nan"}, {**ROW, "asin": "B00000000011"}, {"asin": None}]
    folder(tmp_path, rows, {ROW["asin"]: TOLD}, {ROW["asin"]: [HUMAN, {**HUMAN, "instruction_attributes": []}]})
    (item,), (goal,) = read(tmp_path)
    assert (item.asin, item.query, item.category, item.title) == ("B000000001", "lamp", "Home › Lamps", "Red Lamp")
    assert item.options == {"color": ("red | blue", "green"), "cord": ("long",)}
    assert item.bullets == ("bright", "") and item.attributes == ("bright", "easy")
    assert (item.price, item.price_tag) == (12.5, "$12.5")
    # The limit is one of the three larger of 20, 30, 40, 50.
    assert goal.price_upper in (30.0, 40.0, 50.0) and goal.options == {"0": "green"} and goal.attributes == ("bright",)
    assert goal.instruction == f"I want a lamp, and price lower than {goal.price_upper:.2f} dollars"
    _, made = read(tmp_path, human=False)
    assert {tuple(g.options.items()) for g in made} == {(("color", "red | blue"), ("cord", "long")),
                                                       (("color", "green"), ("cord", "long"))}  # fmt: skip
    text = next(g.instruction for g in made if g.options["color"] == "green")
    assert text.startswith("Find me a lamp with color: green, and cord: long, and price lower than ")
    assert len({g.price_upper for g in made}) == 1


def test_without_attributes_or_options(tmp_path):
    row = {**ROW, "customization_options": "", "pricing": None, "small_description": "one", "full_description": None}
    other = {**row, "asin": "B2"}
    folder(tmp_path, [row, other], {ROW["asin"]: TOLD, "B2": {**TOLD, "instruction": None}})
    (item, _), (goal,) = read(tmp_path, human=False)
    assert item.options == {} and item.bullets == ("one",) and item.description == "" and goal.asin == item.asin
    assert (item.price, item.price_tag) == (100.0, "$100.0")
    folder(tmp_path, [row], {}, {ROW["asin"]: [HUMAN]})
    assert read(tmp_path)[0][0].attributes == ("DUMMY_ATTR",)


@pytest.mark.parametrize(
    "text, price, tag",
    [("$9.99", 9.99, "$9.99"), ("$1,299.00", 1299.0, "$1299.0"), ("", 100.0, "$100.0"), (None, 100.0, "$100.0")],
)
def test_prices(text, price, tag):
    assert read_price(text, "B") == (price, tag)


def test_a_range_is_drawn_once_for_every_machine():
    price, tag = read_price("$10.00 - $20.00", "B1")
    assert tag == "$10.0 to $20.0" and 10 <= price <= 20
    assert read_price("$10.00 - $20.00", "B1")[0] == price != read_price("$10.00 - $20.00", "B2")[0]


def test_limits():
    drawn = {price_limit(25.0, str(key)) for key in range(200)}
    assert {limit for limit, _ in drawn} == {40.0, 50.0, 60.0}  # of 30, 40, 50, 60 the larger of two
    assert (40.0, ", and price lower than 40.00 dollars") in drawn
    assert price_limit(30.0, "")[0] >= 50.0  # 30 is not above 30
    assert price_limit(979.0, "")[0] == 990.0
    assert price_limit(985.0, "") == price_limit(5000.0, "") == (NO_LIMIT, "")


def test_goals_are_shuffled_with_the_constant_seed(tmp_path):
    rows = [{**ROW, "asin": f"B{n}"} for n in range(30)]
    folder(tmp_path, rows, {}, {row["asin"]: [HUMAN] for row in rows})
    _, goals = read(tmp_path)
    expected = [f"B{n}" for n in range(30)]
    random.Random(233).shuffle(expected)
    assert [goal.asin for goal in goals] == expected
    assert [item.asin for item in read(tmp_path, num_products=7)[0]] == [f"B{n}" for n in range(7)]


def test_which_files_are_taken(tmp_path):
    with pytest.raises(ValueError, match="items_shuffle"):
        Source.find(str(tmp_path), None, False)
    folder(tmp_path, [], suffix="_1000")
    assert Source.find(str(tmp_path), None, False).products.name == "items_shuffle_1000.json"
    with pytest.raises(ValueError, match="human_goals"):
        Source.find(str(tmp_path), None, True)
    folder(tmp_path, [])
    names = {n: Source.find(str(tmp_path), n, False).products.name for n in (None, 1000, 5)}
    assert names == {None: "items_shuffle.json", 1000: "items_shuffle_1000.json", 5: "items_shuffle.json"}


ASIN = ROW["asin"]


def product(**changes):
    return lambda root: folder(root, [ROW, {**ROW, "asin": "B2", **changes}])


def option(entries):
    return product(customization_options={"Color": entries})


def told(entry):
    return lambda root: folder(root, [ROW], {ASIN: entry})


DEEP = "[" * 100_000
LONG = "9" * 5000  # more digits than Python reads a number of


@pytest.mark.parametrize(
    "write, message",
    [
        (lambda root: (root / "items_shuffle.json").write_text("[{"), "JSON in .*items_shuffle.json'"),
        (lambda root: (root / "items_shuffle.json").write_text(DEEP), "JSON in .*items_shuffle.json'"),
        (lambda root: (root / "items_shuffle.json").write_text(LONG), "JSON in .*items_shuffle.json'"),
        (lambda root: (root / "items_shuffle.json").write_bytes(b'["\xff"]'), "JSON in .*items_shuffle.json'"),
        (lambda root: (root / "items_shuffle.json").write_text("{}"), "a list at items_shuffle.json, got an object"),
        (lambda root: (root / "items_ins_v2.json").write_text("[]"), "an object at items_ins_v2.json, got a list"),
        (lambda root: folder(root, []), "products in items_shuffle.json, found none"),
        (lambda root: folder(root, [{"asin": "nan"}]), "products in items_shuffle.json, found none"),
        (lambda root: folder(root, [ROW, None]), r"an object at items_shuffle.json\[1\], got null"),
        (lambda root: folder(root, [{"asin": "B1"}]), r"at items_shuffle.json\[0\].small_description, got nothing"),
        (product(asin=3), r"text or null at items_shuffle.json\[1\].asin, got a number"),
        (product(name=None), r"text at items_shuffle.json\[1\].name, got null"),
        (product(name="\ud83d"), r"text at items_shuffle.json\[1\].name, got text with half a character"),
        (product(query=["lamp"]), r"text at items_shuffle.json\[1\].query, got a list"),
        (product(product_category=1.5), r"text at items_shuffle.json\[1\].product_category, got a number"),
        (product(full_description={}), r"text or null at items_shuffle.json\[1\].full_description, got an object"),
        (product(small_description=7), r"items_shuffle.json\[1\].small_description, got a number"),
        (product(small_description=["a", 7]), r"items_shuffle.json\[1\].small_description\[1\], got a number"),
        (product(pricing=9.99), r"text or null at items_shuffle.json\[1\].pricing, got a number"),
        (product(pricing="$free"), r"prices such as \$9.99, got '\$free' at items_shuffle.json\[1\].pricing"),
        (product(pricing="$1.2.3"), "prices such as"),
        (product(pricing="$" + LONG), "prices such as"),
        (product(customization_options="red"), r"an object at items_shuffle.json\[1\].customization_options, got text"),
        (product(customization_options=[]), "customization_options, got a list"),
        (option("red"), r"a list or null at items_shuffle.json\[1\].customization_options\['Color'\], got text"),
        (option([3]), r"an object at items_shuffle.json\[1\].customization_options\['Color'\]\[0\], got a number"),
        (option([{}]), r"\['Color'\]\[0\].value, got nothing"),
        (option([{"value": None}]), r"\['Color'\]\[0\].value, got null"),
        (told("x"), r"an object at items_ins_v2.json\['B000000001'\], got text"),
        (told({"attributes": "bright"}), r"a list at items_ins_v2.json\['B000000001'\].attributes, got text"),
        (told({"attributes": [True]}), r"text at .*attributes\[0\], got true or false"),
        (told({"instruction": 3}), r"text or null at items_ins_v2.json\['B000000001'\].instruction, got a number"),
        (told({"instruction": "a"}), r"a list at .*'B000000001'\].instruction_attributes, got nothing"),
        (told({"instruction": "a", "instruction_attributes": [[]]}), r"instruction_attributes\[0\], got a list"),
        (told({}), "goals for the products of items_shuffle.json in items_ins_v2.json, found none"),
    ],
)
def test_files_of_another_shape_are_named(tmp_path, write, message):
    folder(tmp_path, [ROW], {ASIN: TOLD})
    write(tmp_path)
    with pytest.raises(ValueError, match=rf"^environment\.options\.data: expected .*{message}"):
        read(tmp_path, human=False)


@pytest.mark.parametrize(
    "wishes, message",
    [
        ({ASIN: None}, r"a list at items_human_ins.json\['B000000001'\], got null"),
        ({ASIN: [3]}, r"an object at items_human_ins.json\['B000000001'\]\[0\], got a number"),
        ({ASIN: [HUMAN, {}]}, r"a list at .*\[1\].instruction_attributes, got nothing"),
        ({ASIN: [{**HUMAN, "instruction_attributes": "bright"}]}, r"a list at .*\.instruction_attributes, got text"),
        ({ASIN: [{**HUMAN, "instruction_attributes": [None]}]}, r"text at .*\.instruction_attributes\[0\], got null"),
        ({ASIN: [{**HUMAN, "instruction": None}]}, r"text at .*\[0\].instruction, got null"),
        ({ASIN: [{**HUMAN, "instruction_options": "green"}]}, r"or an object at .*instruction_options, got text"),
        ({ASIN: [{**HUMAN, "instruction_options": [3]}]}, r"text at .*instruction_options\['0'\], got a number"),
        ({ASIN: [{**HUMAN, "instruction_options": {"color": 3}}]}, r"instruction_options.color, got a number"),
        ([], "an object at items_human_ins.json, got a list"),
        ({}, "goals for the products of items_shuffle.json in items_human_ins.json, found none"),
    ],
)
def test_goals_of_another_shape_are_named(tmp_path, wishes, message):
    folder(tmp_path, [ROW], {}, wishes)
    with pytest.raises(ValueError, match=rf"^environment\.options\.data: expected .*{message}"):
        read(tmp_path)


def test_products_whose_options_make_too_many_goals_are_named_at_once(tmp_path):
    many = {f"option {n}": [{"value": f"{n} {value}"} for value in range(10)] for n in range(7)}
    folder(tmp_path, [{**ROW, "customization_options": many}], {ASIN: TOLD})
    with pytest.raises(ValueError, match=r"^environment\.options\.num_products: expected .* B000000001 .* 10,000,000"):
        read(tmp_path, human=False)


def test_options_can_be_clicked(tmp_path):
    """On one line, since a reply's action is; not empty, since click[] is no command."""
    options = {"Size": [{"value": "Extra\n large"}, {"value": " "}], "None": [{"value": ""}], "Nothing": []}
    folder(tmp_path, [{**ROW, "customization_options": options}], {ASIN: TOLD})
    (item,), (goal,) = read(tmp_path, human=False)
    assert item.options == {"size": ("extra large",)} and goal.options == {"size": "extra large"}


def test_a_refused_file_is_one_sentence_and_leaves_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MANUS_FAST_CACHE", str(tmp_path / "cache"))
    data = folder(tmp_path, [{**ROW, "name": 3}], {ASIN: TOLD}, {ASIN: [HUMAN]})
    assert cli.main(["play", "webshop", f"environment.options={{data: {data}}}"]) == 2
    shown = capsys.readouterr()
    sentence = "environment.options.data: expected text at items_shuffle.json[0].name, got a number"
    assert (shown.out, shown.err) == ("", f"manus-fast: {sentence}\n")
    assert [file for file in (tmp_path / "cache/webshop").iterdir() if not file.name.endswith(".lock")] == []


def test_the_environment_over_the_files(tmp_path, monkeypatch):
    monkeypatch.setenv("MANUS_FAST_CACHE", str(tmp_path / "cache"))
    rows = [{**ROW, "asin": f"B{n}", "name": f"Lamp model{n}"} for n in range(4)]
    wishes = [{**HUMAN, "instruction": f"I want lamp {n}."} for n in range(500)]
    data = folder(tmp_path, rows, {row["asin"]: TOLD for row in rows}, {row["asin"]: wishes for row in rows})
    environment = envs.make("webshop", data=data, nouns="rule")
    assert environment.settings["nouns"] == "rule"
    tasks = environment.tasks("train")
    assert len(tasks) == 500 and tasks[0].id.startswith("webshop/files-human-all-")
    batch = environment.make_batch(1)
    (text,), _ = batch.reset([0], tasks[:1], [0])
    assert "I want lamp " in text and "dollars" in text
    reward, over = [0.0], [False]
    while not over[0]:
        _, reward, terminated, truncated, _ = batch.step([0], batch.expert([0])[0])
        over = terminated | truncated
    assert reward[0] == 1.0 and terminated[0]
    with pytest.raises(ValueError, match="1500"):
        envs.make("webshop", data=data, num_products=3).tasks("test")
