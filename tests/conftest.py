"""Fixtures for several test files. Importing `common` here fixes the devices for all tests."""

import collections
import gc
import itertools
import re
from pathlib import Path

import jax
import pytest

from tests import parts
from tests.common import WORDS
from tests.helpers import learn, make

MOST = 5        # cases that .ci/full takes of a test's longest ones


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """.ci/run takes the quick cases of a test. If there are none, it takes the first slow case, the
    25th and so on. .ci/full takes MOST of the others, evenly spread; `.ci/full all` takes all."""
    cases = collections.defaultdict(lambda: collections.defaultdict(list))
    for item in items:
        kind = next(filter(item.get_closest_marker, ("full", "slow")), "quick")
        cases[item.nodeid.partition("[")[0]][kind].append(item)
    for of_test in cases.values():
        for number, item in enumerate(of_test["slow"]):
            if of_test["quick"] or number % 24:
                item.add_marker(pytest.mark.full)
        longest = [item for item in of_test["full"] + of_test["slow"]
                   if item.get_closest_marker("full")]
        kept = {-(-i * len(longest) // MOST) for i in range(MOST)}
        for number, item in enumerate(longest):
            if number not in kept:
                item.add_marker(pytest.mark.rest)


# -------------------------------------------------------------------------------------------
# A copy without a part (README): pytest leaves out or skips what needs it, and counts the files

REFUSED = re.compile(r"(?:needs|belong to) ([\w/ ]+), which this copy does not have")


def needs(path):
    """The first missing part that a test file imports; "" if no such part is missing."""
    return next(iter(sorted(parts.needs_of_test(path) & parts.GONE)), "") if parts.GONE else ""


def pytest_ignore_collect(collection_path):
    """Leave out test files that import a missing part."""
    return True if collection_path.suffix == ".py" and needs(collection_path) else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """Skip a test if something in it asks for a missing part."""
    report = yield
    if parts.GONE and report.failed and (found := REFUSED.search(str(report.longrepr))):
        report.outcome = "skipped"
        report.longrepr = str(item.path), 0, f"needs {found[1]}"
    return report


def pytest_terminal_summary(terminalreporter):
    files = Path(__file__).parent.rglob("test_*.py")
    for part, count in collections.Counter(filter(None, map(needs, files))).items():
        files = "1 file of tests is" if count == 1 else f"{count} files of tests are"
        terminalreporter.write_line(f"{files} left out: {part}/ is not here")


MAPS = Path("/proc/self/maps")
counter = itertools.count(1)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown():
    """Forget compiled programs before there are too many. Each has several memory mappings. Linux
    allows a process 65,530; beyond that, jax's compiler crashes. A test of generation leaves 390,
    so a worker died after 150 such tests."""
    if next(counter) % 10 == 0 and MAPS.exists() and MAPS.read_bytes().count(b"\n") > 10_000:
        jax.clear_caches()
        gc.collect()


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
    """A run of the small transformer on one device: rows of metrics, and the result of fit."""
    return learn(make())
