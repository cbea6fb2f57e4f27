"""Pictures on their way: from an environment to the prompt, and from a prompt to the judge, the log and the viewer."""

import random
import sys
import threading
from array import array
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from envs.adapters.gymnasium_id import GymnasiumEnv
from envs.frozen_lake import FrozenLake
from envs.sokoban import Sokoban
from rewards.boxes import BoxReward
from rewards.judge import JudgeReward
from rewards.reward_model import ModelReward
from spmd_rl.base.reward_function import reward_of
from spmd_rl.config.sections.env import EnvConfig
from spmd_rl.learn import sample_log
from spmd_rl.rollout.prompt_text import first_messages, fresh_messages, next_messages
from spmd_rl.sidecar import wire
from spmd_rl.sidecar.env_replies import checked_reset, checked_step, packed
from spmd_rl.tools.view.runs import RunIndex
from spmd_rl.tools.view.server import ViewServer
from spmd_rl.track.page_data import trajectories
from spmd_rl.track.run_reader import read_run
from spmd_rl.track.samples import SampleLog
from spmd_rl.types import EnvReply, Group, ImagePart, Message, Prompt, Sample, TextPart, Turn, Verdict, picture_ids
from tests.browser import CHROMIUM, visit
from tests.unit.rewards.helpers import YES, server, verdict
from tests.unit.test_row_pictures import A, B, bomb, encoded, noise, shown

NUMBERS = {"turn": 1, "max_tokens": 8}
LAKE = EnvConfig(target="envs.frozen_lake:FrozenLake")
SEEN = Prompt("0" * 32, (Message("user", (ImagePart.of(A), TextPart("How many circles?"))),), "math", "3")


@pytest.mark.parametrize("make", [FrozenLake, Sokoban])
def test_a_drawn_board_has_a_cell_of_its_colour_for_each_letter(make: Any) -> None:
    env = make(observation="picture")
    start = checked_reset(env.reset(3))
    replies = [start, checked_step(env.step("nowhere"))]
    while not replies[-1].done and len(replies) < 9:
        replies.append(checked_step(env.step("up")))
    looks: dict[str, set[bytes]] = {}
    for reply in replies:
        rows, (data,) = reply.info["board"].split("\n"), reply.pictures
        picture = Image.open(BytesIO(data))
        assert reply.observation == "" and picture.size == (28 * len(rows[0]), 28 * len(rows))
        for y, row in enumerate(rows):
            for x, letter in enumerate(row):
                box = (28 * x, 28 * y, 28 * x + 28, 28 * y + 28)
                looks.setdefault(letter, set()).add(picture.crop(box).tobytes())
    assert all(len(found) == 1 for found in looks.values()) and len(set.union(*looks.values())) == len(looks)
    assert "orange" in start.info["instruction"] or "blue" in start.info["instruction"]


class Walk:
    """An environment of Gymnasium that draws two pixels, and moves one of them."""

    metadata = {"render_modes": ["ansi", "rgb_array"]}
    spec = None

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode, self.place = render_mode, 0

    action_space = SimpleNamespace(n=2, start=0, contains=lambda value: value in (0, 1))

    def reset(self, seed: int) -> tuple[int, dict]:
        self.place = 0
        return 0, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict]:
        self.place += action
        return 0, 0.0, False, False, {}

    def render(self) -> Any:
        return np.full((4, 6, 3), 10 * self.place, np.uint8) if self.render_mode == "rgb_array" else "drawn"

    def close(self) -> None: ...


def test_gymnasium_renders_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type("Discrete", (), {})
    space = kind()
    vars(space).update(n=2, start=0, contains=lambda value: value in (0, 1))
    monkeypatch.setattr(Walk, "action_space", space)
    spaces = SimpleNamespace(Discrete=kind, Text=type("Text", (), {}))
    package = SimpleNamespace(make=lambda id, **args: Walk(**args), spaces=spaces)
    monkeypatch.setitem(sys.modules, "gymnasium", package)
    env = GymnasiumEnv("Walk-v0", actions=["stay", "go"], picture=True)
    first, still = checked_reset(env.reset(0)), checked_step(env.step("stay"))
    moved = checked_step(env.step("go"))
    assert first.observation == "" and first.pictures == still.pictures != moved.pictures
    assert Image.open(BytesIO(moved.pictures[0])).getpixel((5, 3)) == (10, 10, 10)
    effective = [reply.info["metrics"]["action_is_effective"] for reply in (still, moved)]
    assert effective == [0.0, 1.0] and first.info == {"instruction": "Actions: stay, go."}
    assert checked_reset(GymnasiumEnv("Walk-v0").reset(0)) == EnvReply("drawn", info={"instruction": first_action()})


