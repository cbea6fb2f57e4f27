"""The adapters against small stand-ins with the interface of the packages, none of which need be installed."""

import json
import random
import sys
import threading
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import ModuleType, SimpleNamespace
from urllib.parse import parse_qs, urlparse

import pytest

from envs.adapters.gem_id import GemEnv
from envs.adapters.global_random import OwnRandom
from envs.adapters.gymnasium_id import GymnasiumEnv
from envs.adapters.openenv_server import OpenEnvServer
from envs.adapters.reasoning_gym_task import ReasoningGymEnv
from envs.adapters.skyrl_gym import SkyRlGymEnv
from envs.adapters.textarena_id import TextArenaEnv
from envs.adapters.webshop_server import WebShopServer
from envs.webshop import WebShopEnv


def module(monkeypatch, name: str, **content) -> None:
    found = ModuleType(name)
    found.__dict__.update(content)
    monkeypatch.setitem(sys.modules, name, found)


class Discrete(SimpleNamespace):
    """A space of n numbers from start on."""

    def contains(self, value) -> bool:
        return self.start <= value < self.start + self.n


class Walk:
    """Three cells; the right one is the goal. It draws itself as Gymnasium's FrozenLake does."""

    metadata = {"render_modes": ["human", "ansi"]}
    spec = SimpleNamespace(reward_threshold=1.0)
    action_space = Discrete(n=2, start=1)

    def __init__(self, render_mode=None, slow=False) -> None:
        self.render_mode, self.at, self.steps, self.closed = render_mode, 0, 0, False

    def reset(self, seed: int):
        assert 0 <= seed < 2**31
        self.at, self.steps = seed % 2, 0
        return self.at, {}

    def step(self, action: int):
        self.at, self.steps = max(0, self.at + (1 if action == 2 else -1)), self.steps + 1
        return self.at, float(self.at == 2), self.at == 2, self.steps == 3, {}

    def render(self) -> str:
        return "".join(f"\x1b[41m{c}\x1b[0m" if i == self.at else c for i, c in enumerate("SFG")) + "\n"

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def gymnasium(monkeypatch) -> None:
    spaces = SimpleNamespace(Discrete=Discrete, Text=type("Text", (), {}))
    module(monkeypatch, "gymnasium", make=lambda id, **args: {"Walk-v0": Walk}[id](**args), spaces=spaces)


def test_gymnasium_by_name(gymnasium) -> None:
    env = GymnasiumEnv("Walk-v0", {"slow": True}, actions=["left", "Right"])
    assert env.reset(2**40) == ("[S]FG", {"instruction": "Actions: left, right."})
    text, reward, terminated, truncated, info = env.step(" RIGHT ")
    assert (text, reward, terminated, truncated) == ("S[F]G", 0.0, False, False)
    assert info["metrics"] == {"action_is_valid": 1.0, "action_is_effective": 1.0, "success": 0.0}
    for action in ("", "up", "7", "1.0", "true", "[1]"):
        text, reward, terminated, _, info = env.step(action)
        assert (text, reward, terminated, info["metrics"]["action_is_valid"]) == ("S[F]G", 0.0, False, 0.0), action
    assert env.step("2")[1:4] == (1.0, True, False)
    env.close()


def test_gymnasium_by_number_and_without_a_drawing(gymnasium, monkeypatch) -> None:
    monkeypatch.setattr(Walk, "metadata", {"render_modes": []})
    env = GymnasiumEnv("Walk-v0", success=5.0)
    assert env.reset(1) == ("1", {"instruction": "An action is a number from 1 to 2."})
    assert [env.step("1")[4]["metrics"]["action_is_effective"] for _ in range(2)] == [1.0, 0.0]
    text, _, terminated, truncated, info = env.step("2")
    assert (text, terminated, truncated, info["metrics"]["success"]) == ("1", False, True, 0.0)
    with pytest.raises(ValueError, match="actions: 3 names"):
        GymnasiumEnv("Walk-v0", actions=["a", "b", "c"])


