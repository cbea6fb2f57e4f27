"""The shop: products and customers' wishes, drawn from a seed. Each wish is made from a product, so it can be met.

As in WebShop, a wish has attributes of a product, one choice for each of its options, and a bound on the price, drawn
among the next four round prices. Wishes are shuffled with seed 233; the first 500 are for the test, the next 1,000 for
development, the rest for training. A product may have wishes in more than one part, as in WebShop.
"""

import random
from dataclasses import dataclass
from functools import cache
from itertools import product as combinations

from .retrieval import Bm25, phrases
from .webshop_score import Goal, Product

SHOP_SEED, SPLIT_SEED = 0, 233
SPLITS = {"test": (0, 500), "dev": (500, 1500), "train": (1500, None), "all": (0, None)}
"""Bounds of each part among the shuffled wishes."""
_SIZES = phrases("petite, small, medium, large, tall, plus")
_COLORS = phrases("black, white, navy blue, red, olive green, gray, light pink, beige, purple, orange, teal, brown")
_BRANDS = phrases(
    "Northfall, Velora, Brimstead, Kestrelo, Lumaro, Ostrava, Pinefold, Quillon, Ravensby, Solenne, Tarnwick, Umbrio"
)
_LINES = phrases(
    "Summit, Harbor, Meadow, Comet, Canyon, Willow, Echo, Ember, Delta, Falcon, Grove, Horizon, Lagoon, Orbit, Prairie"
)


@dataclass(frozen=True, slots=True)
class _Department:
    """The common properties of one department's products."""

    kinds: dict[str, tuple[str, str, float, float]]
    """Lower categories, and the lowest and the highest price in dollars, by query."""
    attributes: tuple[str, ...]
    options: dict[str, tuple[str, ...]]
    uses: tuple[str, ...]


_DEPARTMENTS = {
    "Clothing": _Department(
        {
            "running shoes": ("Shoes", "Athletic", 35, 140),
            "ankle boots": ("Shoes", "Boots", 40, 180),
            "rain jacket": ("Outerwear", "Jackets", 30, 160),
            "hooded sweatshirt": ("Tops", "Sweatshirts", 18, 80),
            "yoga leggings": ("Bottoms", "Leggings", 15, 70),
        },
        phrases(
            "machine washable, moisture wicking, long sleeve, high waist, slim fit, loose fit, quick drying, "
            "water resistant, rubber sole, memory foam, arch support, elastic closure, hand wash, polyester "
            "spandex, breathable mesh, fleece lined"
        ),
        {"color": _COLORS, "size": _SIZES},
        ("Hiking", "Travel", "Gym", "Winter", "Office", "Camping"),
    ),
    "Home": _Department(
        {
            "table lamp": ("Lighting", "Lamps", 20, 120),
            "throw blanket": ("Bedding", "Blankets", 15, 90),
            "bath towels": ("Bath", "Towels", 12, 60),
            "storage basket": ("Storage", "Baskets", 10, 55),
            "office chair": ("Furniture", "Chairs", 70, 390),
        },
        phrases(
            "easy assemble, easy clean, space saving, heavy duty, solid wood, super soft, fade resistant, eco "
            "friendly, stainless steel, non slip, high density, mid century, white finish, lumbar support, double "
            "sided"
        ),
        {"color": _COLORS, "style": ("round", "square", "oval", "tall", "compact", "corner")},
        ("Bedroom", "Kitchen", "Patio", "Bathroom", "Nursery", "Studio"),
    ),
    "Grocery": _Department(
        {
            "trail mix": ("Snacks", "Nuts", 8, 40),
            "green tea": ("Beverages", "Tea", 6, 35),
            "protein bars": ("Snacks", "Bars", 12, 50),
            "hot sauce": ("Pantry", "Sauces", 5, 28),
            "ground coffee": ("Beverages", "Coffee", 9, 48),
        },
        phrases(
            "gluten free, sugar free, dairy free, non gmo, low carb, low sodium, plant based, keto friendly, soy "
            "free, kosher certified, high protein, artificial colors free, individually wrapped, freeze dried"
        ),
        {
            "flavor": ("vanilla", "ginger", "lemon", "cinnamon", "chili", "maple", "coconut", "smoked"),
            "pack": ("single", "pair", "half dozen", "family crate"),
        },
        ("Breakfast", "Lunchbox", "Gift", "Road", "Party", "Desk"),
    ),
    "Beauty": _Department(
        {
            "face moisturizer": ("Skin Care", "Creams", 9, 65),
            "shampoo bar": ("Hair Care", "Shampoo", 7, 30),
            "lip balm": ("Skin Care", "Lips", 4, 22),
            "hair brush": ("Hair Care", "Tools", 6, 45),
            "body lotion": ("Skin Care", "Lotions", 8, 40),
        },
        phrases(
            "cruelty free, paraben free, fragrance free, sulfate free, alcohol free, tea tree, coconut oil, "
            "hyaluronic acid, dermatologist tested, long lasting, anti aging, dead skin, damaged hair, bpa free, "
            "travel size"
        ),
        {
            "scent": ("rose", "lavender", "citrus", "vanilla", "mint", "sandalwood", "unscented"),
            "size": ("sachet", "travel tube", "full bottle", "refill"),
        },
        ("Men", "Women", "Kids", "Spa", "Beach", "Night"),
    ),
    "Electronics": _Department(
        {
            "wireless earbuds": ("Audio", "Headphones", 18, 190),
            "bluetooth speaker": ("Audio", "Speakers", 20, 230),
            "phone case": ("Phones", "Cases", 8, 45),
            "portable charger": ("Phones", "Power", 15, 90),
            "computer monitor": ("Computers", "Displays", 90, 640),
        },
        phrases(
            "fast charging, noise cancelling, water resistant, high resolution, carbon fiber, plug play, easy "
            "install, hands free, long lasting, heavy duty, aluminum alloy, usb port, stereo sound, high "
            "performance, wall mounted"
        ),
        {"color": _COLORS, "style": ("standard", "plus", "mini", "pro", "corded", "docked")},
        ("Gaming", "Car", "Desk", "Sports", "School", "Studio"),
    ),
}
_FEATURES = ("Made to be {}.", "You will notice it is {}.", "{}: tested in daily use.", "Chosen because it is {}.")
_WISHES = ("i am looking for a {}", "find me a {}", "i need a {}", "i would like to buy a {}")


