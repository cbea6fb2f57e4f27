"""Settings from YAML and overrides: Hydra composes, OmegaConf types, dataclasses check.

    cfg = load("rlvr", RlvrConfig, ["rollout.temperature=0.9", "+experiment=two_digit_sums"])

More lenient than Hydra: a new key needs no `+`, and a value that Hydra refuses, or takes for a sweep (`~/models/x`,
`a.jsonl,b.jsonl`), is a string. Every mistake is a one-line `UserError`.
"""

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, make_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from spmd_rl.base.errors import UserError
from spmd_rl.bundled import HOME
from spmd_rl.config.keys import check_keys, inline_field, key_types, leaves, partial_of, type_name
from spmd_rl.config.model_files import exported_model
from spmd_rl.config.pipelines import PIPELINES
from spmd_rl.config.run_identity import fill_run
from spmd_rl.config.schema import HostConfig, JobConfig
from spmd_rl.config.shrink import GROUP as SHRINK
from spmd_rl.config.shrink import shrink

# Only the command line may set it, never a file shared with a run.
REMOTE_CODE = "policy.trust_remote_code"
"""Key that allows a model directory's Python code"""
CONFIGS = HOME / "configs"

EXPERIMENT = "experiment"
WITHOUT_DEFAULT = (EXPERIMENT, SHRINK)
"""Groups without a default, for which Hydra needs `+experiment=x`; here `experiment=x` means the same"""

MISSING = "???"

T = TypeVar("T")


def load(
    pipeline: str,
    schema: type[T],
    overrides: Sequence[str] = (),
    config_dir: str | None = None,
    config_name: str | None = None,
) -> T:
    """Load a run's settings, check each value, and fill in `run.name` and `run.dir`."""
    check_experiment(pipeline, overrides)
    check_recipe(overrides)
    cfg = build(schema, compose(pipeline, overrides, config_dir, config_name))
    for role in cfg.roles if isinstance(cfg, JobConfig) else ():
        if role.own.model:
            role.own.model = exported_model(role.model_key, role.own.model)
    return fill_run(cfg, pipeline)


def load_host(
    pipeline: str, overrides: Sequence[str], config_dir: str | None = None, config_name: str | None = None
) -> HostConfig:
    """Load a sidecar host's sections from a run's settings."""
    check_experiment(pipeline, overrides)
    values = compose(pipeline, overrides, config_dir, config_name)
    if pipeline in PIPELINES:
        check_keys(OmegaConf.to_container(values), PIPELINES[pipeline], PIPELINES)
    own = [field.name for field in fields(HostConfig) if field.name in values]
    return build(HostConfig, OmegaConf.masked_copy(values, own))


def without_others(values: DictConfig, schema: type, overrides: Sequence[str]) -> DictConfig:
    """Return the tree without keys from files that only other pipelines have.

    Keys of the command line stay, and are an error if `schema` lacks them.
    """
    tree = OmegaConf.to_container(values)
    said = [line.lstrip("+~").partition("=")[0] for line in overrides]
    own, *others = ({leaf.key for leaf in leaves(one, tree)} for one in (schema, *PIPELINES.values()))
    known = set().union(*others)

    def kept(tree: Any, prefix: str) -> Any:
        found = {}
        for name, value in tree.items():
            key = f"{prefix}{name}"
            below = isinstance(value, dict) and key not in own and key not in known
            if below and (inner := kept(value, f"{key}.")):
                found[name] = inner
            elif not below and (key in own or key not in known or key in said):
                found[name] = value
        return found

    return OmegaConf.create(kept(tree, ""))


def check_experiment(pipeline: str, overrides: Sequence[str]) -> None:
    """Raise a `UserError` for another pipeline's experiment, which has sections that this one lacks."""
    for line in overrides:
        key, _, name = line.lstrip("+").partition("=")
        path = CONFIGS / EXPERIMENT / f"{name}.yaml"
        if key == EXPERIMENT and path.is_file():
            doors = experiment_doors(path)
            if pipeline in PIPELINES and pipeline not in doors:
                raise UserError(f"{key}={name}: not an experiment of this pipeline; run python -m spmd_rl.{doors[0]}")


