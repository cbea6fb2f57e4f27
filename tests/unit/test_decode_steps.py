"""`DecodeSteps` on a CPU, where nothing is captured: buckets against the module's own forward; what has graphs."""

from array import array

import pytest
import torch
from transformers import AutoModelForCausalLM

from spmd_rl.engine.native import decode
from spmd_rl.engine.native.decode import DecodeSteps
from spmd_rl.engine.native.kv import KVPool
from spmd_rl.engine.native.module import empty_module
from spmd_rl.engine.native.scheduler import RunningSequence, Scheduler
from spmd_rl.types import Request
from tests.models import tiny


@pytest.mark.parametrize("together", [0, 65_536], ids=["by length", "together"])
def test_rows_of_several_lengths_have_the_logits_of_rows_alone(together, tmp_path, monkeypatch):
    monkeypatch.setattr(decode, "ONE_BUCKET", together)
    path = tiny("qwen3", tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    module = empty_module(path, torch.float32)
    module.load_state_dict(plain.state_dict())
    config = module.config
    pool = KVPool(2, 2048, config.num_key_value_heads, config.head_dim, torch.float32, torch.device("cpu"))
    scheduler, steps = Scheduler(pool, 16), DecodeSteps(module, pool, {0: 0, 1: 1})
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 250, (11, 140), generator=generator)
    with torch.no_grad():
        wanted = plain(ids, use_cache=False).logits
        # One comes late: ten rows fill one bucket and leave it one by one, at 128 tokens.
        for step in range(142):
            for number in [0, *range(1, 10)] if step == 0 else [10] if step == 4 else []:
                scheduler.add(Request(f"{number}", array("i", ids[number, :1].tolist()), 139, 1.0, 0))
            scheduler.admit()
            rows = scheduler.rows[::-1]
            places = [(int(row.request.id), row.num_stored) for row in rows]
            for (number, place), row, found in zip(places, rows, steps.logits(rows), strict=True):
                torch.testing.assert_close(found, wanted[number, place], rtol=0, atol=2e-5)
                row.num_stored = row.num_tokens
                if place == 138 - number % 3:
                    scheduler.end(row)
                else:
                    row.append(int(ids[number, place + 1]), 0.0, 1, [])
    assert not scheduler.rows and pool.num_used == 0


@pytest.mark.parametrize(
    ("kind", "more", "wanted"),
    [
        ("llama", {}, True),
        ("llama", {"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0}}, True),
        ("llama", {"rope_parameters": {"rope_theta": 1e4, "rope_type": "dynamic", "factor": 4.0}}, False),
    ],
)
def test_rotary_tables_that_depend_on_positions_have_no_graphs(kind, more, wanted, tmp_path):
    assert decode.can_be_captured(empty_module(tiny(kind, tmp_path, **more), torch.float32)) == wanted


def test_steps_of_many_keys_have_no_graphs(tmp_path):
    steps = DecodeSteps(torch.nn.Linear(1, 1), None, {})

    def row(length):
        request = Request("0", array("i", [1] * length), 2, 1.0, 0)
        return RunningSequence(request, table=[], num_stored=length - 1)

    assert steps.takes([row(100)] * 256) and steps.takes([row(1000)] * 250) and steps.takes([row(20_000)])
    assert not steps.takes([row(1025)] * 250) and not steps.takes([row(33_000)]) and not steps.takes([])
