"""WebShop's reward against figures worked out by hand, one for each branch of the formula; the generated catalogue."""

import dataclasses

import pytest

from manus_fast.envs.webshop.catalogue import goals, products
from manus_fast.envs.webshop.nouns import by_rule, installed, tagger
from manus_fast.envs.webshop.reward import Goal, Product, normalize_color, reward, token_set_ratio, type_reward

PRODUCT = Product("A", "lamp", "Home › Lighting › Lamp", "Glint lamp", "A lamp that is hand made.", ("low noise fan",),
                  ("easy to clean",), {"color": ("dark blue", "red"), "size": ("small",)}, 20.0)  # fmt: skip
GOAL = Goal("A", "lamp", "Home › Lighting › Lamp", "Glint lamp", ("easy to clean", "hand made"),
            {"color": "blue", "size": "small"}, 30.0, "")  # fmt: skip


@pytest.mark.parametrize(
    "chosen, product, goal, expected",
    [
        # (2 attributes + 2 options + price) of 2 + 2 + 1
        (["dark blue", "small"], {}, {}, 1.0),
        (["red", "small"], {}, {}, 4 / 5),
        ([], {}, {}, 3 / 5),
        (["dark blue", "small"], {"price": 30.0}, {}, 1.0),
        (["dark blue", "small"], {"price": 30.01}, {}, 4 / 5),
        (["dark blue", "small"], {}, {"attributes": ("low noise", "waterproof")}, 4 / 5),
        ([], {"price": 31.0}, {"attributes": ("waterproof",), "options": {}}, 0.0),
        # An attribute that only the title, only the bullet points or only the description holds, or none of them alone.
        ([], {"title": "lamp, waterproof"}, {"attributes": ("waterproof",), "options": {}}, 2 / 2),
        ([], {"bullets": ("a", "is Waterproof")}, {"attributes": ("waterproof",), "options": {}}, 2 / 2),
        ([], {"description": "A waterproof lamp."}, {"attributes": ("waterproof",), "options": {}}, 2 / 2),
        (
            [],
            {"title": "Glint lamp water", "description": "proof"},
            {"attributes": ("water proof",), "options": {}},
            1 / 2,
        ),
        # Without the product's own list of attributes the description still says "hand made".
        ([], {"attributes": ()}, {"options": {}}, 2 / 3),
        # One chosen value may answer two wishes; what was not wished for counts nothing.
        (["blue"], {}, {"attributes": (), "options": {"a": "blue", "b": "navy blue"}}, 3 / 3),
        (["blue", "red", "small"], {}, {"attributes": (), "options": {"a": "blue"}}, 2 / 2),
        # No limit is met by any price; the type multiplies all.
        ([], {"price": 4000.0}, {"attributes": (), "options": {}, "price_upper": 1e6}, 1.0),
        (["dark blue", "small"], {}, {"name": "the best of", "query": "chair", "category": "Garden"}, 0.5),
    ],
)
def test_hits_by_hand(chosen, product, goal, expected):
    thing, wish = dataclasses.replace(PRODUCT, **product), dataclasses.replace(GOAL, **goal)
    assert reward(thing, wish, chosen) == pytest.approx(expected)


ELSE = {"query": "chair", "category": "Garden"}
ELEVEN = "lamp b c d e f g h i j k"  # b … k are words of one letter, nouns by the rule: 11 in all


@pytest.mark.parametrize(
    "goal, expected",
    [
        ({"name": "Glint chair", "category": "Garden"}, 1.0),  # the same query
        ({"name": "Glint chair", "query": "chair"}, 1.0),  # three shared parts of the category
        ({"name": "Glint chair"} | ELSE, 1.0),  # one noun of two: 0.5 > 0.2
        ({"name": "lamp b c d e"} | ELSE, 0.5),  # one of five: 0.2 is not above 0.2
        ({"name": "the best of"} | ELSE, 0.5),  # no noun counts as 0.2
        ({"name": "lamp desk desk desk desk desk"} | ELSE, 0.5),  # repetitions count below the line: one of six
        ({"name": ELEVEN} | ELSE, 0.1),  # one of eleven is below 0.1
        ({"name": ELEVEN}, 0.1),  # which the same query does not mend
        ({"name": "wooden chair"}, 0.0),  # nothing shared
    ],
)
def test_type_reward_by_hand(goal, expected):
    assert type_reward(PRODUCT, dataclasses.replace(GOAL, **goal)) == expected


def test_nouns_and_ratio():
    assert by_rule("The new Lamp, for a desk lamp") == ("lamp", "desk", "lamp")
    assert token_set_ratio("easy clean", "clean easy thing") == 100
    assert token_set_ratio("red", "blue") < 50
    # Whole per cent: 2·6/14 = 85.7 is 86 and a hit; 2·17/40 = 85 is none.
    assert token_set_ratio("abcdefg", "abcdefh") == 86
    assert token_set_ratio("a" * 17 + "bcd", "a" * 17 + "efg") == 85
    assert normalize_color("x-dark blue") == "blue" and normalize_color("size 7") == "size 7"
    assert token_set_ratio("", "red") == 0


def test_the_catalogue_can_be_satisfied_and_repeats():
    catalogue = products(5000, 0)
    wishes = goals(catalogue, 3000, 0)
    assert catalogue == products(5000, 0) and wishes == goals(catalogue, 3000, 0)
    assert len({item.asin for item in catalogue}) == 5000
    assert len({item.category.rpartition(" › ")[0] for item in catalogue}) >= 20
    by_asin = {item.asin: item for item in catalogue}
    assert all(reward(by_asin[w.asin], w, list(w.options.values())) == 1.0 for w in wishes)
    assert all(0 < w.price_upper - by_asin[w.asin].price <= 40 for w in wishes)


def test_taggers():
    assert tagger("rule") == ("rule", by_rule)
    with pytest.raises(ValueError, match="nouns"):
        tagger("guess")
    if installed() is None:
        assert tagger("auto") == ("rule", by_rule)
        with pytest.raises(ValueError, match="spacy"):
            tagger("spacy")
    else:
        name, nouns = tagger("spacy")
        assert name == f"spacy {installed()}" and "lamp" in nouns("a red lamp for the desk")
        assert "for" not in nouns("a red lamp for the desk")
