"""docs/CONFIG.md and the docstrings it is made of."""

from pathlib import Path

import pytest

from spmd_rl.config.docs import entries
from spmd_rl.config.markdown import markdown
from spmd_rl.config.schema import PIPELINES, RlvrConfig

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_config_md_is_current():
    """Mend with: python -m spmd_rl.config.markdown > docs/CONFIG.md"""
    assert (DOCS / "CONFIG.md").read_text() == markdown()


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_every_setting_says_what_it_means(pipeline):
    assert [entry.key for entry in entries(PIPELINES[pipeline]) if not entry.doc] == []


def test_an_entry_is_what_stands_in_the_schema():
    found = {entry.key: entry for entry in entries(RlvrConfig)}
    assert found["policy.lr"].default == "2.0e-05" and found["policy.lr"].type == "float"
    assert found["policy.betas"].default == "[0.9, 0.999]"
    assert found["run.name"].default == "null" and found["run.name"].type == "str or null"
    assert found["reward.<domain>.target"].default == "required"
    assert found["engine.kv_tokens"].doc.startswith("Tokens of KV cache in a replica")
