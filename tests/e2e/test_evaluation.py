"""`python -m spmd_rl.evaluate`: all rows that are given, on any number of ranks, killed and continued."""

import json
import shutil
import time
import zlib
from collections import Counter
from pathlib import Path
from statistics import fmean

import pytest

from spmd_rl.rollout.kept import HEAD, read
from spmd_rl.types.encoded import pack
from tests.e2e.runs import EXACT, Running, Toy
from tests.e2e.test_agents import SETTINGS as AGENTS
from tests.e2e.test_agents import AgentToy
from tests.patience import patient

ROWS = 500
SETTINGS = (*EXACT, "eval.prompts=null", "eval.answers=1", "rollout.max_new_tokens=2")


class Bench(Toy):
    """500 rows to evaluate, ten of which repeat questions, beside training data that has three of them."""

    door = "spmd_rl.evaluate"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        rows = [{"prompt": f"say {i % 490} of 9", "ground_truth": str(i), "domain": "toy"} for i in range(ROWS)]
        self.rows = path / "bench.jsonl"
        self.rows.write_text("".join(json.dumps(row) + "\n" for row in rows))
        with open(self.data, "a") as train:
            train.writelines(json.dumps(row) + "\n" for row in rows[:3])

    def settings(self) -> list[str]:
        return [
            f"data.eval={self.rows}",
            "reward.toy.target=tests.e2e.toy_reward:ParityReward",
            "policy.dtype=float32",
            "rollout.max_new_tokens=2",
            "journal.stall_seconds=60",
        ]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("bench"))


@pytest.fixture(scope="module")
def toy(bench: Bench) -> Toy:
    """The same rows, for runs that train."""
    toy = Toy.__new__(Toy)
    toy.path, toy.model, toy.data = bench.path, bench.model, bench.data
    return toy


def results(run: Running) -> dict:
    return json.loads((run.run_dir / "evaluation.json").read_text())["results"]


def asked(run: Running, answers: int = 2) -> dict[str, list[list[int]]]:
    """The tokens of the answers to each row, by its id."""
    found: dict[str, list[list[int]]] = {}
    lines = (run.run_dir / "samples" / "eval-000000.jsonl").read_text().splitlines()
    assert len(lines) == answers * ROWS
    for row in sorted(map(json.loads, lines), key=lambda row: ("greedy" in row, row["answer"])):
        found.setdefault(row["id"], []).append(row["turns"][0]["token_ids"])
    return found


@pytest.fixture(scope="module")
def alone(bench: Bench) -> Running:
    return bench.run(f"policy.model={bench.model}", ranks=1, name="alone")


def test_all_rows_are_evaluated_and_nothing_is_trained(alone: Running) -> None:
    (line,), found = alone.metrics(), results(alone)
    assert line["val/num_prompts"] == found["all"]["num_prompts"] == len(asked(alone)) == ROWS
    assert line["val/error_share"] == 0 and 0 < line["val/score/mean"] < 1
    assert found["toy"].items() <= found["all"].items() and found["all"]["score/mean"] == line["val/score/mean"]
    assert "over 500 prompts" in alone.text() and not (alone.run_dir / "checkpoints").exists()
    rows = [json.loads(row) for row in (alone.run_dir / "samples" / "eval-000000.jsonl").read_text().splitlines()]
    assert fmean(row["verdict"]["score"] for row in rows if "greedy" in row) == found["all"]["score_greedy/mean"]


def test_the_number_of_ranks_changes_nothing(bench: Bench, alone: Running) -> None:
    run = bench.run(f"policy.model={bench.model}", ranks=3, name="three")  # 500 rows on three ranks are uneven
    assert asked(run) == asked(alone) and results(run) == results(alone)


def test_a_run_that_trains_evaluates_the_same_and_its_newest_step_has_its_last_numbers(
    toy: Toy, bench: Bench, alone: Running
) -> None:
    metrics = "eval.metrics=[ci95,pass@1,maj@1]"
    settings = (*SETTINGS, "steps=1", "rollout.filter.zero_variance=false", f"data.eval={bench.rows}", metrics)
    run = toy.run(*settings, "rollout.prompts_per_step=40", "rollout.over_sample=0", ranks=2, name="trains")
    assert asked(run) == asked(alone)
    assert [line["val/num_prompts"] for line in run.metrics()] == [ROWS, ROWS]
    assert len({row["id"] for row in run.samples(1)}) == 40  # an epoch, and none of the three
    assert not {row["id"] for row in run.samples(1)} & asked(run).keys()

    checkpoint = run.run_dir / "checkpoints" / "step-000001"
    shutil.rmtree(checkpoint / "hf")  # what training saved is enough
    again = bench.run(f"policy.model={run.run_dir}", metrics, "train.tp=2", ranks=2, name="newest")
    last, own = run.metrics()[-1], again.metrics()[0]
    assert {key: last[key] for key in last if key.startswith("val/")} == {
        key: own[key] for key in own if key.startswith("val/")
    }
    assert last["val/score/mean"] != run.metrics()[0]["val/score/mean"]
    (damaged,) = checkpoint.glob("policy/00001.safetensors")
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    torn = bench.start(f"policy.model={checkpoint}", ranks=2, name="torn")
    assert torn.wait() == 2 and f"error: policy.model: {checkpoint} is torn (policy/00001" in torn.text()
    before = (run.run_dir / "metrics.jsonl").read_bytes()
    refused = bench.start(f"policy.model={run.run_dir}", ranks=1, name="trains")
    assert refused.wait() == 2 and f"{run.run_dir} holds a run of rlvr; choose another run.dir" in refused.text()
    assert (run.run_dir / "metrics.jsonl").read_bytes() == before


