"""The dataset of a run: sameness, held-out share, ids, format, and the order of tickets."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.base.errors import UserError
from spmd_rl.config.schema import DataConfig
from spmd_rl.data import Prompts, content_id, counter_seed
from spmd_rl.data.prompts import is_held_out
from spmd_rl.types import ImagePart, Message, Prompt, TextPart

DATA = Path(__file__).parents[3] / "shared" / "data"
SUM_CHAINS = "reasoning_gym:chain_sum"
SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def questions(num: int, start: int = 0) -> list[dict[str, Any]]:
    return [{"question": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(start, start + num)]


def contents(prompts: tuple[Prompt, ...]) -> set[str]:
    return {content_id(prompt.messages) for prompt in prompts}


def test_another_seed_of_reasoning_gym_is_the_same_problems_again() -> None:
    """Why held-out problems are told by content: item i of seed s is item i + 1 of seed s - 1."""
    import reasoning_gym

    here = reasoning_gym.create_dataset("chain_sum", size=20, seed=7)
    there = reasoning_gym.create_dataset("chain_sum", size=21, seed=6)
    assert [here[i]["question"] for i in range(20)] == [there[i + 1]["question"] for i in range(20)]


@settings(max_examples=25, deadline=None)
@given(
    seeds=st.tuples(st.integers(0, 2**20), st.integers(0, 2**20)),
    sizes=st.tuples(st.integers(100, 300), st.integers(100, 300)),
    holdout=st.sampled_from([0.1, 0.25, 0.5]),
    digits=st.integers(1, 2),
)
def test_training_and_held_out_share_no_content(
    seeds: tuple[int, int], sizes: tuple[int, int], holdout: float, digits: int
) -> None:
    """Not only within a run: what one run holds out, no run of any other seed or size trains on."""
    args = {**SUMS, "max_digits": digits}
    runs = [
        Prompts.load(DataConfig(train=SUM_CHAINS, size=n, seed=s, args=args, holdout=holdout))
        for n, s in zip(sizes, seeds)
    ]
    trained = contents(runs[0].train) | contents(runs[1].train)
    held_out = contents(runs[0].eval) | contents(runs[1].eval)
    assert trained and held_out and not trained & held_out
    for run, size in zip(runs, sizes):
        assert len(run.train) + len(run.eval) + run.num_dropped == size
        ids = [prompt.id for prompt in run.train + run.eval]
        assert len(set(ids)) == len(ids)


def test_held_out_share_is_the_share_asked_for(tmp_path: Path) -> None:
    prompts = Prompts.load(DataConfig(train=write(tmp_path / "a.jsonl", *questions(4000)), holdout=0.25))
    assert 900 < len(prompts.eval) < 1100


def test_format_and_system_do_not_move_a_problem(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *questions(50))
    plain = Prompts.load(DataConfig(train=path))
    settings = {"format": "Solve for {x, y}: {question}\nIn \\boxed{}.", "system": "Be brief."}
    dressed = Prompts.load(DataConfig(train=path, **settings))
    assert [p.id for p in plain.train] == [p.id for p in dressed.train]
    assert [p.id for p in plain.eval] == [p.id for p in dressed.eval]
    system, user = dressed.train[0].messages
    assert system == Message("system", "Be brief.")
    assert user.content == f"Solve for {{x, y}}: {plain.train[0].messages[0].content}\nIn \\boxed{{}}."


def test_a_line_break_from_the_command_line_is_one_and_is_said(tmp_path: Path, capsys) -> None:
    path = write(tmp_path / "a.jsonl", *questions(1))
    cfg = DataConfig(train=path, format="{question}\\nSay \\neq or \\\\new.", system="a\\nnot", holdout=1e-9)
    system, user = Prompts.load(cfg).train[0].messages
    assert user.content == "What is 0 + 0?\nSay \\neq or \\\\new." and system.content == "a\nnot"
    said = capsys.readouterr().err.splitlines()
    assert said == [f"data.{key}: \\n is read as a line break" for key in ("format", "system")]
    Prompts.load(DataConfig(train=path, format="{question}\nA: \\nabla", holdout=1e-9))
    assert capsys.readouterr().err == ""


def test_prompts_without_some_keep_their_order_and_shares(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *questions(40))
    prompts = Prompts.load(DataConfig(train=path, mix={"math": 1.0}))
    fewer = prompts.without({0, len(prompts.train)})
    assert fewer.train == prompts.train[1:] and fewer.eval == prompts.eval[1:]
    assert fewer.num_dropped == 2 and fewer.ticket(0, 0)[1].domain == "math"


def test_messages_are_taken_as_they_are(tmp_path: Path) -> None:
    own = [{"role": "system", "content": "Mine."}, {"role": "user", "content": "u"}]
    path = write(
        tmp_path / "a.jsonl",
        {"messages": own, "ground_truth": "1"},
        {"messages": own[1:], "ground_truth": "1"},
    )
    prompts = Prompts.load(DataConfig(train=path, format="X {question}", system="Ours.", holdout=1e-9))
    assert [[m.content for m in p.messages] for p in prompts.train] == [["Mine.", "u"], ["Ours.", "u"]]


def test_copies_are_dropped_however_they_are_spelled(tmp_path: Path) -> None:
    rows = [
        {"question": "caf\u00e9  au lait?", "answer": "1", "level": 0},
        {"prompt": " cafe\u0301\nau lait? ", "ground_truth": "2"},
        {"messages": [{"role": "user", "content": "caf\u00e9 au lait?"}], "ground_truth": "3"},
        {"question": "Caf\u00e9 au lait?", "answer": "4"},
    ]
    prompts = Prompts.load(DataConfig(train=write(tmp_path / "a.jsonl", *rows), holdout=1e-9))
    assert [p.ground_truth for p in prompts.train] == ["1", "4"]  # the first stays; case counts
    assert prompts.num_dropped == 2 and prompts.train[0].extra == {"level": 0}


def test_content_id_is_for_good() -> None:
    # A change here moves problems between training and evaluation: scores of old and new runs no longer compare.
    assert content_id([Message("user", "What is 2 + 2?")]) == "d3ba9969eca81991a451b6ffdda35f1d"
    assert content_id([Message("user", "a"), Message("user", "b")]) != content_id([Message("user", "a b")])
    assert content_id([Message("user", "a")]) != content_id([Message("system", "a")])
    images = [content_id([Message("user", (TextPart("a"), ImagePart("image/png", data)))]) for data in (b"1", b"2")]
    assert len({*images, content_id([Message("user", "a")])}) == 3
    assert is_held_out("3fffffffffffffff" + "0" * 16, 0.25) and not is_held_out("4" + "0" * 31, 0.25)


def test_rows_of_data_eval_are_not_trained_on(tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", *questions(10))
    held_out = write(tmp_path / "eval.jsonl", *questions(6, start=7), *questions(1, start=7))
    prompts = Prompts.load(DataConfig(train=train, eval=held_out))
    assert [p.ground_truth for p in prompts.train] == [str(2 * i) for i in range(7)]  # all, and in file order
    assert sorted(int(p.ground_truth) for p in prompts.eval) == [14, *range(14, 26, 2)]  # all, one of them twice
    assert prompts.num_dropped == 3


def of_parquet(path: Path, *rows: dict[str, Any]) -> str:
    from pyarrow import Table, parquet

    parquet.write_table(Table.from_pylist(list(rows)), path)
    return str(path)


@pytest.mark.parametrize("write_rows", [write, of_parquet])
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("given", [("eval",), ("train", "eval")], ids="+".join)
def test_all_rows_of_what_is_given_to_be_evaluated_are(tmp_path: Path, given, trains: bool, write_rows) -> None:
    """Two files, in which a question stands four times, and is trained on nowhere."""
    if trains and "eval" not in given:
        given = ("train", "eval")
    rows = [*questions(30), {"question": "What is 7 + 7?", "answer": "other"}, *questions(1, start=7)]
    first, second = write_rows(tmp_path / "a", *rows), write_rows(tmp_path / "b", *questions(3, start=7))
    sources = {"train": write(tmp_path / "train", *questions(40, start=7)), given[-1]: f"{first},{second}"}
    sources = {key: sources[key] for key in given} | ({"train": sources["train"]} if trains else {})
    cfg = DataConfig(**sources, holdout=0.5, mix={} if trains else {"nowhere": 1})
    prompts = Prompts.load(cfg, trains)
    expected = sorted(row["answer"] for row in [*rows, *questions(3, start=7)])
    assert sorted(p.ground_truth for p in prompts.eval) == expected and len(prompts.train) == 17 * trains
    assert len({p.id for p in prompts.eval}) == len(expected)
    assert sum(p.messages[0].content == "What is 7 + 7?" for p in prompts.eval) == 4
    assert Prompts.load(cfg, trains).fingerprint() == prompts.fingerprint()
    assert not contents(prompts.train) & contents(prompts.eval)
    assert prompts.eval[0].id == min(p.id for p in prompts.eval)


def test_an_evaluation_asks_what_training_holds_out_and_with_holdout_1_all(tmp_path: Path) -> None:
    path = write(tmp_path / "train", *questions(40), *questions(5))
    trained, alone = (Prompts.load(DataConfig(train=path), trains) for trains in (True, False))
    assert alone.eval == trained.eval and 0 < len(alone.eval) < 40 and not alone.train
    assert len(Prompts.load(DataConfig(train=path, holdout=1), trains=False).eval) == 40
    with pytest.raises(UserError, match=r"^data.holdout: 0 holds out none of the rows of \S+; 1 evaluates all"):
        Prompts.load(DataConfig(train=path, holdout=0), trains=False)


def test_a_source_named_twice_is_read_once(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *questions(5))
    assert len(Prompts.load(DataConfig(eval=f"{path},{tmp_path}/*.jsonl"), trains=False).eval) == 5


def test_a_domain_with_share_0_is_evaluated_and_never_trained_on(tmp_path: Path) -> None:
    rows = [{**row, "domain": "code" if i % 2 else "math"} for i, row in enumerate(questions(200))]
    extra = write(tmp_path / "b.jsonl", {"question": "new", "answer": "1", "domain": "general"})
    shares = {"math": 1, "code": 0, "general": 0}
    for more, known in (({}, {"math", "code"}), ({"eval": extra}, {"general"})):
        prompts = Prompts.load(DataConfig(train=write(tmp_path / "a.jsonl", *rows), mix=shares, **more))
        assert {p.domain for p in prompts.eval} == known
        assert {prompts.ticket(t, 0)[1].domain for t in range(300)} == {p.domain for p in prompts.train} == {"math"}


def test_a_column_that_no_row_has_is_a_mistake(tmp_path: Path) -> None:
    train, mapped = write(tmp_path / "a.jsonl", *questions(9)), [{"question": "2 + 2?", "result": "4"}]
    with pytest.raises(UserError) as caught:
        Prompts.load(DataConfig(train=f"{train},{SUM_CHAINS}", size=3, keys={"answer": "result"}))
    line = f"data.keys.answer: no row has a column `result`; {train}:1 has `question`, `answer`"
    assert str(caught.value) == line
    with pytest.raises(
        UserError, match="^data.keys.answer and data.keys.question: no row has a column `result` or `n`; "
    ):
        Prompts.load(DataConfig(train=f"{train},{SUM_CHAINS}", size=3, keys={"answer": "result", "question": "n"}))
    other = write(tmp_path / "b.jsonl", *mapped)
    for more in ({"train": f"{train},{other}"}, {"train": train, "eval": other}):
        prompts = Prompts.load(DataConfig(**more, keys={"answer": "result"}, holdout=0))
        assert "2 + 2?" in {p.messages[0].content for p in (*prompts.train, *prompts.eval)}
    unread = DataConfig(train=other, eval=train, keys={"answer": "result"}, domains={"physics": "math"})
    assert len(Prompts.load(unread, trains=False).eval) == 9  # the settings are those of a run that trains


def test_first_held_out_prompts_stay_when_the_source_grows(tmp_path: Path) -> None:
    small = Prompts.load(DataConfig(train=write(tmp_path / "a.jsonl", *questions(40))))
    large = Prompts.load(DataConfig(train=write(tmp_path / "b.jsonl", *reversed(questions(80)))))
    kept = [p.id for p in large.eval if p.id in {q.id for q in small.eval}]
    assert kept == [p.id for p in small.eval]


def test_own_ids_are_kept_and_checked_over_all_files(tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl", *({**row, "id": i} for i, row in enumerate(questions(3))))
    second = write(tmp_path / "b.jsonl", {"question": "new", "answer": "1", "id": "1"})
    prompts = Prompts.load(DataConfig(train=first, holdout=1e-9))
    assert [p.id for p in prompts.train] == ["0", "1", "2"]
    with pytest.raises(UserError) as caught:
        Prompts.load(DataConfig(train=f"{first}, {second}"))
    line = f"data.train: {second}:1: id '1' was used before, at {first}:2; data.keys.id=null ignores ids"
    assert str(caught.value) == line


def test_several_sources_make_one_dataset(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *questions(3))
    prompts = Prompts.load(DataConfig(train=f"{path},reasoning_gym:chain_sum", size=5, args=SUMS, holdout=1e-9))
    assert {p.domain for p in prompts.train} == {"math", "reasoning_gym"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train": " , a.jsonl"}, "data.train: an empty name"),
        ({"train": "missing.jsonl"}, "data.train: cannot read missing.jsonl"),
        ({"train": "reasoning_gym:chain_sun"}, "data.train: reasoning-gym has no task 'chain_sun'; nearest: chain_sum"),
        ({"eval": "reasoning_gym:qqq"}, "data.eval: reasoning-gym has no task 'qqq'; nearest: none is similar"),
        ({"train": "reasoning_gym:arc_agi"}, "data.train: arc_agi is not supported"),
        ({"args": {"min_digit": 1}}, "data.args.min_digit: chain_sum has no such parameter; it has allow_negation"),
        ({"args": {"seed": 1}}, "data.args.seed: set data.seed instead"),
        ({"args": {"min_digits": 0}}, "data.args: chain_sum rejects {'min_digits': 0}: min_digits must be positive"),
        ({"args": {"min_digits": "x"}}, "data.args: chain_sum rejects"),
        ({"eval": "reasoning_gym:chain_sum"}, "no training prompt is left in reasoning_gym:chain_sum"),
        ({"holdout": 1}, "data.holdout=1 takes all rows; to evaluate them: python -m spmd_rl.evaluate"),
    ],
)
def test_mistakes_are_named_in_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        Prompts.load(DataConfig(**{"train": SUM_CHAINS} | settings))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def prompts_of(num: int) -> Prompts:
    return Prompts([Prompt(f"id{i}", (Message("user", str(i)),), "math", "") for i in range(num)])


def test_each_epoch_deals_every_prompt_once_in_an_order_of_its_own() -> None:
    prompts = prompts_of(50)
    dealt = [prompts.ticket(t, seed=3) for t in range(150)]
    for epoch in range(3):
        part = dealt[50 * epoch : 50 * (epoch + 1)]
        assert {e for e, _ in part} == {epoch} and len({p.id for _, p in part}) == 50
    orders = [[p.id for _, p in dealt[50 * e : 50 * (e + 1)]] for e in range(3)]
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert orders[0] != [prompts.ticket(t, seed=4)[1].id for t in range(50)]


def test_order_is_by_hash_of_seed_epoch_and_id() -> None:
    prompts = prompts_of(20)
    expected = sorted((p.id for p in prompts.train), key=lambda id: counter_seed(5, 2, id))
    assert [prompts.ticket(t, seed=5)[1].id for t in range(40, 60)] == expected


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=30))
def test_ticket_is_a_function_of_its_number_alone(tickets: list[int]) -> None:
    prompts = prompts_of(7)
    assert [prompts.ticket(t, 1) for t in tickets] == [prompts_of(7).ticket(t, 1) for t in tickets]


def test_fingerprint_sees_every_change(tmp_path: Path) -> None:
    base = {"train": write(tmp_path / "a.jsonl", *questions(9))}
    same, other = questions(9), questions(9)
    other[4]["answer"] = "5"
    variants = [
        DataConfig(**base),
        DataConfig(**base, system="s"),
        DataConfig(**base, holdout=0.9),
        DataConfig(train=write(tmp_path / "c.jsonl", *other)),
    ]
    prints = [Prompts.load(cfg).fingerprint() for cfg in variants]
    assert len(set(prints)) == len(prints)
    assert Prompts.load(DataConfig(train=write(tmp_path / "b.jsonl", *same))).fingerprint() == prints[0]


def test_loading_needs_no_torch() -> None:
    code = (
        "import sys; from spmd_rl.config.schema import DataConfig; from spmd_rl.data import Prompts;"
        "Prompts.load(DataConfig(train='reasoning_gym:chain_sum', size=9)); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.skipif(not (DATA / "gsm8k").is_dir(), reason="shared/data/gsm8k is absent")
def test_gsm8k_loads_whole() -> None:
    cfg = DataConfig(train=str(DATA / "gsm8k/train.jsonl"), eval=str(DATA / "gsm8k/test.jsonl"))
    prompts = Prompts.load(cfg)
    assert (len(prompts.train), len(prompts.eval), prompts.num_dropped) == (7473, 1319, 0)
    assert all(float(p.ground_truth) is not None for p in prompts.train + prompts.eval)


@pytest.mark.skipif(not (DATA / "deepmath").is_dir(), reason="shared/data/deepmath is absent")
def test_rolls_rows_load_whole() -> None:
    prompts = Prompts.load(DataConfig(train=str(DATA / "deepmath/train.jsonl")))
    assert len(prompts.train) + len(prompts.eval) + prompts.num_dropped == 4994
    assert [m.role for m in prompts.train[0].messages] == ["system", "user"]
    assert {p.domain for p in prompts.train} == {"deepmath_103k"}


@pytest.mark.skipif(not (DATA / "multi_subject").is_dir(), reason="shared/data/multi_subject is absent")
def test_a_mix_of_real_files() -> None:
    files = ",".join(
        str(DATA / name) for name in ("gsm8k/test.jsonl", "multi_subject/train.jsonl", "ifeval/prompts.jsonl")
    )
    mix = {"math": 0.4, "ifeval": 0.3, "general": 0.3}
    prompts = Prompts.load(DataConfig(train=files, domains={"RLVR": "general"}, mix=mix))
    assert len(prompts.train) + len(prompts.eval) + prompts.num_dropped == 1319 + 2058 + 541
    dealt = [prompts.ticket(t, seed=0)[1] for t in range(100)]
    assert {d: sum(p.domain == d for p in dealt) for d in mix} == {"math": 40, "ifeval": 30, "general": 30}
    assert all(p.extra["kwargs"] for p in dealt if p.domain == "ifeval")
