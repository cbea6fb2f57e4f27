"""The reward of a purchase in WebShop (Yao et al. 2022, arXiv 2207.01206, section 3.2 and appendix A.5).

    r = r_type * (attributes found + options found + [price <= bound]) / (attributes + options + 1)

An attribute is found if it resembles one of the product's (a token-set ratio above 85), or occurs in its title,
features or description; an option if it resembles a chosen one, colours by their plain names. `r_type` compares the
kind of product with the wanted one, by the share of the wanted title's nouns in the product's title: 0 for none, 0.1
below a tenth, and else 1 if the products have the same query, two parts of the category or more than a fifth of the
nouns in common, and 0.5 if not. (The published program takes nouns from a tagger; here they are the words of a title
that are no known adjectives, function words or numbers.)
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .retrieval import phrases

ALIKE = 85
"""Token-set ratio, 0 to 100, above which two texts are alike."""
COLORS = phrases(
    "beige, black, blue, bronze, brown, copper, coral, cream, cyan, gold, gray, green, grey, indigo, ivory, "
    "khaki, lavender, lilac, lime, maroon, mint, navy, olive, orange, peach, pink, plum, purple, red, rose, rust, "
    "silver, tan, teal, turquoise, violet, white, yellow"
)
NO_NOUNS = frozenset(
    phrases(
        "a, an, and, or, the, for, with, without, in, on, of, to, by, from, at, as, is, that, this, breathable, "
        "lightweight, light, durable, waterproof, adjustable, foldable, portable, wireless, rechargeable, "
        "washable, organic, natural, vegan, handmade, modern, classic, vintage, rustic, soft, cozy, slim, loose, "
        "regular, quick, easy, fast, high, low, long, short, large, small, extra, heavy, free, non, anti, dry, "
        "wet, dual, single, double, insulated, stainless, reusable, compact, quiet, bright, sturdy, padded, "
        "elastic, quilted, fresh, roasted, sugar, gluten, dairy, certified, hypoallergenic, scented, unscented, "
        "moisturizing, nourishing, gentle, ergonomic, noise, cancelling, touch, resistant, proof, friendly, "
        "running, trail, dress, hooded, braided, ceramic, wooden, electric, dark, bold, sweet, salted"
    )
)


@dataclass(frozen=True, slots=True)
class Product:
    """A product of the shop."""

    asin: str
    """Code of ten letters and digits."""
    title: str
    query: str
    """Words of a search for it: its kind."""
    category: tuple[str, ...]
    """Categories from the widest to the narrowest."""
    attributes: tuple[str, ...]
    options: Mapping[str, tuple[str, ...]]
    """Values that may be chosen, by option."""
    price: float
    """Price of the product in dollars."""
    features: tuple[str, ...]
    description: str


@dataclass(frozen=True, slots=True)
class Goal:
    """A customer's wish, made from a product."""

    instruction: str
    product: Product
    """Product that meets the wish."""
    attributes: tuple[str, ...]
    options: Mapping[str, str]
    price_upper: float
    """Upper bound of the price in dollars."""


def score(bought: Product, chosen: Mapping[str, str], goal: Goal) -> float:
    """Return the reward of buying a product with the options `chosen` by name: 0 to 1."""
    found = sum(has_attribute(bought, wanted) for wanted in goal.attributes)
    picked = [plain_color(option) for option in chosen.values()]
    options = [plain_color(option) for option in goal.options.values()]
    found += sum(any(token_set_ratio(mine, wanted) > ALIKE for mine in picked) for wanted in options)
    found += bought.price <= goal.price_upper
    return type_score(bought, goal.product) * found / (len(goal.attributes) + len(goal.options) + 1)


def type_score(bought: Product, wanted: Product) -> float:
    """Return the likeness of the product's kind to the wanted one: 0, 0.1, 0.5 or 1."""
    nouns = title_nouns(wanted.title)
    share = len(nouns & title_nouns(bought.title)) / len(nouns) if nouns else 0.2
    if share < 0.1:
        return 0.1 if share else 0.0
    same_category = len(set(bought.category) & set(wanted.category)) >= 2
    return 1.0 if bought.query == wanted.query or same_category or share > 0.2 else 0.5


def has_attribute(product: Product, attribute: str) -> bool:
    """Return True if a product has an attribute, by its list of them or by its texts."""
    texts = (product.title, " ".join(product.features), product.description)
    return any(token_set_ratio(own, attribute) > ALIKE for own in product.attributes) or any(
        attribute in text.lower() for text in texts
    )


def title_nouns(title: str) -> set[str]:
    """Return the words of a title that name its kind."""
    return {word for word in re.findall(r"[a-z]+", title.lower()) if word not in NO_NOUNS and len(word) > 1}


def plain_color(option: str) -> str:
    """Return the first colour of `COLORS` in the option's name, or the option itself without one."""
    return next((color for color in COLORS if color in option), option)


def token_set_ratio(left: str, right: str) -> int:
    """Return the likeness of two texts as sets of words, 0 to 100, as `thefuzz.fuzz.token_set_ratio` does."""
    ours, theirs = (set(re.findall(r"[a-z0-9]+", text.lower())) for text in (left, right))
    if not ours or not theirs:
        return 0
    shared, only_ours, only_theirs = ours & theirs, sorted(ours - theirs), sorted(theirs - ours)
    if shared and not (only_ours and only_theirs):
        return 100
    base = sorted(shared)
    texts = " ".join(base), " ".join(base + only_ours), " ".join(base + only_theirs)
    pairs = ((1, 2), (0, 1), (0, 2)) if shared else ((1, 2),)
    return round(max(_ratio(texts[i], texts[j]) for i, j in pairs))


def _ratio(left: str, right: str) -> float:
    """Return twice the length of the longest common subsequence over the length of both, times 100."""
    return 200.0 * _common(left, right) / (len(left) + len(right))


def _common(left: Sequence[str], right: Sequence[str]) -> int:
    row = [0] * (len(right) + 1)
    for a in left:
        before = row
        row = [0]
        for j, b in enumerate(right):
            row.append(before[j] + 1 if a == b else max(before[j + 1], row[j]))
    return row[-1]