def first_action() -> str:
    return "An action is a number from 0 to 1."


REFUSED = {
    "a name": ("a.png", "info.pictures must be a list, not str"),
    "half": ([A[:60]], "info.pictures[0] is damaged"),
    "a bomb": ([A, bomb(60_000, 60_000)], "info.pictures[1] has more than 16777216 pixels"),
    "floats": ([np.zeros((4, 4, 3))], "info.pictures[0] must be bytes or uint8 [height, width, 3], not float64"),
    "grey": ([np.zeros((4, 4), np.uint8)], "info.pictures[0] must be bytes or uint8 [height, width, 3], not uint8"),
    "text": (["data:..."], "info.pictures[0] must be bytes or uint8 [height, width, 3], not str []"),
    "a line": ([np.zeros((1, 1000, 3), np.uint8)], "one side is more than 200 times the other"),
}


@pytest.mark.parametrize(("pictures", "line"), REFUSED.values(), ids=REFUSED)
def test_what_an_environment_shows_is_checked(pictures: Any, line: str) -> None:
    with pytest.raises(ValueError) as caught:
        checked_reset(("", {"pictures": pictures}))
    assert line in str(caught.value) and "\n" not in str(caught.value)


def test_pictures_travel_as_bytes_and_are_bounded() -> None:
    reply = checked_step(("see", 1.0, True, False, {"pictures": [B, np.zeros((2, 3, 3), np.uint8)], "board": "b"}))
    assert wire.ENV_REPLY.unpack(packed(reply)) == reply
    assert reply.pictures[0] == B and reply.info == {"board": "b"}
    large = [encoded(noise(700, 700, seed)) for seed in (1, 2)]
    with pytest.raises(ValueError, match=r"pictures and info have \d+ bytes; at most"):
        packed(checked_reset(("", {"pictures": large})))


def test_a_prompt_shows_each_picture_at_its_observation() -> None:
    start = EnvReply("left <image> right <image>", info={"instruction": "Go."}, pictures=(A, B))
    first = first_messages(LAKE, start, NUMBERS)[-1:]
    assert [part for part in shown(tuple(first)) if isinstance(part, bytes)] == [A, B]
    text = first[0].plain_text
    assert "Go." in text and "left <image> right <image>" in text
    plain = EnvReply("here", pictures=(B,))
    assert next_messages(LAKE, start, plain, NUMBERS)[0].plain_text.count("<image>here") == 1
    env = EnvConfig(target="a:B", history=2, template="{observation}\n\n{history}")
    fresh = fresh_messages(env, start, EnvReply("now", pictures=(B, A)), [(start, "x"), (plain, "y")], NUMBERS)
    parts = shown(tuple(fresh))
    assert [part for part in parts if isinstance(part, bytes)] == [B, A, A, B, B]
    assert fresh[-1].plain_text.startswith("<image><image>now\n\nYou saw:\nleft <image> right <image>\nYou answered: x")
    assert first_messages(LAKE, EnvReply("a \0000\0 b"), NUMBERS)[-1].content.count("\0000\0") == 1
    tool = EnvReply("found", info={"role": "tool"}, pictures=(A,))
    assert shown(tuple(next_messages(LAKE, start, tool, NUMBERS))) == (A, "found")


def test_a_judge_gets_the_pictures() -> None:
    from spmd_rl.sidecar.http import HttpService

    other = Prompt("1" * 32, (Message("user", (ImagePart.of(B), TextPart("How many circles?"))),), "math", "3")
    with server(lambda body: YES) as (url, asked):
        judge = JudgeReward(f"{url}/v1", "m", HttpService(attempts=1))
        assert [verdict(judge, one, "3").score for one in (SEEN, other)] == [1.0, 1.0]
        assert verdict(judge, SEEN, "3").score == 1.0
    # A question of another picture is another question; the same one is cached.
    contents = [request["body"]["messages"][0]["content"] for request in asked]
    assert [content[0]["image_url"]["url"] for content in contents] == [ImagePart.of(A).url, ImagePart.of(B).url]
    assert "<image>How many circles?" in contents[0][1]["text"]


