"""The view of a run: what its readers, its server and the terminal tell of a small run, and to whom."""

import http.client
import json
import subprocess
import sys
import threading
from array import array
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode, urlsplit

import msgspec
import pytest
import yaml

from spmd_rl.base.errors import UserError
from spmd_rl.config.schema import AlgorithmConfig
from spmd_rl.learn import sample_log
from spmd_rl.tools.view import __main__ as command
from spmd_rl.tools.view.runs import RunIndex
from spmd_rl.tools.view.server import ViewServer
from spmd_rl.track.samples import SampleLog, SampleRow, StepRow
from spmd_rl.track.tokens import TokenTexts
from spmd_rl.track.trajectories import rows, whole
from spmd_rl.types import AgentStep, Group, Message, Prompt, Sample, Turn, Verdict
from tests import agents
from tests.agent_run import bytes_tokenizer, encoder, make_agent_run, write_step
from tests.synthetic import make_run
from tests.unit.test_prepare import plan_of


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """A folder of two runs: an agent's of three steps, of which two are written, and one of single answers."""
    root = tmp_path_factory.mktemp("runs")
    make_agent_run(root / "agent", bytes_tokenizer(root / "model"), written=2)
    make_run(root / "rlvr" / "sums")
    return root


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[ViewServer]:
    with ViewServer(RunIndex(root)) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


