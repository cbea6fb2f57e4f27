"""A reward model: a Hugging Face sequence classification model with one output scores the conversation.

Prompt and answer are rendered with the model's own chat template. Its output is the score, unchanged or through a
sigmoid. Texts beyond the model's limit are `rejected`, never cut. Waiting answers are scored together; since a batch
changes the last digits of a score, set `max_batch: 1` if runs must repeat exactly. A model of steps, whose
`config.json` has a `step_separator`, scores each step of an answer; `of_steps` combines these scores.

Each worker holds the model: `reward.<domain>.workers` copies. Models with remote code are not supported; models that
generate their verdict are judges (`judge.py`).

    reward.general.target=rewards.reward_model:ModelReward reward.general.timeout=120
    reward.general.args={model: /models/Skywork-Reward-V2-Qwen3-0.6B, device: "cuda:3"}
"""

import json
import math
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from spmd_rl.types import AnswerInfo, Conversation, Message, Prompt, Verdict

# Two forms of the sigmoid, since `exp` overflows for large arguments.
TRANSFORMS = {"none": lambda x: x, "sigmoid": lambda x: 1 / (1 + math.exp(-x)) if x >= 0 else 1 - 1 / (1 + math.exp(x))}

OF_STEPS: dict[str, Callable[[Sequence[float]], float]] = {
    "min": min,
    "mean": statistics.fmean,
    "last": lambda scores: scores[-1],
    "product": math.prod,
}


def model_folder(model: str) -> Path:
    """Return the directory of a model; one of the Hugging Face hub is downloaded unless the cache has it."""
    if Path(model).is_dir():
        return Path(model)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        raise FileNotFoundError(f"no directory {model}")
    from huggingface_hub import snapshot_download

    wanted = ["*.json", "*.jinja", "*.model", "*.txt", "*.safetensors"]
    try:
        return Path(snapshot_download(model, allow_patterns=wanted, ignore_patterns=["*/*"]))
    except FileNotFoundError:
        raise FileNotFoundError(
            f"no directory {model}, and the hub cannot give it: run `hf download {model}`"
        ) from None


