"""What the sources of `spmd_rl/engine/vllm` lean on in vLLM: imports, calls, attributes, overridden methods.

An expression is followed from what is imported or annotated, through assignments and loops, with the types of `TYPES`.
An attribute of vLLM's that stands in no line of it is an error: whoever writes it says there what it holds.
"""

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ENGINE = "vllm.v1.engine.llm_engine:LLMEngine"
EXECUTOR = "vllm.v1.executor.uniproc_executor:ExecutorWithExternalLauncher"
CONFIG = "vllm.config:VllmConfig"
FLAT = "vllm.logprobs:FlatLogprobs"
GRAMMARS = "vllm.v1.structured_output:StructuredOutputManager"
WORKERS = ("vllm.v1.worker.gpu_worker:Worker", "vllm.v1.worker.cpu_worker:CPUWorker")
RUNNERS = (
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner",  # the second one, on CUDA
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner",
    "vllm.v1.worker.cpu_model_runner:CPUModelRunner",
)
OF_RUNNERS = ("get_model", "intermediate_tensors", "max_num_tokens", "model_config", "device", "model")
MANY = "*"
"""Before a type: a list, or a mapping to it."""
NOTHING = ()
"""What is followed no further: numbers, torch's and Python's own."""
TYPES = {
    ENGINE: {
        "vllm_config": CONFIG, "model_executor": EXECUTOR, "engine_core": "vllm.v1.engine.core_client:InprocClient",
        "output_processor": "vllm.v1.engine.output_processor:OutputProcessor",
        "input_processor": "vllm.v1.engine.input_processor:InputProcessor",
        "step": MANY + "vllm.outputs:RequestOutput",
        "add_request": NOTHING, "abort_request": NOTHING, "collective_rpc": NOTHING, "reset_prefix_cache": NOTHING,
        "sleep": NOTHING, "wake_up": NOTHING, "add_lora": NOTHING, "release_kv_cache_memory": NOTHING,
        "reset_encoder_cache": NOTHING, "renderer": "vllm.renderers.base:BaseRenderer",
    },
    "vllm.renderers.base:BaseRenderer": {"mm_processor": "vllm.multimodal.processing:BaseMultiModalProcessor"},
    "vllm.multimodal.processing:BaseMultiModalProcessor": {"_get_mm_fields_config": NOTHING},
    "vllm.multimodal.inputs:MultiModalKwargsItems": {"from_hf_inputs": NOTHING},
    "vllm.v1.engine.core_client:InprocClient": {"_finalizer": NOTHING, "engine_core": "vllm.v1.engine.core:EngineCore"},
    "vllm.v1.engine.core:EngineCore": {
        "structured_output_manager": GRAMMARS, "scheduler": "vllm.v1.core.sched.scheduler:Scheduler",
        "batch_queue": NOTHING, "step": NOTHING, "step_fn": NOTHING, "pause_scheduler": NOTHING,
    },
    "vllm.v1.core.sched.scheduler:Scheduler": {"make_spec_decoding_stats": NOTHING, "has_finished_requests": NOTHING},
    "vllm.v1.sample.rejection_sampler": {"expand_batch_to_tokens": NOTHING},
    GRAMMARS: {"backend": NOTHING},
    "vllm.v1.engine.input_processor:InputProcessor": {"structured_outputs_config": NOTHING},
    "vllm.v1.engine.output_processor:OutputProcessor": {
        "request_states": MANY + "vllm.v1.engine.output_processor:RequestState"
    },
    "vllm.v1.engine.output_processor:RequestState": {"logprobs_processor": "vllm.v1.engine.logprobs:LogprobsProcessor"},
    "vllm.v1.engine.logprobs:LogprobsProcessor": {"logprobs": FLAT},
    EXECUTOR: {"driver_worker": WORKERS, "shutdown": NOTHING},
    **dict.fromkeys(WORKERS, {"model_runner": RUNNERS, "reload_weights": NOTHING}),
    **dict.fromkeys(RUNNERS, dict.fromkeys(OF_RUNNERS, NOTHING)),
    CONFIG: {
        "cache_config": "vllm.config:CacheConfig", "model_config": "vllm.config:ModelConfig",
        "parallel_config": "vllm.config:ParallelConfig", "scheduler_config": "vllm.config:SchedulerConfig",
        "speculative_config": NOTHING,
    },
    "vllm.config:CacheConfig": dict.fromkeys(("num_gpu_blocks", "block_size", "kv_cache_memory_bytes"), NOTHING),
    "vllm.config:ModelConfig": dict.fromkeys(
        ("max_model_len", "get_vocab_size", "dtype", "get_num_kv_heads", "get_head_size", "get_num_layers"), NOTHING
    ),
    "vllm.config:ParallelConfig": {"tensor_parallel_size": NOTHING, "pipeline_parallel_size": NOTHING},
    "vllm.config:SchedulerConfig": {"max_num_seqs": NOTHING},
    "vllm.outputs:RequestOutput": {
        "request_id": NOTHING, "num_cached_tokens": NOTHING, "outputs": MANY + "vllm.outputs:CompletionOutput"
    },
    "vllm.outputs:CompletionOutput": {"token_ids": NOTHING, "finish_reason": NOTHING, "logprobs": FLAT},
    FLAT: dict.fromkeys(("start_indices", "end_indices", "token_ids", "logprobs"), NOTHING),
    "vllm.sampling_params:RequestOutputKind": {"DELTA": NOTHING},
    "vllm.engine.arg_utils:EngineArgs": {"create_engine_config": CONFIG},
    "vllm.distributed.parallel_state": {
        "_WORLD": "vllm.distributed.parallel_state:GroupCoordinator", "_NODE_COUNT": NOTHING,
        "destroy_model_parallel": NOTHING, "get_pp_group": "vllm.distributed.parallel_state:GroupCoordinator",
    },
    "vllm.distributed.parallel_state:GroupCoordinator": {"destroy": NOTHING, "is_first_rank": NOTHING},
    "vllm.platforms.interface:Platform": {"simple_compile_backend": NOTHING},
    "vllm.model_executor.layers.vocab_parallel_embedding:ParallelLMHead": {
        "quant_method": "vllm.model_executor.layers.vocab_parallel_embedding:UnquantizedEmbeddingMethod"
    },
    "vllm.model_executor.layers.vocab_parallel_embedding:UnquantizedEmbeddingMethod": {
        "process_weights_after_loading": NOTHING
    },
    "vllm.model_executor.layers.fused_moe:UnquantizedFusedMoEMethod": {"moe_kernel": NOTHING},
    "vllm._custom_ops": dict.fromkeys(
        ("create_onednn_scaled_mm", "onednn_scaled_int8_quant", "onednn_scaled_mm"), NOTHING
    ),
    "vllm.platforms.interface:PlatformEnum": {"CPU": NOTHING},
}  # fmt: skip
"""Class or module -> its attributes that are used -> what they hold, or return; several where the device decides."""
OURS = {(EXECUTOR, "world")}
"""What our subclass of vLLM's executor adds."""
INSTANCES = {"vllm.platforms:current_platform": "vllm.platforms.interface:Platform"}
"""What is imported and is no class, function or module."""