def check_recipe(overrides: Sequence[str]) -> None:
    """Raise a `UserError` for a recipe named but not chosen, whose settings would be missing."""
    recipes = {f"algorithm.name={name}": f"algorithm={name}" for name in _groups(CONFIGS)["algorithm"]}
    for line in overrides:
        recipe = recipes.get(line.lstrip("+"))
        if recipe and recipe not in overrides:
            raise UserError(f"algorithm.name: is only a label and sets nothing; to choose the recipe, set {recipe}")


def experiment_doors(path: Path) -> list[str]:
    """Return the pipelines that accept a shipped experiment: with all its sections and groups, or, if they borrow,
    with its groups in their file."""
    sections, groups = _of_experiment(path)
    own = {name: {field.name for field in fields(schema)} for name, schema in PIPELINES.items()}

    def accepts(name: str) -> bool:
        if not PIPELINES[name].borrows:
            return sections | groups <= own[name]
        listed = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())["defaults"]
        return groups <= {key for entry in listed if isinstance(entry, dict) for key in entry}

    return list(filter(accepts, PIPELINES))


def _of_experiment(path: Path) -> tuple[set[str], set[str]]:
    values = yaml.safe_load(path.read_text())
    defaults = values.pop("defaults", [])
    groups = {key.removeprefix("override /") for entry in defaults if isinstance(entry, dict) for key in entry}
    for name in (entry for entry in defaults if isinstance(entry, str) and entry != "_self_"):
        sections, more = _of_experiment(path.with_name(f"{name}.yaml"))
        values |= dict.fromkeys(sections)
        groups |= more
    return {*values}, groups


def compose(
    pipeline: str, overrides: Sequence[str] = (), config_dir: str | None = None, config_name: str | None = None
) -> DictConfig:
    """Return the sparse tree of YAML files and overrides, without defaults, types or checks.

    It starts from `config_name`, else from the pipeline's file, if any.
    """
    primary, searched, groups = CONFIGS, [], _groups(CONFIGS)
    if config_dir:
        own = Path(config_dir).expanduser().absolute()
        if not own.is_dir():
            raise UserError(f"--config-dir: no directory {own}")
        primary, other = (own, CONFIGS) if (own / f"{config_name or pipeline}.yaml").is_file() else (CONFIGS, own)
        searched, groups = [f"hydra.searchpath=['file://{other}']"], _groups(CONFIGS, own)
    if config_name is None and (primary / f"{pipeline}.yaml").is_file():
        config_name = pipeline
    added = WITHOUT_DEFAULT if config_name else tuple(groups)
    try:
        # The Compose API leaves the working directory and logging alone, unlike `hydra.main`.
        with initialize_config_dir(str(primary), version_base="1.3"):
            lines = [normalize_override(line, groups, added) for line in overrides]
            values = hydra_compose(config_name, overrides=[*searched, *lines])
    except MissingConfigException as error:
        raise UserError(_no_such_config(error)) from None
    except (HydraException, ConfigCompositionException, OmegaConfBaseException) as error:
        line = _first_line(error)
        if found := re.fullmatch(r"Error merging override \+*([\w.]+)=.*", line):
            line = f"{found[1]}: is a section, not a value; set {found[1]}.<key>=value"
        elif found := re.match(r"Could not override '(\w+)'", line):
            given = next((one for one in overrides if one.lstrip("+").startswith(f"{found[1]}=")), found[1])
            line = f"{given}: {pipeline} has no group {found[1]}"
        raise UserError(line) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{mark.name}:{mark.line + 1}" if mark else "YAML"
        raise UserError(f"{where}: {error.problem}") from None
    # A run's own config.yaml, passed as `--config-name`, has this section.
    with open_dict(values):
        values.pop("about", None)
    said = {line.lstrip("+").partition("=")[0] for line in overrides}
    # A YAML file may come from another person; running code needs the user's own word.
    if OmegaConf.select(values, REMOTE_CODE) and REMOTE_CODE not in said:
        raise UserError(f"{REMOTE_CODE}: set by a YAML file, which others may have written; set it on the command line")
    schema = PIPELINES.get(pipeline)
    values = without_others(values, schema, overrides) if schema and schema.borrows else values
    if SHRINK not in values:
        return values
    if schema is None:
        raise UserError(f"{SHRINK}: only for the pipelines of the package, not for {pipeline}")
    # A group on the command line chooses a name, and the sizes beside it are the recipe's.
    said = [f"{key}.name" if key in groups else key for key in said]
    return OmegaConf.create(shrink(OmegaConf.to_container(values), schema, said))


