"""Fixtures that several test files use. Importing `common` here fixes the devices for all tests."""

import collections

import pytest

from zigzag.tests.common import WORDS, learn, make


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Of the slow cases of a test .ci/run takes the first, the seventh and so on; .ci/full takes
    all."""
    cases = collections.Counter()
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("full"):
            name = item.nodeid.partition("[")[0]
            if cases[name] % 6:
                item.add_marker(pytest.mark.full)
            cases[name] += 1


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A folder of 40 small text files."""
    folder = tmp_path_factory.mktemp("text")
    for i in range(40):
        (folder / f"{i}.txt").write_text("".join(
            f"{WORDS[(i * j) % 50]} {i} and {WORDS[(i + j) % 50]} {j} are {i + j}\n"
            for j in range(60)))
    return folder


@pytest.fixture(scope="session")
def alone():
    """A run of the small transformer on one device: rows of metrics, and what fit gives."""
    return learn(make())
