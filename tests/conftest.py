"""Fixtures that several test files use. Importing `common` here fixes the devices for all tests."""

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

MOST = 5        # of the longest cases of a test, in .ci/full


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """.ci/run takes the quick cases of a test or, if it has none, its first slow one, the 25th and
    so on. .ci/full takes MOST of the others, evenly spread; `.ci/full all` takes all."""
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
# A copy without a part (README): what needs it is left out, or skipped, and counted

REFUSED = re.compile(r"(?:needs|one of) ([\w/ ]+), which this copy does not have")


def needs(path):
    """The first part that is gone, of those that a file of tests imports; "" if there is none."""
    return next(iter(sorted(parts.needs_of_test(path) & parts.GONE)), "") if parts.GONE else ""


def pytest_ignore_collect(collection_path):
    """Files of tests that import a part that is gone are not collected."""
    return True if collection_path.suffix == ".py" and needs(collection_path) else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """A test in which something asks for a part that is gone is skipped."""
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
    """Forget compiled programs before there are too many. Each has several memory mappings, of
    which Linux allows a process 65,530; beyond that jax's compiler crashes. (A test of generation
    leaves 390, so a worker died after 150 of them.)"""
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
    """A run of the small transformer on one device: rows of metrics, and what fit gives."""
    return learn(make())