def chosen(pipeline: str, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the settings of shipped options that `overrides` choose by name (`algorithm=ppo`, `+experiment=demo`),
    as a sparse tree."""
    groups, options = _groups(CONFIGS), []
    for line in overrides:
        name, _, option = line.lstrip("+").partition("=")
        options += [line] if option in groups.get(name, ()) else []
    values = OmegaConf.to_container(compose(pipeline, options))
    assert isinstance(values, dict)
    return values


def _groups(*folders: Path) -> dict[str, list[str]]:
    found: dict[str, set[str]] = {}
    for path in (path for folder in folders for path in folder.glob("*/*.yaml")):
        found.setdefault(path.parent.name, set()).add(path.stem)
    return {name: sorted(known) for name, known in found.items()}


def normalize_override(line: str, groups: Mapping[str, Sequence[str]], added: Sequence[str]) -> str:
    """Rewrite an override for Hydra: every `key=value` adds a key or replaces its value.

    groups: options by group. added: groups without a default in any file.
    """
    override = _parse(line)
    key = override.key_or_group
    if key.split(".")[0].split("/")[0] == "hydra":
        raise UserError(f"{key}: Hydra's own settings have no effect here")
    if override.type is OverrideType.DEL or override.package is not None:
        return override.input_line
    if key in groups and key not in WITHOUT_DEFAULT and isinstance(override.value(), list):
        raise UserError(f"{key}: must be one option, not {_value_of(line)}; known: {', '.join(groups[key])}")
    if key in groups and not isinstance(override.value(), str | list):
        raise UserError(_unknown_option(key, override.value(), groups[key]))
    if key in added:
        return "+" + override.input_line.lstrip("+")
    if key in groups or "/" in key:
        return override.input_line
    return "++" + override.input_line.lstrip("+")


def _value_of(line: str) -> str:
    return line.partition("=")[2]


def _parse(line: str) -> Override:
    parser = OverridesParser.create()
    key, equals, value = line.partition("=")
    if not key.strip("+ ") or not (equals or line.startswith("~")):
        raise UserError(f"{line}: not an override; write key=value")
    try:
        override = parser.parse_overrides([line])[0]
        if not override.is_sweep_override():
            return override
    except OverrideParseException:
        pass
    quote = '"' if "'" in value else "'"
    try:
        return parser.parse_overrides([f"{key}={quote}{value}{quote}"])[0]
    except OverrideParseException:
        raise UserError(f"{line}: Hydra cannot read this; quote the value: key='value'") from None


def _no_such_config(error: MissingConfigException) -> str:
    missing = str(error.missing_cfg_file)
    group, _, option = missing.rpartition("/")
    if group and error.options:
        return _unknown_option(group, option, error.options)
    if group:
        return f"{group}: unknown group (in {group}={option})"
    return f"--config-name: no {missing}.yaml in the config directory"


def _unknown_option(group: str, option: Any, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(str(option), known, 1)
    meant = f"did you mean {group}={near[0]}? " if near else ""
    return f"{group}: unknown option {option!r}; {meant}known: {', '.join(known)}"


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def build(schema: type[T], values: DictConfig) -> T:
    """Build a `schema` from defaults and `values`, checking unknown keys, types and values in this order."""
    sparse = OmegaConf.to_container(values)
    assert isinstance(sparse, dict)
    check_keys(sparse, schema, PIPELINES)
    try:
        merged = OmegaConf.merge(_typed(schema, sparse), values)
        tree = OmegaConf.to_container(merged, resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(_type_error(error, values, schema)) from None
    assert isinstance(tree, dict)
    return _construct(schema, tree, "")


def _typed(section: type, values: Mapping[str, Any]) -> DictConfig:
    """Return a section's defaults and types, with nodes for inline entries and partial keys in `values`."""
    node = OmegaConf.structured(section)
    with open_dict(node):
        if holder := inline_field(section):
            node.pop(holder.name)
        for name, kind in key_types(section, values).items():
            if whole := partial_of(section, name):
                node.pop(name)
                given = values.get(name) or {}
                # A null means the same as a key that is not given.
                keys = [(key, kind | None, None) for key, kind in key_types(whole).items() if key in given]
                node[name] = OmegaConf.structured(make_dataclass(whole.__name__, keys))
            elif is_dataclass(kind) and (name not in node or _is_open(kind)):
                node[name] = _typed(kind, values.get(name) or {})
    return node


def _is_open(section: type) -> bool:
    """Return True if keys of a section, or below it, are up to the user."""
    below = key_types(section)
    opened = inline_field(section) is not None or any(partial_of(section, name) for name in below)
    return opened or any(_is_open(kind) for kind in below.values() if is_dataclass(kind))


def _type_error(error: OmegaConfBaseException, values: DictConfig, schema: type) -> str:
    key = re.sub(r"\[.*", "", str(error.full_key or "")) or _no_mapping(values, schema)
    leaf = next((leaf for leaf in leaves(schema, values) if leaf.key == key), None)
    given = OmegaConf.select(OmegaConf.create(OmegaConf.to_container(values)), key, throw_on_resolution_failure=False)
    if leaf is None or "interpolation" in str(error).lower():
        return f"{key}: {_first_line(error)}"
    shown = OmegaConf.to_container(given) if OmegaConf.is_config(given) else given
    line = f"{key}: expected {type_name(leaf.type)}, got {'null' if shown is None else repr(shown)}"
    return f"{line}; set {key}='{_as_list(shown)}'" if _is_single(leaf.type, shown) else line


def _is_single(kind: Any, given: Any) -> bool:
    lists = [part for part in (kind, *get_args(kind)) if get_origin(part) is list]
    return bool(lists) and isinstance(given, str | int | float) and "'" not in str(given)


def _as_list(given: str | float) -> str:
    return json.dumps([given.strip("[] ") or given] if isinstance(given, str) else [given], ensure_ascii=False)


def _no_mapping(values: DictConfig, schema: type) -> str:
    # OmegaConf does not name the key that has a list instead of a mapping.
    lists = (leaf.key for leaf in leaves(schema, values) if get_origin(leaf.type) is dict or leaf.type is dict)
    return next((key for key in lists if OmegaConf.is_list(OmegaConf.select(values, key))), "")


def _construct(section: type, tree: Mapping[str, Any], prefix: str) -> Any:
    holder, names = inline_field(section), {field.name for field in fields(section)}
    arguments: dict[str, Any] = {holder.name: {}} if holder else {}
    for name, kind in key_types(section, tree).items():
        value = tree[name]
        if value == MISSING:
            raise UserError(f"{prefix}{name}: must be given")
        target = arguments if name in names else arguments[holder.name]
        if whole := partial_of(section, name):
            given = {key: one for key, one in value.items() if one is not None}
            checked = _checked(whole, given, f"{prefix}{name}.")
            value = {key: getattr(checked, key) for key in given}
        target[name] = _construct(kind, value, f"{prefix}{name}.") if is_dataclass(kind) else value
    return _checked(section, arguments, prefix)


def _checked(section: type, arguments: Mapping[str, Any], prefix: str) -> Any:
    try:
        return section(**arguments)
    except UserError as error:
        raise UserError(f"{prefix}{error}") from None
