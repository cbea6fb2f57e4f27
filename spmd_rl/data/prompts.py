"""The dataset of a run: training prompts, held-out prompts, and the prompt of each ticket.

Duplicates and held-out prompts are determined by content alone (see docs/DATA.md). The dataset has no state: the
rollout knows which tickets are done.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from operator import itemgetter
from unicodedata import normalize

from spmd_rl.base.errors import UserError, tell
from spmd_rl.config.ranks import rank
from spmd_rl.config.schema import DataConfig
from spmd_rl.config.sections.data import GENERATORS, SHAPES, sources
from spmd_rl.data import reasoning_gym, shapes
from spmd_rl.data.fields import BrokenRow, with_tools
from spmd_rl.data.mix import Mix
from spmd_rl.data.pictures import with_pictures
from spmd_rl.data.rows import Record, read_rows
from spmd_rl.data.seeds import counter_seed
from spmd_rl.types import ImagePart, Message, Prompt, TextPart

LATEX = "abla atural e earrow eg eq ewline exists geq i leq mid onumber ot otin parallel prec subseteq succ u warrow"
LINE_BREAK = re.compile(rf"(?<!\\)\\n(?!({'|'.join(LATEX.split())})(?![a-zA-Z]))")
"""A backslash and an n that begin no LaTeX command"""


class Prompts:
    """The training and held-out prompts of a run, which share no content. One of both may be empty."""

    def __init__(
        self,
        train: Sequence[Prompt],
        eval: Sequence[Prompt] = (),
        num_dropped: int = 0,
        mix: Mapping[str, float] | None = None,
    ) -> None:
        """mix: relative shares of the domains of `train`. UserError if they do not match."""
        assert train or eval, "there is no prompt"
        self._shares, self._mix = mix, _checked_mix(mix, train) if mix else None
        self.train = tuple(prompt for prompt in train if not mix or mix[prompt.domain] > 0)
        self.eval = tuple(eval)
        self.num_dropped = num_dropped
        """Dropped rows: duplicates, training rows also in `data.eval`, prompts that are too long"""
        self.num_unused = len(train) - len(self.train)
        """Training rows whose domain has a share of 0"""
        self._by_domain = {domain: _EpochOrder([p for p in self.train if p.domain == domain]) for domain in mix or ()}
        self._all = _EpochOrder(self.train)

    @classmethod
    def load(cls, cfg: DataConfig, trains: bool = True) -> "Prompts":
        """Read the prompts; deduplicate and split those for training.

        trains: False keeps only the held-out prompts, which are the same. UserError for an unreadable or broken source,
        an id used twice, a column of `data.keys` that no row has, and if no training prompt, or none to evaluate, is
        left.
        """
        for key in ("format", "system"):
            if LINE_BREAK.search(getattr(cfg, key) or "") and rank() == 0:
                tell(f"data.{key}: \\n is read as a line break")
        rows = list(_read(cfg.train, "data.train", cfg)) if cfg.train and (trains or not cfg.eval) else []
        eval_rows = list(_read(cfg.eval, "data.eval", cfg)) if cfg.eval else []
        # Otherwise settings may refer to rows that are not read.
        if trains or not (cfg.train and cfg.eval):
            _check_names([*rows, *eval_rows], cfg)
        train = _distinct(rows)
        held_out = [(row_content(row), row) for row in eval_rows]
        if not cfg.eval:
            held_out = [(content, row) for content, row in train.items() if is_held_out(content, cfg.holdout)]
        taken = {content for content, _ in held_out}
        train = {content: row for content, row in train.items() if content not in taken}
        if trains and not train:
            taken_by = "all rows are also in data.eval" if cfg.eval else f"data.holdout={cfg.holdout} takes all rows"
            raise UserError(
                f"data.train: no training prompt is left in {cfg.train}: {taken_by}; "
                "to evaluate them: python -m spmd_rl.evaluate"
            )
        if not (trains or held_out):
            raise UserError(
                f"data.holdout: {cfg.holdout:g} holds out none of the rows of {cfg.train}; 1 evaluates all of them"
            )
        # Sorted by hash, the first n of `eval` are a fair sample, and stay the same when the source grows.
        eval = [_to_prompt(row, id, cfg) for id, row in _numbered(sorted(held_out, key=itemgetter(0)))]
        prompts = [_to_prompt(row, content, cfg) for content, row in train.items()]
        num_dropped = len(rows) + len(eval_rows) - len(train) - len(held_out)
        return cls(prompts, eval, num_dropped, cfg.mix) if trains else cls((), eval, num_dropped)

    def ticket(self, ticket: int, seed: int) -> tuple[int, Prompt]:
        """Return a ticket's epoch and prompt. An epoch has all prompts once, in a new order; with a mix, each domain
        has its epochs.
        """
        if self._mix is None:
            return self._all.prompt(ticket, seed)
        domain, index = self._mix.ticket(ticket)
        return self._by_domain[domain].prompt(index, seed)

    def without(self, indices: Collection[int]) -> "Prompts":
        """Return the prompts without some of `(*train, *eval)`. One of `train` must be left."""
        train = [prompt for i, prompt in enumerate(self.train) if i not in indices]
        eval = [prompt for i, prompt in enumerate(self.eval, len(self.train)) if i not in indices]
        return Prompts(train, eval, self.num_dropped + len(indices), self._shares)

    def fingerprint(self) -> str:
        """Return 32 hexadecimal digits over all prompts in order, by which ranks compare their data."""
        digest = blake2b(digest_size=16)
        for prompt in (*self.train, *self.eval):
            messages = [[m.role, _plain(m.content), *filter(None, [m.fields])] for m in prompt.messages]
            ranked = [prompt.priority] if prompt.priority else []
            digest.update(json.dumps([prompt.id, messages, prompt.domain, prompt.ground_truth, *ranked]).encode())
        digest.update(b"%d" % len(self.eval))
        return digest.hexdigest()


class _EpochOrder:
    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self._prompts = prompts
        # Two epochs: tickets of the previous one may still be open.
        self._order = lru_cache(2)(self._sorted)

    def prompt(self, number: int, seed: int) -> tuple[int, Prompt]:
        epoch, index = divmod(number, len(self._prompts))
        return epoch, self._prompts[self._order(seed, epoch)[index]]

    def _sorted(self, seed: int, epoch: int) -> list[int]:
        # Sorting by hash instead of shuffling: a prompt that is added or removed leaves the others in their order.
        keys = [(counter_seed(seed, epoch, prompt.id), prompt.id) for prompt in self._prompts]
        return sorted(range(len(keys)), key=keys.__getitem__)


def _checked_mix(mix: Mapping[str, float], train: Sequence[Prompt]) -> Mix:
    domains = {prompt.domain for prompt in train}
    if unknown := sorted(domains - set(mix)):
        raise UserError(f"data.mix: prompts have domain {unknown[0]!r}, which has no share; 0 leaves them out")
    if empty := sorted(domain for domain, share in mix.items() if share > 0 and domain not in domains):
        known = ", ".join(sorted(domains))
        raise UserError(f"data.mix.{empty[0]}: no training prompt has this domain (there are: {known})")
    return Mix(mix)


def content_id(messages: Iterable[Message]) -> str:
    """Return a problem's identity, 32 hexadecimal digits: blake2b-128 over its messages, tools included, in Unicode NFC
    with each run of white space as one space.
    """
    # The ground truth is not included: one question with two answers is one question, and must not be both trained on
    # and held out.
    content = [[m.role, _plain(m.content, _normal), *filter(None, [m.fields])] for m in messages]
    return blake2b(json.dumps(content, separators=(",", ":")).encode(), digest_size=16).hexdigest()


def _plain(content: str | Iterable[TextPart | ImagePart], spelled: Callable[[str], str] = str) -> str | list[str]:
    if isinstance(content, str):
        return spelled(content)
    return [
        spelled(part.text) if isinstance(part, TextPart) else blake2b(part.data, digest_size=16).hexdigest()
        for part in content
    ]


def _normal(text: str) -> str:
    return normalize("NFC", " ".join(text.split()))


def with_line_breaks(text: str) -> str:
    """Return a template with `\\n` as a line break, as command lines write it; LaTeX commands (`\\neq`) stay."""
    return LINE_BREAK.sub("\n", text)


def is_held_out(content: str, holdout: float) -> bool:
    """Return True if a content id is in the held-out share."""
    # By content: a row stays on its side if the dataset grows or is reordered.
    return int(content[:16], 16) < holdout * 2**64


def _read(source: str, key: str, cfg: DataConfig) -> Iterator[Record]:
    seen: dict[str, str] = {}
    for name in sources(source):
        if name.startswith(GENERATORS):
            task = name.removeprefix(GENERATORS)
            rows = reasoning_gym.generate(task, cfg.size, cfg.seed, cfg.args, key)
        elif name.startswith(SHAPES):
            rows = shapes.generate(name.removeprefix(SHAPES), key)
        elif name:
            rows = read_rows(name, key, cfg.keys, cfg.pictures)
        else:
            raise UserError(f"{key}: an empty name in {source!r}")
        for row in rows:
            if row.id is not None and seen.setdefault(row.id, row.where) != row.where:
                before = f"was used before, at {seen[row.id]}; data.keys.id=null ignores ids"
                raise UserError(f"{key}: {row.where}: id {row.id!r} {before}")
            yield row


def _distinct(rows: Iterable[Record]) -> dict[str, Record]:
    out: dict[str, Record] = {}
    for row in rows:
        out.setdefault(row_content(row), row)
    return out


def row_content(row: Record) -> str:
    """Return the `content_id` of a row's problem, without `data.format`."""
    return content_id(with_tools(_messages(row, "{question}"), row.extra.get("tools")))