Types = tuple[str, ...]


@dataclass(frozen=True)
class Call:
    """A call as it is written: of a class, or of `class.method`."""

    what: str
    num_positional: int
    keywords: tuple[str, ...]


@dataclass
class Uses:
    """What was found, each in `file:line: ...` where it is an error."""

    imports: set[str] = field(default_factory=set)
    """`module:name`"""
    attributes: set[tuple[str, str]] = field(default_factory=set)
    calls: set[Call] = field(default_factory=set)
    overrides: dict[str, int] = field(default_factory=dict)
    """`class.method` -> parameters that ours takes, `self` among them"""
    prompts: set[str] = field(default_factory=set)
    """Keys of a prompt"""
    unknown: list[str] = field(default_factory=list)


def uses(paths: Sequence[Path]) -> Uses:
    """Read the sources."""
    found = Uses()
    for path in paths:
        _Reader(path, found).visit(ast.parse(path.read_text()))
    return found


class _Reader(ast.NodeVisitor):
    def __init__(self, path: Path, found: Uses) -> None:
        self.path, self.found = path, found
        self.names: dict[str, Types] = {}
        self.classes: set[str] = set()
        self.dicts: dict[str, set[str]] = {}

    def visit_Module(self, node: ast.Module) -> None:
        for child in ast.walk(node):  # what a function of this file may refer to wherever it stands
            if isinstance(child, ast.ImportFrom) and (child.module or "").partition(".")[0] == "vllm":
                self._import(child)
            elif isinstance(child, ast.Assign) and isinstance(child.targets[0], ast.Name):
                self.dicts[child.targets[0].id] = _keys(child.value)
            elif isinstance(child, ast.FunctionDef):
                self.dicts[child.name] = _keys(child)
        self.generic_visit(node)

    def _import(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            path, name = f"{node.module}:{alias.name}", alias.asname or alias.name
            self.found.imports.add(path)
            module = path.replace(":", ".")
            self.names[name] = (INSTANCES.get(path) or (module if module in TYPES else path),)
            if path not in INSTANCES and module not in TYPES:
                self.classes.add(name)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        before = dict(self.names)
        for argument in (*node.args.args, *node.args.kwonlyargs):
            self.names.pop(argument.arg, None)
            if isinstance(argument.annotation, ast.Name) and argument.annotation.id in self.classes:
                self.names[argument.arg] = before[argument.annotation.id]
        self.generic_visit(node)
        kept = {name: types for name, types in self.names.items() if name.startswith("self.")}
        self.names = before | kept

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for base in node.bases:
            if isinstance(base, ast.Name) and base.id in self.classes:
                methods = [child for child in node.body if isinstance(child, ast.FunctionDef)]
                (path,) = self.names[base.id]
                self.found.overrides |= {f"{path}.{m.name}": len(m.args.args) for m in methods}
        before = dict(self.names)
        self.generic_visit(node)
        self.names = before

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=True))
            for to, value in pairs:
                self._bind(to, self._types(value))
        if isinstance(node.value, ast.Dict) and "prompt_token_ids" in _keys(node.value):
            self.found.prompts |= _keys(node.value)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self._bind(node.target, self._types(node.value))

    def _bind(self, to: ast.expr, types: Types) -> None:
        name = to.id if isinstance(to, ast.Name) else _own(to)
        if name is None:
            self._types(to)
        elif types:
            self.names[name] = types
            self.classes.discard(name)

    def visit_For(self, node: ast.For) -> None:
        self._bind(node.target, _one(self._types(node.iter)))
        for child in node.body + node.orelse:
            self.visit(child)

    def visit_If(self, node: ast.If) -> None:
        before = dict(self.names)
        self.visit(node.test)
        for test in ast.walk(node.test):
            if isinstance(test, ast.Call) and getattr(test.func, "id", "") == "isinstance":
                kinds = test.args[1]
                if isinstance(test.args[0], ast.Name) and isinstance(kinds, ast.Name) and kinds.id in self.classes:
                    self.names[test.args[0].id] = self.names[kinds.id]
        for child in node.body:
            self.visit(child)
        self.names = before
        for child in node.orelse:
            self.visit(child)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._types(node)

    def visit_Call(self, node: ast.Call) -> None:
        self._types(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self._types(node)

    def _types(self, node: ast.expr) -> Types:
        """What an expression holds, as far as it is vLLM's; what it uses on the way is noted."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id, NOTHING)
        if isinstance(node, ast.Attribute):
            own = self.names.get(_own(node) or "", NOTHING)
            return own or self._attribute(self._types(node.value), node.attr, node)
        if isinstance(node, ast.Subscript):
            self.visit(node.slice)
            return _one(self._types(node.value))
        if isinstance(node, ast.Call):
            return self._call(node)
        self.generic_visit(node)
        return NOTHING

    def _attribute(self, types: Types, name: str, node: ast.AST) -> Types:
        held: list[str] = []
        for path in types:
            if path.startswith(MANY):
                held += [path] if name == "values" else []
            elif (path, name) in OURS:
                pass
            elif name not in TYPES.get(path, {}):
                self.found.unknown.append(f"{self.path.name}:{node.lineno}: {path} has no {name} in TYPES")
            else:
                self.found.attributes.add((path, name))
                holds = TYPES[path][name]
                held += [holds] if isinstance(holds, str) else holds
        return tuple(dict.fromkeys(held))

    def _call(self, node: ast.Call) -> Types:
        for value in (*node.args, *(keyword.value for keyword in node.keywords)):
            self.visit(value)
        name = getattr(node.func, "id", "")
        if name == "getattr" and isinstance(node.args[1], ast.Constant):
            return self._attribute(self._types(node.args[0]), node.args[1].value, node)
        if name == "type":
            return self._types(node.args[0])
        given = [keyword.arg for keyword in node.keywords if keyword.arg]
        for keyword in node.keywords:
            if keyword.arg is None:
                given += sorted(self._spread(keyword.value))
        if name in self.classes:
            self._note(self.names[name], "", node, given)
            return self.names[name]
        if isinstance(node.func, ast.Attribute):
            owners = self._types(node.func.value)
            self._note([path for path in owners if not path.startswith(MANY)], f".{node.func.attr}", node, given)
            if node.func.attr == "collective_rpc" and owners:
                self._remote(node)
        return self._types(node.func)

    def _note(self, paths: Sequence[str], suffix: str, node: ast.Call, given: list[str]) -> None:
        for path in paths:
            what = path + suffix if ":" in path else path + suffix.replace(".", ":", 1)
            self.found.calls.add(Call(what, len(node.args), tuple(given)))

    def _remote(self, node: ast.Call) -> None:
        """A method of the worker, by name, with keywords in a mapping."""
        method = node.args[0].value
        (given,) = [_keys(keyword.value) for keyword in node.keywords if keyword.arg == "kwargs"]
        for runner in RUNNERS:  # the worker's own hands all on
            self.found.calls.add(Call(f"{runner}.{method}", 0, tuple(sorted(given))))
        self._attribute(WORKERS, method, node)

    def _spread(self, node: ast.expr) -> set[str]:
        """Keys of `**a | f()`, where this file says them."""
        names = {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}
        return set().union(*(self.dicts.get(name, set()) for name in names))


def _own(node: ast.AST) -> str | None:
    """`self.name`, if it is that."""
    is_own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    return f"self.{node.attr}" if is_own else None


def _one(types: Types) -> Types:
    return tuple(path.removeprefix(MANY) for path in types if path.startswith(MANY))


def _keys(node: ast.AST) -> set[str]:
    """Words that are keys of a mapping somewhere inside."""
    found = [key for child in ast.walk(node) if isinstance(child, ast.Dict) for key in child.keys]
    return {key.value for key in found if isinstance(key, ast.Constant) and isinstance(key.value, str)}
