"""The installed packages that code in a sandbox may import: exactly the named files and their requirements."""

import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import Distribution, PackageNotFoundError, distribution, packages_distributions
from importlib.util import find_spec
from pathlib import Path

ENVIRONMENT = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""Keeps packages from pools of threads, which take memory: a sandbox has the time of one processor."""
ROOM = 512 << 20
"""Bytes of address space for packages, beyond a process's limit."""
_NO_MODULE = re.compile(r"\.(pth|dist-info)\b")
PYTEST = "pytest _pytest py pluggy iniconfig packaging pygments"


def find_packages(names: Iterable[str]) -> dict[str, Path]:
    """Return the files and folders of the packages and their requirements, by path below a search path.

    A name is that of a module or of a distribution. Of a folder that several distributions share, only the named ones
    are visible. RuntimeError for a package that is not installed here.
    """
    wanted, found, files = list(names), set(), {}
    while wanted:
        name = wanted.pop()
        for installed in _distributions(name):
            if installed.name not in found:
                found.add(installed.name)
                files |= _files(installed)
                wanted += _required(installed)
    return files


def find_pytest() -> dict[str, Path]:
    """Return the files of pytest and of its requirements, in the form of `find_packages`."""
    found = [Path(find_spec(name).origin) for name in PYTEST.split()]
    return {path.name: path for path in (path.parent if path.name == "__init__.py" else path for path in found)}


def module_names(names: Sequence[str]) -> list[str]:
    """Return the modules to import for these packages: `scikit-learn` is `sklearn`."""
    # a quarter of a second: it reads the metadata of all that is installed
    owners = packages_distributions() if names else {}
    found = []
    for name in names:
        modules = [module for module, owned in owners.items() if name in owned and not module.startswith("_")]
        found.append(name if name in owners or not modules else modules[0])
    return found


def link(files: Mapping[str, Path]) -> tempfile.TemporaryDirectory:
    """Return a folder for `sys.path` with symbolic links to these files alone."""
    folder = tempfile.TemporaryDirectory(prefix="spmd-packages-", ignore_cleanup_errors=True)
    for name, path in files.items():
        place = Path(folder.name, name)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(path)
    return folder


def _distributions(name: str) -> list[Distribution]:
    with suppress(PackageNotFoundError, ValueError):
        return [distribution(name)]
    if owners := packages_distributions().get(name):
        return [distribution(owner) for owner in owners]
    raise RuntimeError(f"package {name} is not installed here")


def _required(installed: Distribution) -> list[str]:
    required = []
    for line in installed.requires or ():
        name = re.match(r"[\w.-]+", line)
        if name and not re.search(r"\bextra\b", line.partition(";")[2]):
            # one that another system or Python version needs is not installed
            with suppress(PackageNotFoundError):
                required.append(distribution(name[0]).name)
    return required


def _files(installed: Distribution) -> dict[str, Path]:
    listed = [path for path in installed.files or () if ".." not in path.parts and "__pycache__" not in path.parts]
    # a top folder with an `__init__.py` is a package that no other distribution puts files into
    own = {path.parts[0] for path in listed if path.parts[1:] == ("__init__.py",)}
    tops = {path.parts[0] if path.parts[0] in own else str(path) for path in listed}
    files = {top: Path(installed.locate_file(top)) for top in tops}
    files = {name: path for name, path in files.items() if path.exists() and not _NO_MODULE.search(name)}
    if not files:
        raise RuntimeError(f"package {installed.name} has no files of its own (is it installed as editable?)")
    return files