class GemGuess:
    """Draws from the global generator, in its constructor too, as GEM's games do."""

    def __init__(self, largest: int = 1000) -> None:
        self.largest = largest
        self.secret = random.randint(1, largest)

    def reset(self, seed=None):
        random.seed(seed)
        self.secret = random.randint(1, self.largest)
        return "Guess.", {"suffix": "Now.", "prefix": "> "}

    def step(self, action: str):
        if not action.startswith("\\boxed{"):
            return "no guess", -0.1, True, False, {}
        right = int(action[7:-1]) == self.secret
        return f"luck {random.randint(1, 10**9)}", float(right), right, False, {"suffix": "Next."}


def test_gem_and_environments_that_share_a_generator(monkeypatch) -> None:
    module(monkeypatch, "gem", make=lambda id, **args: GemGuess(**args))
    random.seed(5)
    outer = random.getstate()
    one, two = GemEnv("game:Guess", {"largest": 3}), GemEnv("game:Guess", {"largest": 3})
    assert one.reset(2**33 + 1) == ("> Guess.", {"suffix": "Now."})
    alone = [one.step("9")[0] for _ in range(3)]
    one.reset(2**33 + 1)
    two.reset(7)
    mixed = []
    for _ in range(3):
        mixed.append(one.step("9")[0])
        two.step("9")
    assert mixed == alone and random.getstate() == outer
    rewards = [two.step(str(n)) for n in (1, 2, 3)]
    assert sum(step[1] for step in rewards) == 1.0 and {step[4]["metrics"]["success"] for step in rewards} == {0.0, 1.0}
    text, reward, terminated, _, info = one.step("")
    assert (text, reward, terminated, info["metrics"]["action_is_valid"]) == ("no guess", -0.1, True, 0.0)


class GemSums:
    """Takes its rows in turn, as GEM's environments over a dataset do."""

    def __init__(self, dataset) -> None:
        self.dataset, self.idx = dataset, 0

    def reset(self, seed=None):
        self.row = self.dataset[self.idx]
        self.idx += 1
        return self.row["problem"], {}

    def step(self, action: str):
        return "over", float(f"boxed{{{self.row['answer']}}}" in action), True, True, {}