def test_other_rewards_take_a_prompt_with_pictures() -> None:
    def score(prompts: list, completions: list) -> list[float]:
        return [float(prompts[0][0]["content"][0]["image_url"]["url"] == ImagePart.of(A).url)]

    assert reward_of(score, {}).score_batch([SEEN], ["3"], []) == [1.0]
    assert "pictures" in ModelReward.unsupported(SimpleNamespace(), SEEN)


def test_boxes_by_thresholds_and_of_strange_answers() -> None:
    prompt = Prompt("0" * 32, (), "boxes", '[{"bbox_2d": [0, 0, 10, 10], "label": "cat"}, {"bbox": [20, 20, 30, 30]}]')
    reward, random_ = BoxReward([0.5, 0.9]), random.Random(0)
    assert reward.score(prompt, '[{"bbox_2d": [0, 0, 10, 8], "label": "Cat"}, [20, 20, 30, 30]]', None).score == 0.75
    assert reward.score(prompt, "the box (0, 0, 10, 10)", None).status == "wrong_format"
    for _ in range(300):
        text = "".join(random_.choice('[]{}",: 01.e-bbox_2d<>`') for _ in range(200))
        assert 0 <= reward.score(prompt, text, None).score <= 1
    with pytest.raises(ValueError, match="thresholds"):
        BoxReward([0.0])


def group(ticket: int, data: bytes, messages: tuple[Message, ...]) -> Group:
    """Two answers to one question about a picture."""
    ids = array("i", [60]) + picture_ids(data, 4) + array("i", [61])
    samples = []
    for answer, text in enumerate("34"):
        turn = Turn(ids, array("i", [ord(text)]), array("f", [-0.5]), array("i", [1]), "stop", text, pictures=(data,))
        samples.append(Sample(ticket, answer, (turn,), Verdict("ok", float(text == "3"))))
    return Group(Prompt(f"{ticket:032x}", messages, "shapes", "3"), ticket, tuple(samples))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with two questions about one picture, and an environment's task about another."""
    (tmp_path / "samples").mkdir()
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"steps": 1, "about": {"pipeline": "rlvr"}}))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "critic/score/mean": 0.5}\n')
    groups = [group(0, A, SEEN.messages), group(1, A, SEEN.messages), group(2, B, ())]
    for rank in (0, 1):
        SampleLog(tmp_path / "samples", rank, 2).write(1, sample_log.held_out(groups[rank::2]))
    SampleLog(tmp_path / "samples", 0, 2).merge(1)
    return tmp_path


def test_the_log_has_each_picture_once_and_the_page_shows_it(run: Path) -> None:
    files = sorted((run / "samples" / "pictures").iterdir())
    assert sorted(file.read_bytes() for file in files) == sorted([A, B])
    assert sorted(file.suffix for file in files) == [".jpg", ".png"]
    lines = (run / "samples" / "step-000001.jsonl").read_text()
    assert "base64" not in lines and len(lines) < 6000
    asked, task = trajectories(read_run(run), "step", 1, [(0, 1), (2, 0)])
    assert asked["messages"][0]["content"][0]["url"] == ImagePart.of(A).url
    assert asked["segments"][0]["turns"][0]["pictures"] == [ImagePart.of(A).url]
    assert task["messages"] == [] and task["segments"][0]["turns"][0]["pictures"] == [ImagePart.of(B).url]


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
@pytest.mark.parametrize(("ticket", "data"), [(0, A), (2, B)])
def test_the_page_draws_pictures(run: Path, tmp_path: Path, ticket: int, data: bytes) -> None:
    with ViewServer(RunIndex(run)) as served:
        threading.Thread(target=served.serve_forever, args=(0.01,), daemon=True).start()
        body = visit(f"{served.url}#tab=samples&step=1&ticket={ticket}&answer=0", tmp_path / "profile")
        served.shutdown()
    assert body.count('class="picture seen"') == 1 and ImagePart.of(data).url in body
