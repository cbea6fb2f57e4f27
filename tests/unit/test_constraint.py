"""Answers that have to parse: which tokens may follow, engines that draw and a trainer that learns among them."""

import json
import re
from dataclasses import replace
from itertools import chain

import pytest
import torch
from transformers import AutoModelForCausalLM

from spmd_rl.base.errors import RunFailed, UserError
from spmd_rl.batch import pack
from spmd_rl.config.checks import check_constraint
from spmd_rl.config.schema import EngineConfig, PolicyConfig, TrainConfig
from spmd_rl.config.sections.constraint import ConstraintConfig
from spmd_rl.config.sections.env import WarmupConfig
from spmd_rl.config.sections.models import RoleConfig
from spmd_rl.config.sections.rollout import SamplingConfig
from spmd_rl.config.sections.teachers import TeachersConfig
from spmd_rl.distributed import Layout
from spmd_rl.engine.native.engine import NativeEngine
from spmd_rl.engine.native.module import empty_module
from spmd_rl.model.build import build_model
from spmd_rl.model.constraint import accept, constraint_of
from spmd_rl.model.tokenizer import load_tokenizer
from spmd_rl.train.base import ForwardArgs
from spmd_rl.train.fsdp2.backend import policy_of
from spmd_rl.types import Request, Sample, Turn, Verdict
from tests.engines import OTHERS, VLLM_SIZES, needs_sglang, one_rank, started_engine
from tests.models import tiny
from tests.training import loss
from tests.unit.test_engine_parity import drain
from tests.unit.test_sharing import exact

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "size", "tags"],
}
REGEX = r"[A-Z][a-z]{1,8}( \d{1,3}){1,4}\."
CHOICES = ["yes", "no", 'maybe "so"\n', "é"]


def whole_json(text: str) -> bool:
    found = json.loads(text)
    return list(found) == ["name", "size", "tags"] and len(found["name"]) <= 40 and 0 <= found["size"] <= 99


