"""WebShop (Yao et al. 2022) in text mode, over a generated shop: no Java, no download, any number in one process.

Pages: search; results, ten a page and fifty at most; an item with its options, description, features and reviews; the
end. Actions are `search[words]` on the search page and `click[shown value]`. An observation is the page's text, its
parts joined by ` [SEP] `, and a line with the possible actions. Buying ends the episode with the reward of
`webshop_score`. Three numbers, which other programs mix up, are separate metrics: `success` (a reward of 1),
`task_score` (100 times the reward) and `purchase` (anything was bought).

    env.shop.target=envs.webshop:WebShopEnv env.shop.args.split=train
"""

import re
from dataclasses import dataclass, field, replace
from typing import Any

from .webshop_catalogue import SHOP_SEED, SPLITS, open_shop
from .webshop_score import Goal, Product, score

PER_PAGE, MOST_RESULTS = 10, 50
DETAILS = ("description", "features", "reviews")
INSTRUCTION = """You are shopping in a web shop. Find and buy what the instruction asks for.
An action is search[<words>], where there is a search bar, or click[<value>] of one of the values that can be clicked.
Choose the options that are asked for, then click[buy now], which ends the visit."""
AGGREGATION = {"success": "last", "task_score": "last", "purchase": "last"}
_ACTION = re.compile(r"\s*(search|click)\s*\[(.*)\]\s*", re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Page:
    """The customer's current page."""

    name: str
    """Kind of page: search, results, item, description, features, reviews or end."""
    words: str = ""
    """Words of the search."""
    number: int = 1
    """Number of the page of results."""
    asin: str = ""
    options: dict[str, str] = field(default_factory=dict)
    """Chosen values on the item's page, by option."""


class WebShopEnv:
    """A visit to the shop with one wish of the split: seed n has wish n, modulo their number."""

    def __init__(
        self, split: str = "train", strict: bool = False, products: int = 1000, catalogue_seed: int = SHOP_SEED
    ) -> None:
        """Open the shop. `split`: test, dev, train or all. `strict`: pay only a perfect purchase, with 1.

        ValueError for an unknown split, or one without wishes in a shop of this size.
        """
        if split not in SPLITS:
            raise ValueError(f"split={split}: known are {', '.join(SPLITS)}")
        self._shop, self._strict = open_shop(catalogue_seed, products), strict
        self._goals = self._shop.split(split)
        if not self._goals:
            raise ValueError(f"split={split}: a shop of {products} products has no wishes for it; raise products")
        self._goal: Goal = self._goals[0]
        self._page, self._results = Page("search"), list[Product]()

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        """Enter the shop with this seed's wish."""
        self._goal = self._goals[seed % len(self._goals)]
        self._page, self._results = Page("search"), []
        return self._observation(), {"instruction": INSTRUCTION, "state_key": self._state_key()}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Search or click. Anything that the page does not offer changes nothing."""
        before, worth = self._page, 0.0
        matched = _ACTION.fullmatch(action)
        verb, value = (matched[1].lower(), matched[2].strip().lower()) if matched else ("", "")
        valid = True
        if verb == "search" and value and before.name == "search":
            self._results = [self._shop.products[i] for i in self._shop.index.search(value, MOST_RESULTS)]
            self._page = Page("results", value)
        elif verb == "click" and value in self._clickable() and value != "search":
            self._page = self._clicked(value)
        else:
            valid = verb == "click" and value == "search" and before.name == "search"
        if self._page.name == "end":
            worth = score(self._shop.by_asin[before.asin], before.options, self._goal)
        success = float(worth >= 1.0)
        metrics = {
            "success": success,
            "task_score": 100.0 * worth,
            "purchase": float(self._page.name == "end"),
            "action_is_valid": float(valid),
            "action_is_effective": float(self._page != before),
        }
        info = {"metrics": metrics, "metrics_agg_mode": AGGREGATION, "state_key": self._state_key()}
        return self._observation(), success if self._strict else worth, self._page.name == "end", False, info

    def solution(self) -> list[str] | None:
        """Return the actions from the present page to a perfect purchase: an oracle for demonstrations.

        It searches by the words of the instruction, as a customer would; None if that does not find the product.
        """
        page, goal = self._page, self._goal
        if page.name == "end":
            return []
        here = page.asin == goal.product.asin
        way = ["click[< prev]"] * (page.name in DETAILS) if here else self._way(goal)
        if way is None:
            return None
        chosen = page.options if here else {}
        options = [f"click[{value}]" for name, value in goal.options.items() if chosen.get(name) != value]
        return [*way, *options, "click[buy now]"]

    def _way(self, goal: Goal) -> list[str] | None:
        """Return the actions to the product's page; None if the search does not find it."""
        words = f"{' '.join(goal.attributes)} {goal.product.query}"
        found, at, way = self._results, self._page.number, list[str]()
        if self._page.name != "results" or goal.product not in found:
            found, at = [self._shop.products[i] for i in self._shop.index.search(words, MOST_RESULTS)], 1
            way = ["click[back to search]"] * (self._page.name != "search") + [f"search[{words}]"]
        if goal.product not in found:
            return None
        pages = found.index(goal.product) // PER_PAGE + 1 - at
        way += ["click[next >]" if pages > 0 else "click[< prev]"] * abs(pages)
        return [*way, f"click[{goal.product.asin.lower()}]"]

    def _clicked(self, value: str) -> Page:
        """Return the page behind a clickable value."""
        page = self._page
        if value == "back to search":
            return Page("search")
        if value == "buy now":
            return replace(page, name="end")
        if value == "next >":
            return replace(page, number=page.number + 1)
        if value == "< prev":
            if page.name == "results":
                return replace(page, number=page.number - 1)
            return replace(page, name="item") if page.name in DETAILS else Page("results", page.words, page.number)
        if page.name == "results":
            return replace(page, name="item", asin=value.upper(), options={})
        if value in DETAILS:
            return replace(page, name=value)
        name = next(name for name, values in self._product().options.items() if value in values)
        return replace(page, options=page.options | {name: value})

    def _clickable(self) -> list[str]:
        """Return the clickable values, in small letters."""
        page = self._page
        if page.name == "search":
            return ["search"]
        if page.name == "end":
            return []
        found = ["back to search"]
        if page.name == "results":
            shown = self._shown()
            found += ["< prev"] * (page.number > 1) + ["next >"] * (page.number * PER_PAGE < len(self._results))
            return found + [product.asin.lower() for product in shown]
        found.append("< prev")
        if page.name == "item":
            found += [*DETAILS, "buy now", *(value for values in self._product().options.values() for value in values)]
        return found

    def _shown(self) -> list[Product]:
        begin = (self._page.number - 1) * PER_PAGE
        return self._results[begin : begin + PER_PAGE]

    def _product(self) -> Product:
        return self._shop.by_asin[self._page.asin]

    def _observation(self) -> str:
        if self._page.name == "end":
            return "Thank you for shopping with us!"
        text = " [SEP] ".join(self._parts())
        clicks = [f"click[{value}]" for value in self._clickable() if value != "search"]
        actions = ["search[<content>]"] * (self._page.name == "search") + clicks
        return f"{text}\nAvailable actions: {', '.join(actions)}"

    def _parts(self) -> list[str]:
        """Return the texts of the page, in WebShop's order."""
        page, asked = self._page, ["Instruction:", self._goal.instruction]
        if page.name == "search":
            return ["WebShop", *asked, "Search"]
        parts = [*asked, "Back to Search"]
        if page.name == "results":
            parts.append(f"Page {page.number} (Total results: {len(self._results)})")
            parts += [text for text in ("< Prev", "Next >") if text.lower() in self._clickable()]
            return parts + [text for p in self._shown() for text in (p.asin, p.title, f"${p.price:.2f}")]
        parts.append("< Prev")
        product = self._product()
        if page.name == "description":
            return [*parts, product.description]
        if page.name == "features":
            return [*parts, *product.features]
        if page.name == "reviews":
            return [*parts, "There are no reviews."]
        chosen = [f"You have clicked {value}." for value in page.options.values()]
        options = [text for name, values in product.options.items() for text in (name, *values)]
        price = [product.title, f"Price: ${product.price:.2f}", "Rating: N.A."]
        return [*chosen, *parts, *options, *price, "Description", "Features", "Reviews", "Buy Now"]

    def _state_key(self) -> str:
        """Return the wish and the page, with the chosen options."""
        page = self._page
        chosen = ", ".join(f"{name}={value}" for name, value in sorted(page.options.items()))
        return f"{self._goal.instruction}|{page.name}|{page.words}|{page.number}|{page.asin}|{chosen}"
