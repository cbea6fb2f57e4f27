"""An engine is one folder and one line in `ENGINES`: its facts decide what the checks allow."""

import pytest

from spmd_rl import engine
from spmd_rl.config import engines
from spmd_rl.config.checks import check
from spmd_rl.config.sections.engine import ENGINES
from spmd_rl.distributed import solo
from tests.models import tiny
from tests.plain_engine.engine import PlainEngine
from tests.unit.test_config_checks import place, refusal, settings  # noqa: F401  a fixture


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENGINES, "plain", "tests.plain_engine")


def test_a_new_engine_passes_the_checks_and_is_built(place, tmp_path):  # noqa: F811
    cfg = settings(place, "engine.name=plain")
    check(cfg)
    cfg.policy.model = str(tiny("llama", tmp_path))
    with solo() as world:
        assert isinstance(engine.build(cfg.engine, cfg.policy, False, world), PlainEngine)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["engine.tp=2"], "engine.tp: not supported by engine=plain; must be 1"),
        (["engine.drafts=2"], "engine.drafts: not supported by engine=plain; must be 0"),
        (["engine.args={a: 1}"], "engine.args: engine=plain has no arguments; they are for engine=vllm or sglang"),
        (
            ["policy.router_replay=true"],
            "policy.router_replay: engine=plain does not report router choices; set native",
        ),
        (["engine.quantization=w8a8_fp8"], "engine.quantization: w8a8_fp8 needs engine=vllm engine.tp=1"),
        (
            ["engine.adapters=true", "policy.lora.rank=4"],
            "engine.adapters: only with engine=vllm or sglang; engine=plain",
        ),
    ],
)
def test_what_it_lacks_is_refused_by_name(place, lines, words):  # noqa: F811
    assert refusal(place, "engine.name=plain", *lines).startswith(words)


def test_every_engine_states_its_facts():
    assert all(engines.facts_of(name).title for name in ENGINES)
