"""A user's own functions through the door: a reward, a loss and an advantage, and what their mistakes say."""

import pytest

from spmd_rl.base.errors import printable
from tests.e2e.runs import EXACT, ROOT, Toy

MINE = """
def score(answer, ground_truth, odd=0):
    return sum(map(ord, answer)) % 2 == odd


def unlucky(answer):
    number = len(answer)
    raise LookupError("no luck")


def loss(tokens, *, clip_low, strength):
    ratio = (tokens.logprobs - tokens.old_logprobs).exp()
    return -strength * ratio * tokens.advantages, {"actor/my_ratio": ratio}


def advantage(scored):
    return scored.scores - scored.scores.mean()


def bad_advantage(scored):
    return scored.nothing
"""


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Toy:
    toy = Toy(tmp_path_factory.mktemp("toy"))
    (toy.path / "my_plugins.py").write_text(MINE)
    return toy


def start(toy: Toy, name: str, *settings: str, **how):
    env = {"PYTHONPATH": f"{ROOT}:{toy.path}"}
    return toy.start(*EXACT, "steps=2", "eval.every=0", *settings, ranks=2, name=name, env=env, **how)


@pytest.mark.slow
def test_functions_of_ones_own_train(toy: Toy) -> None:
    own = ("algorithm.loss=my_plugins:loss", "algorithm.args.strength=0.5", "algorithm.advantage=my_plugins:advantage")
    run = start(toy, "own", "reward.toy.target=my_plugins:score", "reward.toy.args.odd=1", *own)
    assert run.wait() == 0, run.text()[-3000:]
    assert [line["step"] for line in run.metrics()] == [0, 1, 2]
    assert all(line["actor/my_ratio"] == pytest.approx(1.0) for line in run.metrics()[1:])
    assert {row["verdict"]["score"] for row in run.samples(2)} == {0.0, 1.0}


@pytest.mark.parametrize(
    ("name", "settings", "line", "code"),
    [
        (
            "reward",
            ("reward.toy.target=my_plugins:unlucky",),
            "reward.error_budget=0.1: 100% of the answers of step 1 got no score; the first: error: my_plugins.py:8: "
            "LookupError: no luck",
            1,
        ),
        pytest.param(
            "advantage",
            ("reward.toy.target=my_plugins:score", "algorithm.advantage=my_plugins:bad_advantage"),
            "algorithm.advantage: my_plugins:bad_advantage: my_plugins.py:21: AttributeError: 'Scored' object has no "
            "attribute 'nothing'",
            2,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_its_exception_is_one_line_and_the_rest_is_kept(toy: Toy, name, settings, line, code) -> None:
    run = start(toy, name, *settings)
    assert run.wait() == code
    told = [text for text in run.text().splitlines() if text.startswith("error: ")]
    assert told == [f"error: {line} (more in {run.run_dir}/error.txt)"]
    kept = (run.run_dir / "error.txt").read_text()
    assert kept.splitlines()[0] == line and f'File "{toy.path}/my_plugins.py", line ' in kept
    rows = run.samples(1)
    assert len(rows) >= 16 and not any(row["kept"] for row in rows)
    if name == "reward":
        first = min(rows, key=lambda row: (row["ticket"], row["answer"]))
        assert first["messages"][0]["content"] in kept and printable(first["turns"][0]["text"]) in kept
