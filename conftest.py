"""Renews .tested, the record of the files on which all of test_all.py has passed."""

import pytest

from zigzag.core import edited as tested

TESTS = "test_all.py::"
collected, passed, failed = set(), set(), set()     # ids of the tests in test_all.py


@pytest.hookimpl(tryfirst=True)         # before -k and -m leave out some tests
def pytest_collection_modifyitems(items):
    collected.update(item.nodeid for item in items if item.nodeid.startswith(TESTS))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """With -n, the workers collect, and the process that starts them sees the results."""
    collected.update(getattr(node, "workeroutput", {}).get("collected", []))


def pytest_runtest_logreport(report):
    if report.nodeid.startswith(TESTS):
        if report.outcome != "passed":
            failed.add(report.nodeid)
        elif report.when == "call":
            passed.add(report.nodeid)


def pytest_sessionfinish(session):
    config = session.config
    if hasattr(config, "workeroutput"):
        config.workeroutput["collected"] = sorted(collected)
        return
    is_whole = not any(TESTS in str(word) for word in config.args)
    if is_whole and collected and collected == passed and not failed:
        try:
            renewed = tested.renew_record(tested.FILES)
        except OSError as e:
            renewed = False
            print(f"\n{tested.NAME} cannot be written ({e.strerror})")
        if renewed:
            print(f"\nall of test_all.py passed: {tested.NAME} is up to date, commit it too")