@dataclass(frozen=True, slots=True)
class Shop:
    """The products, the search over them, and the shuffled wishes. Immutable, so threads may share it."""

    products: tuple[Product, ...]
    index: Bm25
    goals: tuple[Goal, ...]
    by_asin: dict[str, Product]

    def split(self, name: str) -> tuple[Goal, ...]:
        """Return the wishes of a part: test, dev, train or all."""
        begin, end = SPLITS[name]
        return self.goals[begin:end]


@cache
def open_shop(seed: int, num_products: int) -> Shop:
    """Draw a shop, once a process: the same for the same arguments everywhere."""
    rng = random.Random(seed)
    kinds = [(name, query) for name, department in _DEPARTMENTS.items() for query in department.kinds]
    asins: set[str] = set()
    while len(asins) < num_products:
        asins.add("B0" + "".join(rng.choices("ABCDEFGHJKLMNPQRSTUVWXYZ0123456789", k=8)))
    products = tuple(_product(rng, asin, *kinds[i % len(kinds)]) for i, asin in enumerate(sorted(asins)))
    goals = [goal for product in products for goal in _goals(rng, product)]
    random.Random(SPLIT_SEED).shuffle(goals)
    index = Bm25([" ".join((p.title, *p.features, p.description, *sum(p.options.values(), ()))) for p in products])
    return Shop(products, index, tuple(goals), {product.asin: product for product in products})


def _product(rng: random.Random, asin: str, name: str, query: str) -> Product:
    department = _DEPARTMENTS[name]
    *category, low, high = department.kinds[query]
    attributes = tuple(rng.sample(department.attributes, rng.randrange(3, 7)))
    uses = rng.sample(department.uses, 2)
    maker, line = rng.choice(_BRANDS), rng.choice(_LINES)
    title = f"{maker} {line} {attributes[0]} {query} for {uses[0]} and {uses[1]}".title()
    names = sorted(department.options)
    options = {}
    for option in names if rng.random() < 0.7 else [rng.choice(names)]:
        known = department.options[option]
        options[option] = tuple(sorted(rng.sample(known, rng.randrange(2, 5)), key=known.index))
    features = tuple(rng.choice(_FEATURES).format(attribute).capitalize() for attribute in attributes[:-1])
    description = f"This {query} by {maker} belongs to the {line} line and is known to be {attributes[-1]}."
    price = round(rng.uniform(low, high), 2)
    return Product(asin, title, query, (name, *category), attributes, options, price, features, description)


def _goals(rng: random.Random, product: Product) -> list[Goal]:
    """Return a wish for each combination of a product's options."""
    found = []
    names = sorted(product.options)
    attributes = tuple(rng.sample(product.attributes, rng.randrange(1, 4)))
    for chosen in combinations(*(product.options[name] for name in names)):
        next_prices = [10.0 * i for i in range(1, 100) if 10.0 * i > product.price][:4]
        bound = max(rng.sample(next_prices, 2))
        options = dict(zip(names, chosen, strict=True))
        asked = ", and ".join([*(f"{name}: {value}" for name, value in options.items())])
        wish = rng.choice(_WISHES).format(f"{', '.join(attributes)} {product.query}")
        found.append(
            Goal(f"{wish} with {asked}, and price lower than {bound:.2f} dollars", product, attributes, options, bound)
        )
    return found
