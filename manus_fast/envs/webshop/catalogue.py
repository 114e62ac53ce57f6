"""A catalogue of our own: seeded products and goals in 24 categories, the same on every machine."""

from __future__ import annotations

import random

from manus_fast.envs.webshop.files import price_limit
from manus_fast.envs.webshop.reward import Goal, Product

_COLORS = (
    "black", "blue", "brown", "gold", "green", "grey", "orange", "pink", "purple", "red", "silver", "white", "yellow",
)  # fmt: skip
_SIZES = ("small", "medium", "large", "x-large")
_THINGS = {
    "Clothing › Men": ("jacket", "shirt", "hoodie"),
    "Clothing › Women": ("dress", "skirt", "blouse"),
    "Clothing › Shoes": ("sneakers", "sandals", "boots"),
    "Clothing › Accessories": ("belt", "scarf", "hat"),
    "Beauty › Hair": ("shampoo", "hairbrush", "conditioner"),
    "Beauty › Skin": ("lotion", "serum", "cleanser"),
    "Beauty › Makeup": ("lipstick", "mascara", "eyeliner"),
    "Beauty › Oral Care": ("toothbrush", "toothpaste", "floss"),
    "Home › Furniture": ("chair", "bookcase", "nightstand"),
    "Home › Bedding": ("pillow", "blanket", "mattress"),
    "Home › Lighting": ("lamp", "lantern", "chandelier"),
    "Home › Kitchen": ("kettle", "skillet", "teapot"),
    "Home › Decor": ("vase", "mirror", "curtain"),
    "Home › Storage": ("basket", "shelf", "drawer"),
    "Electronics › Audio": ("headphones", "speaker", "microphone"),
    "Electronics › Video": ("projector", "monitor", "webcam"),
    "Electronics › Phones": ("charger", "case", "tripod"),
    "Electronics › Computers": ("keyboard", "laptop", "router"),
    "Grocery › Snacks": ("crackers", "cookies", "popcorn"),
    "Grocery › Drinks": ("coffee", "tea", "juice"),
    "Grocery › Pantry": ("honey", "rice", "pasta"),
    "Garden › Tools": ("shovel", "rake", "hose"),
    "Sports › Fitness": ("dumbbell", "mat", "treadmill"),
    "Pets › Dogs": ("leash", "collar", "harness"),
}
_BRANDS = ("Aldora", "Brimley", "Corvane", "Dunmere", "Elstow", "Farrow", "Glint", "Harken")
_ATTRIBUTES = (
    "long lasting", "easy to clean", "lightweight", "heavy duty", "eco friendly", "water resistant", "hand made",
    "easy to use", "high quality", "non toxic", "travel size", "fade resistant", "quick release", "low noise",
)  # fmt: skip


def products(count: int, seed: int) -> list[Product]:
    """`count` products, in turn over the categories and their things."""
    rng = random.Random(f"products {seed}")
    kinds = [(category, thing) for category, things in _THINGS.items() for thing in things]
    made = []
    for number in range(count):
        category, thing = kinds[number % len(kinds)]
        attributes = tuple(rng.sample(_ATTRIBUTES, 3))
        options = {"color": tuple(rng.sample(_COLORS, 4))}
        if rng.random() < 0.5:
            options["size"] = tuple(_SIZES[: rng.randint(2, 4)])
        made.append(
            Product(
                asin=f"B{number:09d}",
                query=thing,
                category=f"{category} › {thing.capitalize()}",
                title=f"{rng.choice(_BRANDS)} {thing} {attributes[0]} {rng.randint(10, 99)}",
                description=f"A {thing} that is {attributes[1]}.",
                bullets=(f"{attributes[2]} {thing}", "made with care"),
                attributes=attributes,
                options=options,
                price=round(rng.uniform(5, 120), 2),
            )
        )
    return made


def goals(catalogue: list[Product], count: int, seed: int) -> list[Goal]:
    """`count` goals, each fulfilled by a product of the catalogue, in an order that is shuffled with the seed 233."""
    rng = random.Random(f"goals {seed}")
    made = []
    for number in range(count):
        product = catalogue[number % len(catalogue)]
        attributes = tuple(rng.sample(product.attributes, rng.randint(1, 2)))
        options = {name: rng.choice(values) for name, values in product.options.items()}
        upper, limit = price_limit(product.price, f"{seed} {number}")
        wishes = ", ".join((*attributes, *(f"{name}: {value}" for name, value in options.items())))
        text = f"Find me {product.query} with {wishes}{limit}"
        made.append(
            Goal(product.asin, product.query, product.category, product.title, attributes, options, upper, text)
        )
    random.Random(233).shuffle(made)
    return made