class ModelReward:
    """A rewarder with the model's output, unchanged or through a sigmoid."""

    def __init__(
        self,
        model: str,
        device: str = "cpu",
        dtype: str = "auto",
        transform: str = "none",
        max_tokens: int | None = None,
        max_batch: int = 16,
        of_steps: str = "min",
    ) -> None:
        """Configure the model.

        `model`: a directory, or a model of the hub (ORG/NAME). `device` and `dtype`: torch's names (`auto`: as stored).
        `max_tokens` limits prompt and answer (default: the model's limit), `max_batch` the answers scored at once.
        `of_steps` (`min`, `mean`, `last`, `product`) combines the scores of an answer's steps.
        """
        if transform not in TRANSFORMS:
            raise ValueError(f"transform={transform}: known are {', '.join(TRANSFORMS)}")
        if of_steps not in OF_STEPS:
            raise ValueError(f"of_steps={of_steps}: known are {', '.join(OF_STEPS)}")
        if max_batch < 1:
            raise ValueError(f"max_batch={max_batch}: must be at least 1")
        folder = model_folder(model)
        config = json.loads((folder / "config.json").read_text())
        architecture = (config.get("architectures") or ["none"])[0]
        if not architecture.endswith("ForSequenceClassification"):
            raise ValueError(f"{model} is not a sequence classification model but {architecture}")
        self.max_batch = max_batch
        self._path, self._device, self._dtype = str(folder), device, dtype
        self._transform, self._of_steps = TRANSFORMS[transform], OF_STEPS[of_steps]
        self._separator = config.get("step_separator")
        self._max_tokens = max_tokens or config.get("max_position_embeddings") or 1 << 20
        self._model: Any = None

    def start(self) -> None:
        """Load the model, in the process that uses it."""
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(self._path)
        if not self._tokenizer.chat_template:
            raise ValueError(f"{self._path} has no chat template")
        load = AutoModelForSequenceClassification.from_pretrained
        model = load(self._path, dtype=self._dtype, use_safetensors=True)
        if model.config.num_labels != 1:
            raise ValueError(f"{self._path} has {model.config.num_labels} outputs; a reward model has one")
        if model.config.pad_token_id is None:
            # Without a padding token the model cannot find the end of a padded text.
            self.max_batch = 1
        self._model = model.to(self._device).eval()

    def score(self, prompt: Prompt, answer: str, info: AnswerInfo) -> Verdict:
        """Score one answer, as a batch of one."""
        return self.score_batch([prompt], [answer], [info])[0]

    def score_batch(
        self, prompts: Sequence[Prompt], answers: Sequence[str], infos: Sequence[AnswerInfo]
    ) -> list[Verdict]:
        """Score all answers, those of similar length together."""
        if self._model is None:
            self.start()
        texts = [self._render(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
        verdicts = {
            place: Verdict("rejected", detail=f"{len(ids)} tokens; the reward model reads {self._max_tokens}")
            for place, (ids, _) in enumerate(texts)
            if len(ids) > self._max_tokens
        }
        # Sorted by length: a batch of similar lengths has little padding.
        places = sorted(set(range(len(texts))) - set(verdicts), key=lambda place: len(texts[place][0]))
        for begin in range(0, len(places), self.max_batch):
            batch = places[begin : begin + self.max_batch]
            for place, steps in zip(batch, self._outputs([texts[place] for place in batch]), strict=True):
                score = self._of_steps(list(map(self._transform, steps)))
                verdicts[place] = Verdict("ok", score, {"output": self._of_steps(steps)})
        return [verdicts[place] for place in range(len(texts))]

    def unsupported(self, prompt: Prompt) -> str:
        """Return why a row cannot be judged: it has pictures."""
        return "it has pictures, and the reward model reads text alone" if prompt.pictures else ""

    def _render(self, prompt: Prompt, answer: str) -> tuple[list[int], list[int]]:
        """Return the token ids of the conversation that ends with the answer, and the positions of the scores."""
        borders: Sequence[int] = ()
        if self._separator:
            answer = answer.strip()
            borders = Conversation((Message("assistant", answer),)).in_steps(self._separator).borders
        messages = [{"role": one.role, "content": one.text, **one.others} for one in prompt.messages]
        tools = messages[0].pop("tools", None) if messages else None
        messages.append({"role": "assistant", "content": answer})
        text = self._tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
        # From the right: the prompt may contain the same text.
        begin = text.rindex(answer) if borders else 0
        cuts = pairwise([0, *(begin + border for border in borders), len(text)])
        pieces = [self._tokenizer(text[a:b], add_special_tokens=False)["input_ids"] for a, b in cuts]
        return [token for piece in pieces for token in piece], [end - 1 for end in accumulate(map(len, pieces))]

    def _outputs(self, texts: Sequence[tuple[list[int], list[int]]]) -> list[list[float]]:
        """Return the scores of each text, one for each step."""
        import torch

        pad, longest = self._model.config.pad_token_id or 0, max(len(ids) for ids, _ in texts)
        ids = torch.tensor([[*text, *[pad] * (longest - len(text))] for text, _ in texts], device=self._device)
        mask = torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text, _ in texts], device=self._device)
        with torch.inference_mode():
            if not self._separator:
                return self._model(input_ids=ids, attention_mask=mask).logits.float().tolist()
            hidden = self._model.base_model(input_ids=ids, attention_mask=mask).last_hidden_state
            scores = self._model.score(hidden)[..., 0].float()
        return [scores[number, places].tolist() for number, (_, places) in enumerate(texts)]

    @classmethod
    def examples(cls) -> Iterator[tuple[Prompt, str, float]]:
        """Yield answers for a model that looks for a 4 at the end, with their scores."""
        for answer, score in (("It is 4", 1.0), ("It is 5", 0.0)):
            yield Prompt("0" * 32, (Message("user", "2 + 2?"),), "general", "4"), answer, score
