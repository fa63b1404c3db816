"""Tests of finding and checking files inside packages."""

import hashlib

import pytest

from jagg_jax.prompts.package_files import verified_package_file

CONTENT = b"the content"
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package whose import fails, with a data file."""
    folder = tmp_path / "carrier_of_data"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    (folder / "data.bin").write_bytes(CONTENT)
    monkeypatch.syspath_prepend(tmp_path)
    return folder


def test_finds_the_file_without_importing_the_package(package):
    assert verified_package_file(package.name, "data.bin", SHA256, "carrier==1") == package / "data.bin"


def test_refuses_another_content(package):
    (package / "data.bin").write_bytes(CONTENT + b"!")
    with pytest.raises(ValueError, match=rf"has sha256 \w+, expected {SHA256}: pip install .*carrier==1"):
        verified_package_file(package.name, "data.bin", SHA256, "carrier==1")


def test_names_a_missing_file_or_package(package):
    with pytest.raises(ValueError, match=r"other\.bin is missing: .*carrier==1"):
        verified_package_file(package.name, "other.bin", SHA256, "carrier==1")
    with pytest.raises(ValueError, match="package no_such_carrier is not installed: pip install 'carrier==1'"):
        verified_package_file("no_such_carrier", "data.bin", SHA256, "carrier==1")