def test_gem_over_rows_takes_the_row_of_the_seed(monkeypatch, tmp_path) -> None:
    module(monkeypatch, "gem", make=lambda id, **args: GemSums(**args))
    module(monkeypatch, "datasets", Dataset=SimpleNamespace(from_list=list))
    rows = [{"problem": f"{n} + 1?", "answer": str(n + 1)} for n in range(3)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    env = GemEnv("math:Sums", rows=str(tmp_path / "rows.jsonl"))
    assert [env.reset(seed)[0] for seed in (4, 4, 0)] == ["1 + 1?", "1 + 1?", "0 + 1?"]
    assert env.step("1")[1:3] == (1.0, True)


def test_own_random_also_for_numpy() -> None:
    numpy = pytest.importorskip("numpy")
    outer, own = numpy.random.get_state()[1].tolist(), OwnRandom()
    with own.in_place(2**40):
        first = numpy.random.rand(), random.random()
        second = numpy.random.rand(), random.random()
    with own.in_place(2**40):
        assert (numpy.random.rand(), random.random()) == first
    with own.in_place():
        assert (numpy.random.rand(), random.random()) == second
    assert numpy.random.get_state()[1].tolist() == outer


KINDS = SimpleNamespace(PROMPT=0, PLAYER_ACTION=1, GAME_MESSAGE=3, GAME_ADMIN=5)


class ArenaRace:
    """Players add 1 or 2 in turns; who reaches 5 wins. An invalid move is told once, then it loses."""

    def __init__(self) -> None:
        self.state = SimpleNamespace(current_player_id=0, observations={})

    def reset(self, num_players: int, seed: int) -> None:
        random.seed(seed)
        self.players, self.total, self.errors, self.rewards, self.info = num_players, random.randint(0, 1), 0, None, {}
        self.state.current_player_id = 0
        self.state.observations = {p: [(-1, f"You are {p}. {self.total}", KINDS.PROMPT)] for p in range(num_players)}

    def get_observation(self):
        player = self.state.current_player_id
        found, self.state.observations[player] = self.state.observations[player], []
        return player, found

    def step(self, action: str):
        player, boxes = self.state.current_player_id, self.state.observations
        for box in boxes.values():
            box.append((player, action, KINDS.PLAYER_ACTION))
        if action not in ("[1]", "[2]"):
            self.errors += 1
            boxes[player].append((-1, "Invalid.", KINDS.GAME_ADMIN))
            self.rewards = {player: -1} if self.errors > 1 else None
            self.info = {player: {"reason": "Two errors.", "invalid_move": True}}
            return self.errors > 1, {}
        self.total += int(action[1])
        for box in boxes.values():
            box.append((-1, f"Now {self.total}.", KINDS.GAME_MESSAGE))
        if self.total >= 5:
            self.rewards = {p: 1 if p == player else -1 for p in boxes}
            self.info = {p: {"reason": f"Player {player} wins."} for p in boxes}
        self.state.current_player_id = (player + 1) % self.players
        return self.rewards is not None, {}

    def close(self):
        return self.rewards, self.info


def adds_one(observation: str) -> str:
    assert "You are 1." in observation or "[" in observation
    return "[1]"


@pytest.fixture
def textarena(monkeypatch) -> None:
    module(monkeypatch, "textarena", make=lambda id, **args: {"Race-v0-raw": ArenaRace}[id](), ObservationType=KINDS)


def test_textarena_alone(textarena) -> None:
    env = TextArenaEnv("Race-v0")
    first, _ = env.reset(1)
    assert first == env.reset(1)[0] and first.startswith("You are 0.")
    text, reward, terminated, _, info = env.step("2")
    assert text.startswith("Now ") and (reward, terminated, info["metrics"]["action_is_valid"]) == (0.0, False, 1.0)
    text, reward, terminated, _, info = env.step("")
    assert (text, reward, terminated, info["metrics"]["action_is_valid"]) == ("Invalid.", 0.0, False, 0.0)
    text, reward, terminated, _, info = env.step("nine")
    assert (text, reward, terminated) == ("Invalid.\nTwo errors.", -1.0, True)
    assert info["metrics"]["success"] == 0.0


def test_textarena_against_an_opponent(textarena) -> None:
    env = TextArenaEnv("Race-v0-raw", players=2, opponent=f"{__name__}:adds_one")
    seed = next(seed for seed in range(20) if env.reset(seed)[0].endswith("0. 0"))
    env.reset(seed)
    assert env.step("2")[0] == "Now 2.\n[1]\nNow 3."
    text, reward, terminated, _, info = env.step("[2]")
    assert (text, reward, terminated, info["metrics"]["success"]) == ("Now 5.\nPlayer 0 wins.", 1.0, True, 1.0)
    env.reset(seed)
    env.step("1"), env.step("1")
    assert env.step("1")[1] == 1.0
    with pytest.raises(ValueError, match="players=2: name an opponent"):
        TextArenaEnv("Race-v0", players=2)


def test_reasoning_gym() -> None:
    env, lenient = ReasoningGymEnv("chain_sum", {"min_terms": 2}), ReasoningGymEnv("chain_sum", strict=False)
    question, _ = env.reset(2**50 + 3)
    assert question == ReasoningGymEnv("chain_sum", {"min_terms": 2}).reset(2**50 + 3)[0] != env.reset(4)[0]
    terms = env.reset(4)[0].partition(":")[2].partition("=")[0]
    text, reward, terminated, truncated, info = env.step(str(eval(terms)))
    assert (text, reward, terminated, truncated, info["metrics"]["success"]) == ("", 1.0, True, False, 1.0)
    env.reset(4), lenient.reset(4)
    assert env.step("no number")[1] == env.step("")[1] == lenient.step("")[1] == 0.0
    assert env.step("")[4]["metrics"]["action_is_valid"] == 0.0


class SkyRlSum:
    """Gives two turns, and says how many it took."""

    def __init__(self, env_config, extras) -> None:
        self.hint, self.truth, self.turns = env_config.hint, extras["reward_spec"]["ground_truth"], 0

    def init(self, prompt):
        return [*prompt, {"role": "user", "content": self.hint}], {}

    def step(self, action: str):
        self.turns += 1
        right = action == self.truth
        again = [] if right else [{"role": "user", "content": "Again."}]
        return {"observations": again, "reward": float(right), "done": right or self.turns == 2, "metadata": {}}

    def get_metrics(self):
        return {"turns": self.turns, "name": "sum"}

    def close(self) -> None: ...


def test_skyrl_gym(monkeypatch, tmp_path) -> None:
    module(monkeypatch, "skyrl_gym", make=lambda id, **args: {"sum": SkyRlSum}[id](**args))
    rows = tmp_path / "rows.jsonl"
    prompt = [{"role": "system", "content": "Add."}, {"role": "user", "content": "2 + 2?"}]
    first = {"prompt": prompt, "reward_spec": {"ground_truth": "4"}}
    rows.write_text(f"{json.dumps(first)}\n{json.dumps(first | {'prompt': 'two and two'})}\n")
    env = SkyRlGymEnv("sum", str(rows), {"hint": "Be exact."})
    assert env.reset(10) == ("2 + 2?\n\nBe exact.", {"instruction": "Add."})
    assert env.step("5")[:4] == ("Again.", 0.0, False, False)
    text, reward, terminated, _, info = env.step("4")
    assert (text, reward, terminated) == ("", 1.0, True)
    assert info["metrics"] == {"success": 1.0, "action_is_valid": 1.0, "turns": 2.0}
    assert env.reset(11) == ("two and two\n\nBe exact.", {})
    env.close(), env.close()
    rows.write_text('{"prompt": 1}\nnonsense\n')
    with pytest.raises(ValueError, match=r"rows.jsonl:2: "):
        SkyRlGymEnv("sum", str(rows))


class Lost(Exception):
    """As `websockets` raises when a connection has ended."""


class EchoSocket:
    """An OpenEnv server within reach: echoes what it is told, and ends at `bye`."""

    def __init__(self) -> None:
        self.sent, self.left = [], 3

    def send(self, text: str) -> None:
        if self.left == 0:
            raise Lost("gone")
        self.sent.append(json.loads(text))

    def recv(self, timeout: float) -> str:
        message = self.sent[-1]
        said = message["data"].get("message", "")
        if said == "slow":
            raise TimeoutError
        if said == "die":
            self.left = 0
            raise Lost("gone")
        if said == "fail":
            return json.dumps({"type": "error", "data": {"code": "EXECUTION_ERROR", "message": "it failed"}})
        reward = {"bye": 1.0, "nan": float("nan"), "": None}.get(said, 0.5)
        data = {"observation": {"text": said or "hello", "n": 1}, "reward": reward, "done": said == "bye"}
        return json.dumps({"type": "observation", "data": data})

    def close(self) -> None:
        self.left = 0


@pytest.fixture
def sockets(monkeypatch) -> list[EchoSocket]:
    made = []

    def connect(url: str, open_timeout: float, max_size: int) -> EchoSocket:
        assert url == "ws://127.0.0.1:8000/ws"
        made.append(EchoSocket())
        return made[-1]

    module(monkeypatch, "websockets")
    module(monkeypatch, "websockets.exceptions", ConnectionClosed=Lost)
    module(monkeypatch, "websockets.sync")
    module(monkeypatch, "websockets.sync.client", connect=connect)
    return made


def test_openenv(sockets: list[EchoSocket]) -> None:
    env = OpenEnvServer("http://127.0.0.1:8000/", observation_key="text", reset={"task": "easy"})
    assert env.reset(2**31 + 5) == ("hello", {})
    assert sockets[0].sent == [{"type": "reset", "data": {"seed": 5, "task": "easy"}}]
    assert env.step("hi")[:4] == ("hi", 0.5, False, False)
    assert env.step('{"message": "x", "y": 2}')[0] == "x" and sockets[0].sent[-1]["data"] == {"message": "x", "y": 2}
    text, reward, terminated, _, info = env.step("bye")
    assert (reward, terminated, info["metrics"]["success"]) == (1.0, True, 1.0)
    whole = OpenEnvServer("ws://127.0.0.1:8000/ws")
    assert json.loads(whole.reset(1)[0]) == {"text": "hello", "n": 1}
    whole.close(), whole.close()
    assert sockets[1].sent[-1] == {"type": "close"}


@pytest.mark.parametrize(
    ("said", "error", "message"),
    [
        ("fail", RuntimeError, "EXECUTION_ERROR it failed"),
        ("nan", RuntimeError, "the reward is nan"),
        ("slow", TimeoutError, "no reply in 60 s"),
        ("die", ConnectionError, "the connection is lost"),
    ],
)
def test_openenv_that_fails_says_how_and_can_be_reset(sockets, said: str, error: type, message: str) -> None:
    env = OpenEnvServer("http://127.0.0.1:8000")
    env.reset(0)
    with pytest.raises(error, match=message):
        env.step(said)
    if said in ("slow", "die"):
        with pytest.raises(ConnectionError, match="reset comes first"):
            env.step("hi")
    assert "hello" in env.reset(1)[0]
    with pytest.raises(ValueError, match="a URL with http"):
        OpenEnvServer("127.0.0.1:8000")


@pytest.fixture
def webshop_url():
    """URL of AgentGym's server as far as the adapter needs it, over our own shop."""
    envs: dict[int, WebShopEnv] = {}

    def actions(text: str) -> list[str]:
        return [part for part in text.rpartition("Available actions: ")[2].split(", ") if part]

    class Handler(BaseHTTPRequestHandler):
        def answer(self, found) -> None:
            content = json.dumps(found).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def do_GET(self) -> None:
            index = int(parse_qs(urlparse(self.path).query)["env_idx"][0])
            offered = actions(envs[index].step("")[0])
            clicks = [action[6:-1] for action in offered if action.startswith("click[")]
            self.answer({"has_search_bar": "search[<content>]" in offered, "clickables": clicks})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if self.path == "/create":
                envs[len(envs) + 7] = WebShopEnv("all")
                return self.answer(len(envs) + 6)
            env = envs[body["env_idx"]]
            if self.path == "/reset":
                return self.answer([env.reset(body["session_id"])[0].partition("\n")[0], None])
            if self.path == "/close":
                return self.answer({"closed": True})
            text, reward, done, _, _ = env.step(body["action"])
            return self.answer({"state": text.partition("\n")[0], "reward": reward, "done": done, "info": None})

        def log_message(self, *args) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_the_webshop_server_plays_as_our_own_shop(webshop_url: str) -> None:
    ours = WebShopEnv("test")
    with closing(WebShopServer(webshop_url, split="test", goals=7000)) as theirs:
        assert theirs.reset(503)[0] == (first := ours.reset(3)[0])
        wish = first.split(" [SEP] ")[2]
        for action in ("nonsense", f"search[{wish}]", "search[again]", "click[next >]", "click[< prev]"):
            expected, seen = ours.step(action), theirs.step(action)
            expected[4].pop("state_key")
            assert seen == expected, action
        item = expected[0].rpartition(", ")[2].strip()
        assert theirs.step(item)[0] == ours.step(item)[0]
        seen, expected = theirs.step("click[buy now]"), ours.step("click[buy now]")
        assert seen[:4] == expected[:4] and seen[2] and seen[4]["metrics"] == expected[4]["metrics"]
    with pytest.raises(ValueError, match="split=train: it begins at wish 1500, and there are 1000"):
        WebShopServer(webshop_url, goals=1000)
