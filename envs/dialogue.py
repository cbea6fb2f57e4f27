"""A dialogue: a simulated customer wants to book a table, and answers questions, a few at a time.

The model talks to the customer in plain text, looks for restaurants with the tool `search`, and ends the episode with
the tool `book` (see `envs.tool_calls`). The customer's wishes are drawn from the seed: cuisine, area and price of the
restaurant, day, time and number of people. One wish has a second choice, which the customer names after hearing that
the first is unavailable, as it is half the time. The booking is worth 1.0 if all is as wished. After too many messages
the customer leaves.

    env.booking.target=envs.dialogue:DialogueEnv env.booking.args.patience=8
    env.booking.target=envs.dialogue:LlmDialogueEnv env.booking.args.user_url=http://127.0.0.1:8000/v1
"""

import os
import random
import re
from dataclasses import dataclass
from typing import Any

from spmd_rl.types import Http

from .retrieval import phrases
from .tool_calls import Toolbox, ToolReply, tool_call

WISHES = {
    "cuisine": phrases("Thai, Italian, Indian, French, Greek, Korean"),
    "area": phrases("centre, north, south, harbour"),
    "price": phrases("cheap, moderate, expensive"),
    "day": phrases("Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday"),
    "time": phrases("17:30, 18:00, 18:30, 19:00, 19:30, 20:00, 20:30"),
    "people": phrases("2, 3, 4, 5, 6, 7, 8"),
}
OF_A_RESTAURANT = ("cuisine", "area", "price")
ASKED = {
    "cuisine": re.compile(r"cuisine|food|kind of|type of|eat\b"),
    "area": re.compile(r"\barea|where|part of|location|neighbou?rhood"),
    "price": re.compile(r"price|budget|cheap|expensive|spend"),
    "day": re.compile(r"\bday|\bdate|\bwhen\b"),
    "time": re.compile(r"\btime|hour|o'clock|\bwhen\b"),
    "people": re.compile(r"people|persons|guests|how many|party|seats|size"),
}
"""Patterns of questions for each wish."""
QUESTIONS = {
    "cuisine": "What kind of food would you like?",
    "area": "In which area should it be?",
    "price": "What is your budget?",
    "day": "For which day?",
    "time": "At what time?",
    "people": "How many guests will you be?",
}
REFUSED = re.compile(
    r"\bno\b|\bnone\b|nothing|sorry|unfortunately|not available|unavailable|cannot|isn't|no longer|else\b"
)
SAID = {
    "cuisine": "I would like {} food.",
    "area": "It should be in the {}, please.",
    "price": "Something {}, please.",
    "day": "For {}.",
    "time": "At {}.",
    "people": "We are {}.",
}
NAMES = phrases("Lantern, Old Mill, Saffron, Blue Door, Anchor, Olive Tree, Copper Pot, Garden, Terrace, Corner, Pearl")
INSTRUCTION = """You book tables for customers. Talk to the customer in plain words to learn what is wanted: cuisine,
area, price, day, time and number of people. Look for a restaurant with the tool `search`; if there is none, say so and
ask. Then call `book`, once. Whatever calls no tool is said to the customer."""
AGGREGATION = {"success": "last", "booked": "last", "wishes_met": "last", "messages": "sum", "tool_calls": "sum"}


@dataclass(frozen=True, slots=True)
class Customer:
    """Wishes by name, and the one that has a second choice."""

    wishes: dict[str, str]
    flexible: str
    second: str


