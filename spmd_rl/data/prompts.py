"""The dataset of a run: training prompts, held-out prompts, and the rule by which tickets name prompts.

    prompts = Prompts.load(cfg.data)
    epoch, prompt = prompts.ticket(17, seed=cfg.seed)

Rules (docs/DATA.md): which problems are the same and which are held out are functions of their content alone, never of
a seed, a size or the format they are put into. Left out: tokens (the rollout renders), and any state: which tickets are
done is the rollout's cursor.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from unicodedata import normalize

from spmd_rl.config.schema import DataConfig
from spmd_rl.data import reasoning_gym
from spmd_rl.data.mix import Mix
from spmd_rl.data.rows import Row, read_rows
from spmd_rl.data.seeds import counter_seed
from spmd_rl.errors import UserError
from spmd_rl.types import Message, Prompt


class Prompts:
    """`train` and `eval` never share a content. `eval` may be empty; whether that matters is the caller's to say."""

    def __init__(
        self,
        train: Sequence[Prompt],
        eval: Sequence[Prompt] = (),
        num_dropped: int = 0,
        mix: Mapping[str, float] | None = None,
    ) -> None:
        """`mix`: relative shares of the domains of `train`. UserError if it does not fit them."""
        assert train, "no training prompt"
        self._mix = _fitting(mix, train) if mix else None
        self.train = tuple(prompt for prompt in train if not mix or mix[prompt.domain] > 0)
        self.eval = tuple(eval)
        self.num_dropped = num_dropped
        """Rows left out: copies of a problem already there, and training rows that also stand in `data.eval`."""
        self._decks = {domain: _Deck([p for p in self.train if p.domain == domain]) for domain in mix or ()}
        self._deck = _Deck(self.train)

    @classmethod
    def load(cls, cfg: DataConfig) -> "Prompts":
        """Read, drop copies, split. UserError: unreadable or broken source, one id twice, nothing left to train on."""
        rows = list(_read(cfg.train, "data.train", cfg))
        train = _distinct(rows)
        if cfg.eval:
            eval_rows = list(_read(cfg.eval, "data.eval", cfg))
            held_out = _distinct(eval_rows)
            num_rows = len(rows) + len(eval_rows)
        else:
            held_out = {content: row for content, row in train.items() if is_held_out(content, cfg.holdout)}
            num_rows = len(rows)
        train = {content: row for content, row in train.items() if content not in held_out}
        if not train:
            reason = "all rows also stand in data.eval" if cfg.eval else f"data.holdout={cfg.holdout} takes all rows"
            raise UserError(f"data.train: no training prompt is left in {cfg.train}: {reason}")
        # By hash: the first n of `eval` are then a fair sample, and stay the same ones when the source grows.
        eval = [_dress(held_out[content], content, cfg) for content in sorted(held_out)]
        dressed = [_dress(row, content, cfg) for content, row in train.items()]
        if unknown := sorted(set(cfg.domains) - {row.domain for row in (*train.values(), *held_out.values())}):
            raise UserError(f"data.domains: no row has the domain or tag {unknown[0]!r}")
        return cls(dressed, eval, num_rows - len(train) - len(held_out), cfg.mix)

    def ticket(self, ticket: int, seed: int) -> tuple[int, Prompt]:
        """(epoch, prompt) of a ticket: all prompts once an epoch, in an order of the epoch's own, without end.

        With a mix, each domain has epochs of its own.
        """
        if self._mix is None:
            return self._deck.deal(ticket, seed)
        domain, place = self._mix.ticket(ticket)
        return self._decks[domain].deal(place, seed)

    def fingerprint(self) -> str:
        """32 hex digits over every prompt in order: what ranks compare, since each has loaded for itself."""
        digest = blake2b(digest_size=16)
        for prompt in (*self.train, *self.eval):
            messages = [[m.role, m.content] for m in prompt.messages]
            digest.update(json.dumps([prompt.id, messages, prompt.domain, prompt.ground_truth]).encode())
        digest.update(b"%d" % len(self.eval))
        return digest.hexdigest()


