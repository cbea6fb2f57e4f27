"""A reward model against plain transformers, in and out of a worker."""

import asyncio
import json
import math

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rewards.reward_model import ModelReward
from spmd_rl import sidecar
from spmd_rl.base.errors import UserError
from spmd_rl.config.schema import RewardConfig, RewardsConfig
from spmd_rl.types import AnswerInfo, Message, Prompt
from tests.models import tiny
from tests.unit.rewards.helpers import INFO
from tests.unit.rewards.reward_models import random_model
from tests.unit.sidecar_helpers import private_node

MESSAGES = (Message("system", "Be kind."), Message("user", "2 + 2?"))
PROMPT = Prompt("0" * 32, MESSAGES, "toy", "4")
ANSWERS = ["It is 4.", "5", "", "<think>hm</think> four " * 5, "It is 4.", "<|im_end|>"]


@pytest.fixture
def node(monkeypatch):
    yield from private_node(monkeypatch)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return random_model(tmp_path_factory.mktemp("model"))


def reference(path, answers) -> list[float]:
    """One by one, without padding."""
    model, words = AutoModelForSequenceClassification.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    asked = [{"role": message.role, "content": message.content} for message in MESSAGES]
    texts = [
        words.apply_chat_template([*asked, {"role": "assistant", "content": answer}], return_tensors="pt")
        for answer in answers
    ]
    with torch.no_grad():
        return [model(**text).logits.item() for text in texts]


def scores(reward: ModelReward, answers) -> list[float]:
    verdicts = reward.score_batch([PROMPT] * len(answers), answers, [INFO] * len(answers))
    assert all(verdict.status == "ok" for verdict in verdicts)
    return [verdict.score for verdict in verdicts]


@pytest.mark.parametrize("max_batch", [1, 4, 100])
def test_scores_are_those_of_transformers(path, max_batch):
    wanted = reference(path, ANSWERS)
    assert max(wanted) - min(wanted) > 0.1
    assert scores(ModelReward(str(path), max_batch=max_batch), ANSWERS) == pytest.approx(wanted, abs=1e-5)


def test_a_model_without_a_pad_token_reads_one_text_at_a_time(tmp_path):
    path = random_model(tmp_path, pad_token_id=None)
    reward = ModelReward(str(path))
    assert scores(reward, ANSWERS) == pytest.approx(reference(path, ANSWERS), abs=1e-5)
    assert reward.max_batch == 1


def test_a_sigmoid(path):
    plain, squashed = (scores(ModelReward(str(path), transform=name), ANSWERS) for name in ("none", "sigmoid"))
    assert squashed == pytest.approx([1 / (1 + math.exp(-score)) for score in plain])


def test_what_is_too_long_is_rejected_and_the_others_are_not(path):
    reward = ModelReward(str(path), max_tokens=100)
    verdicts = reward.score_batch([PROMPT] * 3, ["a", "a" * 100, "b"], [INFO] * 3)
    assert [verdict.status for verdict in verdicts] == ["ok", "rejected", "ok"]
    assert "the reward model reads 100" in verdicts[1].detail
    assert ModelReward(str(path)).score(PROMPT, "a" * 600, INFO).status == "rejected"  # what its config says


def test_construction_loads_nothing_and_finds_mistakes(path, tmp_path):
    with pytest.raises(ValueError, match="not a sequence classification model but LlamaForCausalLM"):
        ModelReward(str(tiny("llama", tmp_path)))
    with pytest.raises(FileNotFoundError):
        ModelReward("/no/such/model")
    for args in ({"transform": "tanh"}, {"max_batch": 0}):
        with pytest.raises(ValueError, match=next(iter(args))):
            ModelReward(str(path), **args)
    reward = ModelReward(str(path), device="cuda:77")
    with pytest.raises((AssertionError, RuntimeError)):  # there is no such device for what is loaded
        reward.start()


def test_several_outputs_are_no_score(tmp_path):
    with pytest.raises(ValueError, match="3 outputs"):
        ModelReward(str(random_model(tmp_path, num_labels=3))).start()


def test_in_its_own_pool(path, node):
    answers = [f"{number} is it" for number in range(40)]
    wanted = reference(path, answers)
    args = {"model": str(path), "max_batch": 8}
    reward = RewardConfig("rewards.reward_model:ModelReward", args=args, timeout=60.0)
    with sidecar.connect(RewardsConfig(domains={"toy": reward}), node) as scorer:

        async def ask():
            return await asyncio.gather(*(scorer.score(PROMPT, answer, AnswerInfo(1, "stop")) for answer in answers))

        assert [verdict.score for verdict in asyncio.run(ask())] == pytest.approx(wanted, abs=1e-5)


def test_a_model_that_cannot_start_is_one_line(path, node, tmp_path):
    for file in path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    reward = RewardConfig("rewards.reward_model:ModelReward", args={"model": str(tmp_path)})
    line = r"reward\.toy\.target: .* cannot start: .*has no chat template"
    with pytest.raises(UserError, match=line), sidecar.connect(RewardsConfig(domains={"toy": reward}), node):
        pass
