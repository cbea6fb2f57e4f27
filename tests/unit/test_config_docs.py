"""The page of settings, and the docstrings it is made of."""

import pytest

from spmd_rl.config.docs import SettingEntry, entries
from spmd_rl.config.load import build, compose
from spmd_rl.config.pipelines import PIPELINES
from spmd_rl.tools.docs import markdown


def shown(pipeline: str, *overrides: str) -> dict[str, SettingEntry]:
    schema = PIPELINES[pipeline]
    return {entry.key: entry for entry in entries(schema, build(schema, compose(pipeline, overrides)))}


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_every_setting_says_what_it_means(pipeline):
    assert [key for key, entry in shown(pipeline).items() if not entry.doc] == []


def test_the_page_has_a_row_for_every_setting_of_every_pipeline():
    sections = markdown().split("\n## ")
    for pipeline in PIPELINES:
        (section,) = (one for one in sections if one.startswith(f"`python -m spmd_rl.{pipeline}`"))
        rows = {row.split("|")[1].strip(" `"): row for row in section.splitlines() if row.startswith("| `")}
        found = shown(pipeline)
        assert rows.keys() == found.keys()
        assert all(entry.doc.replace("|", "\\|") in rows[key] for key, entry in found.items())


def test_an_entry_is_what_stands_in_the_schema():
    found = shown("rlvr")
    assert found["policy.lr"].value == "1.0e-06" and found["policy.lr"].type == "float"
    assert found["policy.betas"].value == "[0.9, 0.999]"
    assert found["policy.model"].value == "~/.cache/spmd_rl/models/smollm2-135m-instruct"
    assert found["run.name"].value == "null" and found["run.name"].type == "str or null"
    assert found["reward.<domain>.target"].value == "required"
    assert found["engine.kv_tokens"].doc.startswith("Size of a replica's KV cache in tokens")


def test_an_entry_has_the_value_that_a_command_gives_it():
    found = shown("rlvr", "+experiment=demo", "steps=7", "data.domains={a: b}")
    assert (found["policy.lr"].value, found["steps"].value) == ("2.0e-05", "7")
    assert found["rollout.filter.zero_variance"].value == "true"
    assert found["data.domains"].value == "{a: b}"
    assert found["reward.<domain>.workers"].value == "1"
