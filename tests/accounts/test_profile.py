"""A trace of some steps."""

import gzip
import json

import pytest

from tests.common import SMALL, succeeds


@pytest.mark.full
def test_a_trace_of_some_steps(tmp_path, text):
    """A trace of the first steps, one that never stops, or one without the devices' work."""
    done = succeeds(*SMALL, "--steps", 8, "--profile", 3, "--data", text, "--out", tmp_path / "run")
    assert "a trace of 3 steps" in done.stdout
    trace, = (tmp_path / "run/profile").rglob("perfetto_trace.json.gz")
    events = json.load(gzip.open(trace))["traceEvents"]
    steps = sum(event.get("name") == "PjitFunction(jit(step))" for event in events)
    assert steps in (3, 6)      # a call has one event or two