class _Deck:
    """Prompts, dealt without end: all of them once an epoch."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self._prompts = prompts
        self._orders: dict[tuple[int, int], list[int]] = {}

    def deal(self, number: int, seed: int) -> tuple[int, Prompt]:
        """(epoch, prompt)"""
        epoch, place = divmod(number, len(self._prompts))
        return epoch, self._prompts[self._order(seed, epoch)[place]]

    def _order(self, seed: int, epoch: int) -> list[int]:
        """Indices of the prompts, by the hash of (seed, epoch, id)."""
        if (seed, epoch) not in self._orders:
            keys = [(counter_seed(seed, epoch, prompt.id), prompt.id) for prompt in self._prompts]
            kept = list(self._orders.items())[-1:]  # the epoch before: replicas straddle the border
            self._orders = dict([*kept, ((seed, epoch), sorted(range(len(keys)), key=keys.__getitem__))])
        return self._orders[seed, epoch]


def _fitting(mix: Mapping[str, float], train: Sequence[Prompt]) -> Mix:
    """The mix, if it has a share for each domain and prompts for each share."""
    domains = {prompt.domain for prompt in train}
    if strange := sorted(domains - set(mix)):
        raise UserError(f"data.mix: prompts have domain {strange[0]!r}, which has no share; 0 leaves them out")
    if empty := sorted(domain for domain, share in mix.items() if share > 0 and domain not in domains):
        known = ", ".join(sorted(domains))
        raise UserError(f"data.mix.{empty[0]}: no training prompt has this domain (there are: {known})")
    return Mix(mix)


def content_id(messages: Iterable[Message]) -> str:
    """32 hex digits of what is asked: blake2b-128 over roles and contents, in NFC with runs of white space as one.

    The truth is no part of it: one question with two answers is one question, and must not be asked in training and
    again, as unseen, in evaluation.
    """
    content = [[m.role, normalize("NFC", " ".join(m.content.split()))] for m in messages]
    return blake2b(json.dumps(content, separators=(",", ":")).encode(), digest_size=16).hexdigest()


def is_held_out(content: str, holdout: float) -> bool:
    """Whether a content id falls into the held-out share, for now and for good."""
    return int(content[:16], 16) < holdout * 2**64


def _read(source: str, key: str, cfg: DataConfig) -> Iterator[Row]:
    """The rows of all parts of a source. An id used twice is an error naming both places."""
    seen: dict[str, str] = {}
    for part in source.split(","):
        name = part.strip()
        if name.startswith(reasoning_gym.PREFIX):
            task = name.removeprefix(reasoning_gym.PREFIX)
            rows = reasoning_gym.generate(task, cfg.size, cfg.seed, cfg.args, key)
        elif name:
            rows = read_rows(Path(name).expanduser(), key)
        else:
            raise UserError(f"{key}: an empty name in {source!r}")
        for row in rows:
            if row.id is not None and seen.setdefault(row.id, row.where) != row.where:
                raise UserError(f"{key}: {row.where}: id {row.id!r} was used before, at {seen[row.id]}")
            yield row


def _distinct(rows: Iterable[Row]) -> dict[str, Row]:
    """Rows by content id, in their order; of copies the first."""
    out: dict[str, Row] = {}
    for row in rows:
        problem = row.problem
        out.setdefault(content_id((Message("user", problem),) if isinstance(problem, str) else problem), row)
    return out


def _dress(row: Row, content: str, cfg: DataConfig) -> Prompt:
    """The prompt as the model will see it: `data.format` around a text, `data.system` where there is none."""
    if isinstance(row.problem, str):
        # Not str.format: problems and formats are full of braces.
        messages = (Message("user", cfg.format.replace("{question}", row.problem)),)
    else:
        messages = row.problem
    if cfg.system is not None and all(m.role != "system" for m in messages):
        messages = (Message("system", cfg.system), *messages)
    domain = cfg.domains.get(row.domain, row.domain)
    return Prompt(row.id or content, messages, domain, row.ground_truth, row.extra)