def kept(run: Running) -> dict[tuple[int, int], str]:
    """The texts of the answers that are written, by prompt and answer; each is there once."""
    answers = [one for path in run.run_dir.glob("answers/*/rank-*.bin") for one in read(path)[0]]
    found = {(one[0].ticket, one[0].answer): one[0].turns[0].text for one in answers}
    assert len(found) == len(answers)
    return found


def deal_anew(run: Running) -> None:
    """Deal the answers to each prompt out to the files of both ranks, and end one as a machine that went down may."""
    folder = next(run.run_dir.glob("answers/*"))
    answers = [one for rank in (0, 1) for one in read(folder / f"rank-{rank}.bin")[0]]
    for rank in (0, 1):
        records = [pack(one) for one in answers if one[0].answer % 2 == rank]
        whole = b"".join(HEAD.pack(len(record), zlib.crc32(record)) + record for record in records)
        (folder / f"rank-{rank}.bin").write_bytes(whole + b"\x40\0\0\0half a record" * rank)


def test_a_killed_evaluation_goes_on_bitwise_and_generates_nothing_twice(bench: Bench) -> None:
    log = bench.path / "judged.txt"
    settings = (f"policy.model={bench.model}", "eval.answers=3", "engine.max_running=8")
    whole = bench.run(*settings, ranks=1, name="whole")
    killed = bench.start(*settings, f"reward.toy.args.log={log}", "reward.toy.args.sleep=0.002", ranks=2, name="killed")
    deadline = time.time() + patient(60)
    while not killed.run_dir.exists() or len(kept(killed)) < 100:
        assert time.time() < deadline, killed.text()[-2000:]
        time.sleep(0.02)
    killed.kill()
    assert not killed.outlived(20)  # a worker that is still dying may write a line
    before, judged = kept(killed), Counter(log.read_text().splitlines())
    assert 100 <= len(before) < 4 * ROWS
    deal_anew(killed)
    log.unlink()
    goes_on = bench.run(*settings, f"reward.toy.args.log={log}", "reward.toy.args.sleep=0.002", ranks=3, name="killed")
    assert results(goes_on) == results(whole) and asked(goes_on, 4) == asked(whole, 4)
    assert before.items() <= kept(goes_on).items() and len(kept(goes_on)) == 4 * ROWS
    again = Counter(log.read_text().splitlines())
    assert sum(again.values()) == 4 * ROWS - len(before)  # none of those that were written
    assert sum(judged.values()) >= len(before)  # what was judged and not yet written is judged again
    over = bench.run(*settings, f"reward.toy.args.log={log}", "reward.toy.args.sleep=0.002", ranks=2, name="killed")
    assert results(over) == results(whole) and Counter(log.read_text().splitlines()) == again


class AgentBench(AgentToy):
    """The environments of agents, evaluated."""

    door = "spmd_rl.evaluate"

    def settings(self) -> list[str]:
        others = ("algorithm", "warmup.", "eval.every", "policy.lr", "checkpoint.", "rollout.claim")
        others += ("rollout.prompts_per_step", "rollout.answers_per_prompt", "rollout.over_sample")
        return [line for line in AGENTS if not line.startswith(others)]


def test_agents_are_evaluated_as_their_run_evaluates_them(tmp_path: Path) -> None:
    trained = AgentToy(tmp_path, max_position_embeddings=2048).run("steps=1", "eval.answers=2", name="trained")
    run = AgentBench(tmp_path).run(f"policy.model={trained.run_dir}", "eval.answers=2", ranks=3, name="alone")
    last, own = trained.metrics()[-1], run.metrics()[0]
    val = [key for key in last if key.startswith("val/")]
    assert "val/echo/success" in val and {key: own[key] for key in val} == {key: last[key] for key in val}