CASES = {
    "json": (ConstraintConfig(json_schema=json.dumps(SCHEMA)), whole_json),
    "regex": (ConstraintConfig(regex=REGEX), lambda text: bool(re.fullmatch(REGEX, text))),
    "choice": (ConstraintConfig(choice=CHOICES), CHOICES.__contains__),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny("llama", tmp_path_factory.mktemp("model"), **VLLM_SIZES)


LANGUAGE = [a + b * n for a in ("ab", "a", "") for b in "cd" for n in range(1, 4)]
OF_LANGUAGE = ConstraintConfig(regex="(ab|a)?(c{1,3}|d{1,3})")


def may_follow(begun: str, tokenizer) -> list[int]:
    """By all texts of the language, for a vocabulary of bytes."""
    longer = "".join(text[len(begun) :][:1] for text in LANGUAGE if text.startswith(begun))
    return sorted({*tokenizer.encode(longer), *(tokenizer.stop_ids if begun in LANGUAGE else ())})


def listed(matcher, constraint, size: int) -> list[int]:
    words = constraint.blank(1)
    matcher.fill_next_token_bitmask(words, 0)
    return [id for id in range(size) if words[0, id // 32].item() >> id % 32 & 1]


def test_what_may_follow_is_what_some_text_of_the_language_goes_on_with(path):
    constraint, tokenizer = constraint_of(OF_LANGUAGE, str(path), False), load_tokenizer(path)
    for begun in sorted({text[:end] for text in LANGUAGE for end in range(len(text) + 1)}):
        matcher = constraint.begin(tokenizer.encode(begun))
        assert listed(matcher, constraint, 260) == may_follow(begun, tokenizer), begun
    with pytest.raises(RunFailed, match=f"token {tokenizer.encode('x')[0]} of an answer breaks it"):
        constraint.begin(tokenizer.encode("ax"))
    assert constraint.replay([[]]).index.numel() == 0
    accept(matcher, tokenizer.stop_ids[:1])
    with pytest.raises(RunFailed, match="breaks it"):
        accept(matcher, tokenizer.encode("c"))


def native(path, constraint):
    made = constraint_of(constraint, str(path), False)
    return NativeEngine(empty_module(path, torch.float32), max_running=50, kv_tokens=9000, constraint=made)


def asked(path, engine, count: int, prefix="", **settings) -> list[tuple[Request, object]]:
    tokenizer = load_tokenizer(path)
    prompt = tokenizer.encode("say it")
    settings = {"temperature": 1.0, "max_new_tokens": 120, "stop_ids": tokenizer.stop_ids} | settings
    requests = [Request(f"{prefix}{n}", prompt, seed=n, **settings) for n in range(count)]
    for request in requests:
        engine.add(request)
    done = drain(engine)
    return [(request, done[request.id]) for request in requests]


def check_engine(path, engine, case: str) -> None:
    """100 answers parse, but those that are cut off, and their logprobs are those of what was allowed."""
    settings, parses = CASES[case]
    constraint, tokenizer = constraint_of(settings, str(path), False), load_tokenizer(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    found = (
        asked(path, engine, 100) + asked(path, engine, 10, "k", top_k=5) + asked(path, engine, 2, "g", temperature=0.0)
    )
    whole = [tokenizer.decode(done.token_ids) for _, done in found if done.finish_reason == "stop"]
    assert len(whole) >= 100 and all(map(parses, whole))
    for request, done in found[::9]:
        allowed = constraint.replay([done.token_ids.tolist()])
        ids = torch.tensor([[*request.prompt_ids, *done.token_ids]])
        with torch.no_grad():
            logits = model(ids, use_cache=False).logits[0, len(request.prompt_ids) - 1 : -1].float()
        allowed.cut(logits, 0, -torch.inf)
        if done.candidate_ids is not None:
            kept = torch.full_like(logits, -torch.inf)
            rows = torch.arange(len(kept)).repeat_interleave(torch.tensor(done.candidate_ids.counts))
            kept[rows, torch.tensor(done.candidate_ids.ids, dtype=torch.int64)] = 0
            logits = logits + kept
            assert not logits.isneginf().all(-1).any() and len(done.candidate_ids.ids) > 0
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(done.token_ids, dtype=torch.int64)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(done.logprobs), expected, atol=1e-5, rtol=0)
    check_begun(path, engine, found[0][1], tokenizer, parses)


def check_begun(path, engine, done, tokenizer, parses) -> None:
    """An answer that was cut short goes on where it stood."""
    half = done.token_ids[: len(done.token_ids) // 2]
    request = Request(
        "half", tokenizer.encode("say it") + half, 120, 1.0, 5, stop_ids=tokenizer.stop_ids, num_begun=len(half)
    )
    engine.add(request)
    rest = drain(engine)["half"]
    assert rest.finish_reason == "length" or parses(tokenizer.decode(half + rest.token_ids))


@pytest.mark.parametrize("case", CASES)
def test_the_native_engine(path, case):
    engine = native(path, CASES[case][0])
    engine.load(build_model(path, torch.float32, "cpu").named_parameters(), 0)
    check_engine(path, engine, case)


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("case", ["json", pytest.param("regex", marks=pytest.mark.slow)])
def test_another_engine(path, name, case):
    with started_engine(name, path, max_running=50, kv_tokens=9000, constraint=CASES[case][0]) as engine:
        engine.load(build_model(path, torch.float32, "cpu").named_parameters(), 0)
        check_engine(path, engine, case)


@needs_sglang
@pytest.mark.parametrize(("kv_tokens", "args"), [(9000, {}), (250, {"chunked_prefill_size": 4})])
def test_sglang_draws_the_native_engines_tokens(path, kv_tokens, args):
    """Also where it computes prompts in pieces, after each of which a token is drawn and thrown away, and has answers
    wait for a place in the cache."""
    weights, settings = list(build_model(path, torch.float32, "cpu").named_parameters()), CASES["json"][0]
    reference, sizes = native(path, settings), {"max_running": 20, "kv_tokens": kv_tokens}
    with started_engine("sglang", path, constraint=settings, args=args, **sizes) as engine:
        pairs = []
        for one in (engine, reference):
            one.load(weights, 0)
            pairs.append(asked(path, one, 20) + asked(path, one, 5, "k", top_k=5))
    for (_, mine), (_, theirs) in zip(*pairs, strict=True):
        assert (mine.token_ids, mine.candidate_ids) == (theirs.token_ids, theirs.candidate_ids)


def samples(path) -> list[Sample]:
    """Answers of an engine, the last of two turns, each of which is an answer of its own."""
    engine = native(path, OF_LANGUAGE)
    engine.load(build_model(path, torch.float32, "cpu").named_parameters(), 0)
    turns = [
        Turn(request.prompt_ids, done.token_ids, done.logprobs, done.versions, done.finish_reason)
        for request, done in asked(path, engine, 7)
    ]
    split = [*([turn] for turn in turns[:5]), turns[5:]]
    return [Sample(number // 3, number % 3, tuple(own), Verdict("ok")) for number, own in enumerate(split)]


def policy(path, world, constraint: ConstraintConfig, dtype="float32"):
    own, train = PolicyConfig(lr=1e-2), TrainConfig(tokens_per_microbatch=40)
    role = RoleConfig("policy", own, str(path), dtype, False, train, 5, constraint=constraint)
    model = build_model(path, getattr(torch, dtype), "cpu")
    return policy_of(exact(model) if dtype == "float64" else model, Layout(world), role)


def brute_force(path, batch, temperature: float):
    """Logprob and entropy over what may follow by all texts of the language, from plain transformers, in order."""
    model = exact(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64))
    tokenizer = load_tokenizer(path)
    logprobs, entropies, bounds = [], [], batch.starts.tolist()
    for begin, end in zip(bounds, bounds[1:], strict=False):
        ids, mask = batch.token_ids[begin:end], batch.loss_mask[begin:end]
        logits, begun = model(input_ids=ids[None]).logits[0] / temperature, ""
        for place in mask.nonzero()[:, 0].tolist():
            begun = begun if mask[place - 1] else ""
            kept = torch.tensor(may_follow(begun, tokenizer))
            log_p = logits[place - 1, kept].log_softmax(-1)
            logprobs.append(log_p[(kept == ids[place]).nonzero()[0, 0]])
            entropies.append(-(log_p.exp() * log_p).sum())
            begun += tokenizer.decode([int(ids[place])])
    return model, torch.stack(logprobs), torch.stack(entropies)


def test_the_gradient_is_that_of_the_constrained_distribution(path):
    batch, temperature = pack(samples(path)), 0.8
    noise = torch.randn(2, batch.num_tokens, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    batch.advantages, batch.weights = noise[0] * batch.loss_mask, noise[1].abs() * batch.loss_mask
    model, logprobs, entropy = brute_force(path, batch, temperature)
    batch.old_logprobs = torch.zeros(batch.num_tokens, dtype=torch.float64)
    batch.old_logprobs[batch.loss_mask] = logprobs.detach() + 0.1
    (loss(logprobs, entropy, batch)[0] * batch.weights[batch.loss_mask]).sum().backward()
    with one_rank() as world:
        mine = policy(path, world, OF_LANGUAGE, "float64")
        mine.accumulate(batch, ForwardArgs(temperature, constraint=mine.constraint), loss)
        wanted = {name: p.grad for name, p in model.named_parameters()}
        assert all(grad.abs().max() > 1e-4 for grad in wanted.values())
        for name, p in mine.model.module.named_parameters():
            torch.testing.assert_close(p.grad.full_tensor(), wanted[name], atol=1e-9, rtol=0)


def test_logprobs_and_entropy_are_those_of_the_constrained_distribution(path):
    batch, temperature = pack(samples(path)), 0.8
    _, *wanted = brute_force(path, batch, temperature)
    with one_rank() as world:
        mine, free = (policy(path, world, constraint) for constraint in (OF_LANGUAGE, ConstraintConfig()))
        found = mine.logprobs(batch, temperature)
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours[batch.loss_mask].double(), theirs.detach(), atol=1e-5, rtol=0)
        asked_once = batch.select(range(5))  # the engine was not asked for a second turn
        assert (mine.logprobs(asked_once, 1.0)[0] - asked_once.rollout_logprobs).abs().max() < 1e-5
        assert (free.logprobs(batch, temperature)[0] - found[0])[batch.loss_mask].abs().mean() > 1
        broken = replace(batch, token_ids=torch.where(batch.loss_mask, 120, batch.token_ids))
        with pytest.raises(RunFailed, match="token 120 of an answer breaks it"):
            mine.logprobs(broken, temperature)


def test_special_tokens_and_control_characters_are_in_no_json(path):
    constraint = constraint_of(ConstraintConfig(json_schema='{"type": "string", "maxLength": 9}'), str(path), False)
    tokenizer = load_tokenizer(path)
    matcher = constraint.begin(tokenizer.encode('"'))
    inside = set(map(tokenizer.visible, ([id] for id in listed(matcher, constraint, 260))))
    assert {"a", '"', "<"} < inside and not {"\t", "\x1b", "<|pad|>", "<|im_end|>"} & inside


BAD = {
    "regex": {"(": "missing", "a(?=b)": "Lookahead", r"(a)\1": "Backreference"},
    "json_schema": {
        "/no/where.json": "No such file",
        '{"type": ': "not JSON",
        '{"type": "foo"}': "Unsupported type",
        '{"type": "array", "uniqueItems": true}': "uniqueItems cannot be enforced",
        '{"items": [{"format": "odd"}]}': "format 'odd' cannot be enforced",
        '{"properties": {"not": {"pattern": "a(?!b)"}}}': "pattern 'a.*' cannot be enforced",
        '{"pattern": "a+", "maxLength": 3}': "pattern together with a length cannot be enforced",
    },
}


@pytest.mark.parametrize(("key", "text"), chain.from_iterable([(key, text) for text in BAD[key]] for key in BAD))
def test_a_bad_constraint_is_one_line_that_names_its_key(path, key, text):
    with pytest.raises(UserError, match=rf"{key}: .*{BAD[key][text]}") as caught:
        constraint_of(ConstraintConfig(**{key: text}), str(path), False)
    assert "\n" not in str(caught.value)


def test_a_constraint_is_one_of_three(tmp_path):
    with pytest.raises(UserError, match="json_schema and choice: only one"):
        ConstraintConfig(json_schema="{}", choice=["a"])
    with pytest.raises(UserError, match="an empty text"):
        ConstraintConfig(choice=["a", ""])
    assert ConstraintConfig().given is None
    (tmp_path / "schema.json").write_text('{"const":\n "not"}')
    assert ConstraintConfig(json_schema=str(tmp_path / "schema.json")).given == ("json_schema", '{"const": "not"}')


REFUSED = {
    "engine.drafts": {"engine": EngineConfig(drafts=4)},
    "engine.args.speculative_config": {"engine": EngineConfig(name="vllm", args={"speculative_config": {}})},
    "rollout.stop, which": {"rollout": {"stop": ["x"]}},
    "rollout.thinking_budget": {"rollout": {"thinking_budget": 5}},
    "rollout.target": {"rollout": {"target": "a:b"}},
    "teacher.model": {"teacher": TeachersConfig(model="m")},
    "warmup.steps": {"warmup": WarmupConfig(steps=1)},
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_constraint_cannot_hold_beside_is_refused_by_name(what):
    given = {"engine": EngineConfig()} | REFUSED[what]
    rollout = given.pop("rollout", {})
    check_constraint(SamplingConfig(**rollout), **given)
    with pytest.raises(UserError, match=f"^rollout.constraint.regex: not with {what}"):
        check_constraint(SamplingConfig(**rollout, constraint=ConstraintConfig(regex="a")), **given)


def test_a_missing_or_other_xgrammar_is_named(monkeypatch):
    rollout = SamplingConfig(constraint=ConstraintConfig(regex="a"))
    monkeypatch.setattr("spmd_rl.config.packages.installed", lambda name: "0.9")
    with pytest.raises(UserError, match=r"^rollout.constraint.regex: xgrammar 0.9 is not .*0.3"):
        check_constraint(rollout, EngineConfig())
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"xgrammar is not installed here; pip install 'spmd-rl\[constraint\]'"):
        check_constraint(rollout, EngineConfig())