def ask(
    server: ViewServer, path: str, host: str = "127.0.0.1", method: str = "GET"
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.request(method, path, headers={"Host": f"{host}:{server.server_port}"})
    reply = connection.getresponse()
    return reply.status, dict(reply.getheaders()), reply.read()


def get(server: ViewServer, name: str, **query: object):
    status, _, body = ask(server, f"{urlsplit(server.url).path}api/{name}?{urlencode(query)}")
    assert status == 200, body
    return json.loads(body)


def step_of(state: int) -> AgentStep:
    return AgentStep("seen", -0.1, state, "Up", {"action_is_valid": 1.0}, "P_")


def turn(text: str, state: int = 1, prompt: tuple[int, ...] = (1, 2)) -> Turn:
    ids = array("i", [3] * len(text))
    return Turn(
        array("i", prompt),
        ids,
        array("f", [-0.5] * len(ids)),
        array("i", [4] * len(ids)),
        "stop",
        text,
        step=step_of(state),
    )


def logged(samples: list[Sample], path: Path, prompt: Prompt = Prompt("1d", (), "lake", "")) -> Path:
    """The file that the sample log makes of one group."""
    group = Group(prompt, 7, tuple(samples))
    log = SampleLog(path, 0, 1, "eval")
    log.write(1, sample_log.held_out([group]))
    log.merge(1)
    return log.path(1)


def test_the_log_tells_what_the_environment_returned(tmp_path: Path) -> None:
    path = logged([Sample(7, 0, (turn("a", state=-1),), Verdict("ok", -0.1))], tmp_path)
    row = msgspec.json.decode(path.read_bytes(), type=SampleRow)
    assert row.turns[0].step == StepRow("seen", -0.1, "f" * 16, "Up", "P_", {"action_is_valid": 1.0})
    assert (row.unit, row.last, row.turns[0].advantage) == (None, True, None)
    assert b'"unit"' not in path.read_bytes() and b'"last"' not in path.read_bytes()


@pytest.mark.parametrize(("advantage", "own"), [("step_reinforce", True), ("grpo", False)])
def test_each_turn_has_the_advantage_of_its_tokens(advantage: str, own: bool, tmp_path: Path) -> None:
    """Credit per turn, in two segments; a turn without a sampled token has none."""
    steps = [
        agents.Step(reward, index, tokens) for index, (reward, tokens) in enumerate([(1, 2), (0, 1), (0, 0), (4, 3)])
    ]
    other = [agents.Step(2.0, 9, 1), agents.Step(0.0, 8, 1)]
    made = agents.group(5, [agents.trajectory(5, 0, steps, cuts=(1,)), agents.trajectory(5, 1, other)])
    harvest = agents.collected([made])
    plan = plan_of(harvest, AlgorithmConfig(advantage=advantage, step_reward_gamma=0.5))
    told = {row.answer: row for row in sample_log.rows(harvest, plan)}
    runs = iter(plan.advantages.tolist())
    for _, row in sorted(told.items()):
        mine = [turn for turn in row.turns if turn.token_ids]
        if own and len(mine) > 1:
            assert [turn.advantage for turn in mine] == pytest.approx([next(runs) for _ in mine])
            total = sum(turn.advantage * len(turn.token_ids) for turn in mine)
            assert row.advantage == pytest.approx(total / sum(len(turn.token_ids) for turn in mine))
        else:
            assert {turn.advantage for turn in row.turns} == {None} and row.advantage == pytest.approx(next(runs))
    assert next(runs, None) is None
    assert own == (told[1].turns[0].advantage is not None) and told[agents.SEGMENTS].turns[1].advantage is None
    log = SampleLog(tmp_path, 0, 1)
    log.write(1, told.values())
    log.merge(1)
    first, second = rows(log.path(1))
    assert (first.segments, first.turns, first.tokens, second.advantage) == (2, 4, 6, told[1].advantage)
    wanted = (2 * told[0].advantage + 4 * told[agents.SEGMENTS].advantage) / 6
    assert first.advantage == pytest.approx(wanted)


def test_segments_are_one_trajectory_and_a_pair_is_two(tmp_path: Path) -> None:
    far = 1 << 16
    begun, done = Verdict("ok", 0.0), Verdict("ok", 0.75, {"stop/max_turns": 1.0})
    samples = [
        Sample(7, 0, (turn("a"), turn("b")), begun, unit=0, last=False),
        Sample(7, 1, (turn("x"),), done, unit=1),
        Sample(7, 2, (turn("y"),), done, unit=1),
        Sample(7, far, (turn("c"),), begun, unit=0, last=False),
        Sample(7, 2 * far, (turn("dd"),), done, unit=0),
    ]
    path = logged(samples, tmp_path)
    found = rows(path)
    assert [(row.answer, row.turns, row.tokens, row.segments, row.score, row.end) for row in found] == [
        (0, 4, 5, 3, 0.75, "max_turns"), (1, 1, 1, 1, 0.75, "max_turns"), (2, 1, 1, 1, 0.75, "max_turns"),
    ]  # fmt: skip
    told = whole(path, found[0])
    assert [[turn["text"] for turn in segment["turns"]] for segment in told["segments"]] == [["a", "b"], ["c"], ["dd"]]
    assert told["verdict"]["score"] == 0.75


def test_a_trajectory_without_its_end_is_shown(tmp_path: Path) -> None:
    path = logged([Sample(7, 0, (turn("a"),), Verdict("error", detail="lost"), unit=0, last=False)], tmp_path)
    assert [(row.status, row.score) for row in rows(path)] == [("error", None)]


def test_a_line_that_is_none_is_named(tmp_path: Path) -> None:
    path = logged([Sample(7, 0, (turn("a"),), Verdict("ok"))], tmp_path)
    path.write_bytes(path.read_bytes() + b'{"ticket":1}\n')
    with pytest.raises(ValueError, match=r"eval-000001\.jsonl:2: .*answer"):
        rows(path)


def test_runs_of_a_folder_and_what_is_none(root: Path, tmp_path: Path) -> None:
    assert sorted(RunIndex(root).names()) == ["agent", "rlvr/sums"]
    assert RunIndex(root / "agent").names() == ["."]
    (tmp_path / "config.yaml").write_text("a: 1\n")
    for folder, why in ((tmp_path, "no run in it"), (tmp_path / "none", "no such directory")):
        with pytest.raises(UserError, match=why):
            RunIndex(folder)


def test_the_page_asks_for_runs_steps_and_samples(server: ViewServer) -> None:
    by_name = {one["run"]: one for one in get(server, "runs")}
    assert by_name["agent"]["pipeline"] == "agentic" and by_name["agent"]["planned"] == 3
    run = get(server, "run", run="agent")
    assert run["steps"] == {"step": [1, 2], "eval": [1, 2]} and run["no_tokenizer"] == ""
    series = get(server, "series", run="agent", last=2)
    assert [step for step, _ in series["critic/score/mean"]] == [1, 2] and "env/frozen_lake/success" in series
    listed = get(server, "step", run="agent", kind="step", step=2)
    listed, total = listed["rows"], listed["total"]
    assert [(row["ticket"], row["answer"]) for row in listed] == [(t, a) for t in range(16, 24) for a in range(8)]
    assert {row["end"] for row in listed} <= {"terminated", "max_turns"} and "offsets" not in listed[0]
    assert total == 64 and len(get(server, "step", run="agent", kind="eval", step=2)["rows"]) == 16


def test_the_page_asks_for_the_overview_and_the_comparison_of_all_runs(server: ViewServer) -> None:
    found = get(server, "overview", run="rlvr/sums")
    assert found["pipeline"] == "rlvr" and [row["rank"] for row in found["timeline"]] == [0, 1]
    lanes = {lane["name"]: lane["runs"] for lane in get(server, "compare")["lanes"]}
    assert lanes == {"frozen-lake-grpo": ["agent"], "smollm2-135m-grpo-1f0c": ["rlvr/sums"]}


def test_the_best_and_the_worst_of_a_step_are_asked_for(server: ViewServer) -> None:
    place = {"run": "agent", "kind": "step", "step": 2}
    marked = get(server, "step", **place)["marked"]
    found = {(one["ticket"], one["answer"]): one["score"] for one in get(server, "trajectories", **place, marked=1)}
    assert len(found) == 6 and {*map(tuple, marked["best"]), *map(tuple, marked["worst"])} == set(found)
    assert min(found[tuple(one)] for one in marked["best"]) > max(found[tuple(one)] for one in marked["worst"])


def test_a_trajectory_comes_with_texts_and_steps(server: ViewServer, root: Path) -> None:
    place = {"run": "agent", "kind": "step", "step": 2, "ticket": 17}
    group = get(server, "trajectories", **place)
    assert [one["answer"] for one in group] == list(range(8))
    (one,) = get(server, "trajectories", **place, answer=3)
    assert one == group[3]
    line = json.loads((root / "agent/samples/step-000002.jsonl").read_text().splitlines()[11])
    (segment,) = one["segments"]
    assert len(segment["turns"]) == len(line["turns"])
    for shown, written in zip(segment["turns"], line["turns"], strict=True):
        given = written.pop("prompt_ids")
        assert {name: shown[name] for name in written} == written
        assert (shown["num_given"], shown["num_tokens"]) == (len(given), len(written["token_ids"]))
        assert "".join(shown["tokens"]) == f"{written['text']}<|im_end|>" and len(shown["tokens"]) == len(
            written["logprobs"]
        )
    assert "FrozenLake" in segment["turns"][0]["prompt"]
    assert all("advantage" in turn for turn in segment["turns"])


def test_an_answer_of_one_turn(server: ViewServer) -> None:
    (one,) = get(server, "trajectories", run="rlvr/sums", kind="step", step=12, ticket=0, answer=0)
    assert one["messages"][0]["content"].startswith("State the final answer") and one["end"] == "stop"


def test_a_missing_tokenizer_is_told(tmp_path: Path) -> None:
    texts = TokenTexts(str(tmp_path))
    assert texts.texts([1]) is None and "tokenizer.json" in texts.missing
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text('{"version": 1}')
    assert "tokenizer.json: " in TokenTexts(str(tmp_path / "broken")).missing
    assert TokenTexts(None).missing == "the run names no model"


def test_characters_of_several_tokens_stand_with_the_last_of_them(tmp_path: Path) -> None:
    model = bytes_tokenizer(tmp_path)
    texts, ids = TokenTexts(str(model)), encoder(model)("a\u65e5b")
    assert texts.texts(ids) == ["a", "", "", "\u65e5", "b"]
    assert texts.texts(ids[:3]) == ["a", "", "\ufffd"]


def test_a_run_is_followed(tmp_path: Path) -> None:
    run_dir = make_agent_run(tmp_path / "run", written=1)
    runs = RunIndex(run_dir)
    assert [step for step, _ in runs.read(".").series("critic/score/mean")] == [1]
    write_step(run_dir, 2, encoder(tmp_path / "model"), 3)
    assert [step for step, _ in runs.read(".").series("critic/score/mean")] == [1, 2]
    path = run_dir / "samples" / "step-000001.jsonl"
    assert len(rows(path)) == 64
    path.write_bytes(b"".join(path.read_bytes().splitlines(True)[:8]))
    assert len(rows(path)) == 8


@pytest.mark.parametrize(
    ("query", "status", "why"),
    [
        ("api/run?run=..", 404, "no run"),
        ("api/run?run=%2Fetc", 404, "no run"),
        ("api/run", 404, "run"),
        ("api/step?run=agent&kind=step&step=9", 404, "9"),
        ("api/step?run=agent&kind=..%2F&step=1", 404, "kind"),
        ("api/step?run=agent&kind=step&step=x", 500, "ValueError"),
        ("api/nothing", 404, "no such thing"),
        ("../config.yaml", 404, "no such thing"),
    ],
)
def test_what_is_not_there(server: ViewServer, query: str, status: int, why: str) -> None:
    told, _, body = ask(server, urlsplit(server.url).path + query)
    assert (told, why in json.loads(body)["error"]) == (status, True), body


def test_only_the_printed_address_is_answered(server: ViewServer) -> None:
    path = urlsplit(server.url).path
    assert server.server_address[0] == "127.0.0.1"
    assert ask(server, path)[0] == ask(server, path, host="localhost")[0] == 200
    others = [("/", "127.0.0.1"), ("/x" + path, "127.0.0.1"), (path[:-2] + "/", "127.0.0.1"), ("/%C3%A9/", "localhost")]
    for other, host in [*others, (path, "evil.example"), (path, "127.0.0.1.evil.example"), (path, "")]:
        status, _, body = ask(server, other, host)
        assert status == 403 and b"spmd_rl view" not in body, (other, host)
    assert ask(server, path, method="POST")[0] == 501


def test_the_page_brings_all_it_needs_and_may_load_nothing(server: ViewServer) -> None:
    _, headers, body = ask(server, urlsplit(server.url).path)
    page, policy = body.decode(), headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "connect-src 'self'" in policy
    assert policy.count("'sha256-") == 2 and policy.removesuffix("; frame-ancestors 'none'") in page
    assert "innerHTML" not in page and "outerHTML" not in page and "insertAdjacent" not in page and "eval(" not in page
    assert "https://" not in page and page.count("http://") == page.count("http://www.w3.org/2000/svg")


def test_the_terminal(root: Path, capsys) -> None:
    run = str(root / "agent")
    assert command.main([str(root), "--text"]) == 0
    assert "rlvr/sums" in capsys.readouterr().out
    assert command.main([run, "--text"]) == 0
    said = capsys.readouterr().out
    assert "terminated" in said and "warm-up" not in said
    settings = yaml.safe_load((root / "agent/config.yaml").read_text())
    (root / "agent/config.yaml").write_text(yaml.safe_dump(settings | {"warmup": {"steps": 1}}))
    assert command.main([run, "--text"]) == 0
    assert "1 warm-up " in capsys.readouterr().out
    (root / "agent/config.yaml").write_text(yaml.safe_dump(settings))
    assert command.main([run, "--text", "--step", "1"]) == 0
    assert "8.0" in capsys.readouterr().out
    for color in ("logprob", "mask", "advantage", "version", "none"):
        assert command.main([run, "--sample", "17.3", "--color", color]) == 0
        out = capsys.readouterr().out
        assert "turn 1" in out and "P _ _ _" in out and "action" in out and "FrozenLake" in out
    assert command.main([run, "--text", "--held-out", "--sample", "3"]) == 0
    assert "held out" in capsys.readouterr().out


def test_the_terminal_shows_greedy_answers_apart(tmp_path: Path, capsys) -> None:
    """An evaluation: its mean is that of sampled answers, and there are no samples of training to look at."""
    make_agent_run(tmp_path / "run", written=0)
    drawn = [Sample(7, 0, (turn("a"),), Verdict("ok", 0.25)), Sample(7, 1, (turn("b"),), Verdict("ok", 0.5))]
    greedy = Sample(7, 2, (turn("c"),), Verdict("ok", 1.0), greedy=True)
    logged([*drawn, greedy], tmp_path / "run" / "samples")
    assert command.main([str(tmp_path / "run"), "--text"]) == 0
    assert capsys.readouterr().out.split()[-4:] == ["1", "3", "0.375", "1"]
    assert command.main([str(tmp_path / "run"), "--held-out", "--step", "1"]) == 0
    assert capsys.readouterr().out.count("7.2 greedy ") == 1
    assert command.main([str(tmp_path / "run"), "--step", "1"]) == 2
    assert "of training there are none, with --held-out 1\n" in capsys.readouterr().err


def test_the_terminal_acts_on_nothing_that_a_model_wrote(tmp_path: Path, capsys) -> None:
    make_agent_run(tmp_path / "run", written=0)
    sample = Sample(7, 0, (turn("\x1b[31m[bold]"),), Verdict("ok", 1.0, detail="\x07"))
    evil = replace_action(sample, "\x1b]0;x\x07")
    logged([evil], tmp_path / "run" / "samples")
    assert command.main([str(tmp_path / "run"), "--held-out", "--sample", "7.0"]) == 0
    assert command.main([str(tmp_path / "run"), "--held-out", "--step", "1"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\x07" not in out and "x1b" in out


OUTSIDE = "a\x1b[2J\x7f\x9b31m\u202e\u2028\nerror: forged"


def test_no_name_from_outside_acts_on_the_terminal(tmp_path: Path, capsys) -> None:
    """Nor does it make a line of its own."""
    make_agent_run(tmp_path / "run", written=0)
    config = tmp_path / "run" / "config.yaml"
    config.write_text(yaml.safe_dump(yaml.safe_load(config.read_text()) | {"run": {"name": OUTSIDE}}))
    sample = Sample(7, 0, (turn(OUTSIDE),), Verdict("ok", 1.0))
    logged([sample], tmp_path / "run" / "samples", Prompt("p", (Message("user", OUTSIDE),), OUTSIDE, ""))
    for words in (
        [],
        ["--step", "1", "--held-out"],
        ["--sample", "7", "--held-out"],
        ["--held-out", "--sample", OUTSIDE],
    ):
        command.main([str(tmp_path / "run"), "--text", *words])
    out, err = capsys.readouterr()
    assert all(c.isprintable() or c == "\n" for c in out + err) and "forged" in out and "forged" in err
    assert not [line for line in out.splitlines() if line.startswith("error:")] and err.count("\n") == 1


def replace_action(sample: Sample, action: str) -> Sample:
    (one,) = sample.turns
    step = msgspec.structs.replace(one.step, action=action)
    return msgspec.structs.replace(sample, turns=(msgspec.structs.replace(one, step=step),))


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["none"], "none: no such directory"),
        (["agent", "--port", "99999"], "--port 99999"),
        (["agent", "--step", "9"], "there are 1 to 2"),
        (["agent", "--sample", "999.1"], "--sample 999.1"),
        ([".", "--step", "1"], "holds 2 runs"),
    ],
)
def test_mistakes_are_one_line(root: Path, capsys, arguments: list[str], why: str) -> None:
    assert command.main([str(root / arguments[0]), *arguments[1:]]) == 2
    error = capsys.readouterr().err
    assert why in error and error.count("\n") == 1


def test_metrics_are_served_on_request_alone(root: Path, server: ViewServer) -> None:
    assert ask(server, "/metrics")[0] == 403
    with ViewServer(RunIndex(root), metrics=True) as open_one:
        threading.Thread(target=open_one.serve_forever, args=(0.01,), daemon=True).start()
        status, headers, body = ask(open_one, "/metrics")
        assert status == 200 and headers["Content-Type"].startswith("application/openmetrics-text")
        assert b'spmd_rl_critic_score_mean{run="agent"} ' in body and b'run="rlvr/sums"' in body
        assert ask(open_one, "/metrics", host="evil.example")[0] == ask(open_one, "/")[0] == 403
        open_one.shutdown()


def test_it_needs_no_torch() -> None:
    code = "import sys, spmd_rl.tools.view.__main__; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_settings_that_are_no_yaml(tmp_path: Path, capsys) -> None:
    run_dir = make_agent_run(tmp_path / "run", written=0)
    (run_dir / "config.yaml").write_text("a: [")
    assert command.main([str(run_dir), "--text"]) == 2
    assert capsys.readouterr().err.startswith("error: ")