def _messages(row: Record, template: str) -> tuple[Message, ...]:
    """Return the messages of a row with its pictures. UserError: `data.format` has places for other pictures."""
    if not isinstance(row.problem, str):
        return row.problem
    # Not str.format: problems and formats are full of braces.
    asked = (Message("user", template.replace("{question}", row.problem)),)
    try:
        return with_pictures(asked, row.pictures) if row.pictures else asked
    except BrokenRow as error:
        raise UserError(f"data.format: {row.where}: {error}") from None


def _numbered(rows: Iterable[tuple[str, Record]]) -> Iterator[tuple[str, Record]]:
    counts = Counter[str]()
    for content, row in rows:
        counts[content] += 1
        yield content if counts[content] == 1 else f"{content}-{counts[content]}", row


def _check_names(rows: Sequence[Record], cfg: DataConfig) -> None:
    if unknown := sorted(set(cfg.domains) - {row.domain for row in rows}):
        raise UserError(f"data.domains: no row has the domain or tag {' or '.join(map(repr, unknown))}")
    read = [row for row in rows if row.lacks is not None]
    lacking = [name for name in cfg.keys if read and all(name in row.lacks for row in read)]
    if lacking:
        said = " or ".join(f"`{cfg.keys[name]}`" for name in lacking)
        keys, has = " and ".join(f"data.keys.{name}" for name in lacking), read[0].lacks[lacking[0]]
        raise UserError(f"{keys}: no row has a column {said}; {read[0].where} has {has}")


def _to_prompt(row: Record, id: str, cfg: DataConfig) -> Prompt:
    """Return a row's prompt in `data.format`, with `data.system` unless there is a system message. id: for a row
    without.
    """
    messages = _messages(row, with_line_breaks(cfg.format))
    if cfg.system is not None and all(m.role != "system" for m in messages):
        messages = (Message("system", with_line_breaks(cfg.system)), *messages)
    messages = with_tools(messages, row.extra.get("tools"))
    domain = cfg.domains.get(row.domain, row.domain)
    return Prompt(row.id or id, messages, domain, row.ground_truth, row.extra, row.priority, row.where)