class DialogueEnv:
    """A booking with a rule-based customer."""

    def __init__(self, patience: int = 8, answers: int = 2, partial: bool = False) -> None:
        """Configure the customer.

        `patience`: number of messages that the customer answers. `answers`: number of questions answered per message.
        `partial`: a booking is worth its share of met wishes. ValueError for numbers below 1.
        """
        if patience < 1 or answers < 1:
            raise ValueError(f"patience={patience}, answers={answers}: at least 1")
        self._patience, self._answers, self._partial = patience, answers, partial
        self._customer = Customer({}, "", "")
        self._restaurants: dict[str, dict[str, str]] = {}
        self._told: list[str] = []
        self._searched: list[dict[str, str]] = []
        self._messages, self._booking = 0, dict[str, str]()
        self._tools = Toolbox.of({"search": self._search, "book": self._book})

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        """Draw a customer and the restaurants of a town."""
        rng = random.Random(seed)
        wishes = {name: rng.choice(values) for name, values in WISHES.items()}
        flexible = rng.choice(OF_A_RESTAURANT)
        second = rng.choice([value for value in WISHES[flexible] if value != wishes[flexible]])
        self._customer = Customer(wishes, flexible, second)
        self._restaurants = _restaurants(rng, self._customer)
        self._told, self._searched = rng.sample(sorted(wishes), 2), []
        self._messages, self._booking = 0, {}
        said = " ".join(["Hello, I want to book a table.", *(SAID[name].format(wishes[name]) for name in self._told)])
        return said, {"instruction": INSTRUCTION, "tools": self._tools.schemas, "state_key": self._state_key(said)}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Call a tool, or send a message to the customer."""
        reply = self._tools.play(action)
        return self._after(reply, self._answer(reply.said) if reply.said else "")

    def solution(self) -> list[str] | None:
        """Return the messages and calls from here to a right booking: an oracle for demonstrations. None if the
        customer would leave before.
        """
        if self._booking:
            return []
        wishes = {name: self._customer.wishes[name] for name in OF_A_RESTAURANT}
        asked = [QUESTIONS[name] for name in WISHES if name not in self._told]
        searches, refusal = [wishes], list[str]()
        if not any(place == wishes for place in self._restaurants.values()):
            searches.append(wishes | {self._customer.flexible: self._customer.second})
            refusal = [] if "second" in self._told else ["Sorry, there is no such restaurant."]
        if self._messages + len(asked) + len(refusal) > self._patience:
            return None
        first, *second = ("" if wish in self._searched else tool_call("search", wish) for wish in searches)
        plan = [*asked, first, *refusal, *second, tool_call("book", self.right_booking())]
        return [action for action in plan if action]

    def right_booking(self) -> dict[str, str]:
        """Return a booking that meets all wishes, as arguments of `book`."""
        wanted = self._wanted()
        return next(
            {"name": name, **wanted} for name in self._restaurants if self._met({"name": name, **wanted}) == 1.0
        )

    def _wanted(self) -> dict[str, str]:
        return {name: self._customer.wishes[name] for name in WISHES if name not in OF_A_RESTAURANT}

    def _met(self, booking: dict[str, str]) -> float:
        """Return the share of wishes that a booking meets. The second choice counts if the first is unavailable."""
        wishes = self._customer.wishes
        if not any(self._fits(place, wishes) for place in self._restaurants.values()):
            wishes = wishes | {self._customer.flexible: self._customer.second}
        got = self._restaurants[booking["name"]] | booking
        return sum(got[name] == wishes[name] for name in WISHES) / len(WISHES)

    def _fits(self, place: dict[str, str], wishes: dict[str, str]) -> bool:
        return all(place[name] == wishes[name] for name in OF_A_RESTAURANT)

    def _answer(self, message: str) -> str:
        """Return the customer's answer: the requested wishes, and the second choice if the first is refused."""
        text, customer, said = message.lower(), self._customer, []
        if REFUSED.search(text) and customer.flexible in self._told and "second" not in self._told:
            self._told.append("second")
            said.append(f"If {customer.wishes[customer.flexible]} cannot be had, then {customer.second} is fine.")
        asked = [name for name, pattern in ASKED.items() if pattern.search(text)][: self._answers]
        self._told += [name for name in asked if name not in self._told]
        said += [SAID[name].format(customer.wishes[name]) for name in asked]
        return " ".join(said) or "I just want to book a table."

    def _after(self, reply: ToolReply, said: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Return the step's tuple for a reply of the tools or the customer."""
        self._messages += bool(said)
        left = self._messages > self._patience and not self._booking
        text = "The customer has lost patience and left." if left else said or reply.text
        met = self._met(self._booking) if self._booking else 0.0
        metrics = {
            "success": float(met == 1.0),
            "booked": float(bool(self._booking)),
            "wishes_met": met,
            "action_is_valid": float(reply.valid),
            "action_is_effective": float(reply.valid and not reply.failures),
            "messages": float(bool(said)),
            "tool_calls": float(reply.calls),
        }
        info = {"metrics": metrics, "metrics_agg_mode": AGGREGATION, "state_key": self._state_key(text)}
        info["role"] = "user" if said or left else "tool"
        return text, met if self._partial else metrics["success"], left or bool(self._booking), False, info

    def _state_key(self, text: str) -> str:
        told = ", ".join(f"{name}={self._customer.wishes.get(name, '')}" for name in sorted(self._told))
        return f"{told}|{self._messages}|{text}"

    def _search(self, cuisine: str = "", area: str = "", price: str = "") -> str:
        """Look for restaurants. What is left out does not matter.

        Args:
            cuisine: Such as Thai.
            area: Such as north.
            price: cheap, moderate or expensive.
        """
        given = zip(OF_A_RESTAURANT, (cuisine, area, price), strict=True)
        asked = {name: value.strip() for name, value in given if value.strip()}
        self._searched.append(asked)
        found = [
            f"{name}: {place['cuisine']}, {place['area']}, {place['price']}"
            for name, place in self._restaurants.items()
            if all(place[key].lower() == value.lower() for key, value in asked.items())
        ]
        return "\n".join(found) or "There is no such restaurant."

    def _book(self, name: str, day: str, time: str, people: int) -> str:
        """Book a table. This ends the conversation.

        Args:
            name: Of the restaurant.
            day: Such as Monday.
            time: Such as 19:30.
            people: How many.
        """
        if self._booking:
            raise ValueError("a table is booked already")
        if name not in self._restaurants:
            raise ValueError(f"there is no restaurant {name:.60}")
        self._booking = {"name": name, "day": day.strip().capitalize(), "time": time.strip(), "people": str(people)}
        return f"A table at {name} is booked."


class LlmDialogueEnv(DialogueEnv):
    """A booking with a customer played by a language model behind a chat completions server."""

    def __init__(
        self,
        http: Http,
        user_url: str,
        user_model: str = "",
        key_env: str | None = None,
        patience: int = 8,
        partial: bool = False,
    ) -> None:
        """Configure the customer's model.

        `user_url`: of the server, up to and including `/v1`. `user_model`: the model's name there. `key_env` names the
        environment variable of a key; settings never hold one.
        """
        super().__init__(patience, partial=partial)
        self._headers = {"Authorization": f"Bearer {os.environ[key_env]}"} if key_env else {}
        self._http, self._url, self._model = http, f"{user_url.rstrip('/')}/chat/completions", user_model
        self._heard: list[dict[str, str]] = []

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        """Draw a customer; the first message is that of the rule-based customer."""
        observation, info = super().reset(seed)
        customer = self._customer
        wishes = ", ".join(f"{name}: {value}" for name, value in customer.wishes.items())
        told = (
            f"You want to book a table in a restaurant. Your wishes: {wishes}. If you are told that the "
            f"{customer.flexible} cannot be had, {customer.second} will do. You talk to an agent. Say only what you "
            "are asked for, in one short sentence, and nothing that you are not asked for. Never change your wishes."
        )
        self._heard = [{"role": "system", "content": told}, {"role": "assistant", "content": observation}]
        return observation, info

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Call a tool, or send a message to the customer and wait for the answer. Raises as `Http.post` does."""
        reply = self._tools.play(action)
        return self._after(reply, await self._ask(reply.said) if reply.said else "")

    async def _ask(self, message: str) -> str:
        self._heard.append({"role": "user", "content": message})
        body = {"model": self._model, "messages": self._heard, "temperature": 0.0, "max_tokens": 100}
        reply = await self._http.post(self._url, body, self._headers)
        said = reply["choices"][0]["message"]["content"].strip() or "..."
        self._heard.append({"role": "assistant", "content": said})
        return said


def _restaurants(rng: random.Random, customer: Customer) -> dict[str, dict[str, str]]:
    """Draw a town's restaurants by name. At least one fits the second choice, and half the time none fits the first."""
    names = rng.sample(NAMES, len(NAMES))
    first = {name: customer.wishes[name] for name in OF_A_RESTAURANT}
    second = first | {customer.flexible: customer.second}
    places = [{name: rng.choice(WISHES[name]) for name in OF_A_RESTAURANT} for _ in names]
    places = [place for place in places if place != first][2:]
    places += [second] + [first] * (rng.random() < 0.5)
    rng.shuffle(places)
    return dict(zip(names, places, strict=False))
