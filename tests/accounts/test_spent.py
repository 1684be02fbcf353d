"""The account of a run's hours."""

import json
import re
import time

import pytest

from accounts import spent
from tests.common import SMALL, all_succeed, command, hosts, succeeds, until_step
from tests.helpers import ROOT
from zigzag.core.hours import CAUSES, Hours

# Notes after every step, so that they are exact.
EVERY_STEP = f"""import sys
sys.path.insert(0, {str(ROOT)!r})
import train, zigzag.core.hours
zigzag.core.hours.INTERVAL = zigzag.core.hours.SHARE = 0
train.run_main(train.main)
"""


def note(at, begin, now, **seconds):
    return dict.fromkeys(CAUSES, 0.0) | {"at": at, "from": begin, "now": now, **seconds}


def test_starts_add_up_to_the_wall_clock():
    """A gap that is counted twice or never; lost steps that count as progress; another start's
    seconds."""
    starts = [
        [note(0, 100, 110, start=10), note(40, 100, 190, start=10, step=80),
         note(60, 100, 232, start=10, step=120, save=2)],               # killed at step 60
        [note(50, 240, 250, start=9, restore=1), note(90, 240, 330, start=9, restore=1, step=80)],
        [note(90, 300, 340, start=40), note(95, 300, 345, start=40, step=5)]]   # a second fit
    found = spent.total(starts)
    assert (found.again, found.starts, found.steps) == (10, 3, 95)
    # At step 50 the first start had spent 100 seconds on steps, as the notes around it say.
    assert found.seconds == dict(step=120 + 80 + 5 - 20, again=20, data=0, evaluation=0, save=2,
                                 start=10 + 9 + 10, restore=1, compile=0, stopped=8)
    assert found.wall == 345 - 100


def test_a_start_may_go_on_from_before_several(tmp_path):
    """A damaged checkpoint, after which steps of two earlier starts are repeated; half a line that
    a killed process left, to which the next start appends."""
    starts = [[note(0, 0, 1), note(60, 0, 61, step=60)],
              [note(40, 61, 62), note(80, 61, 102, step=40)],
              [note(20, 102, 103), note(30, 102, 113, step=10)]]
    found = spent.total(starts)
    assert (found.again, found.seconds["again"], found.seconds["step"]) == (80, 80, 30)
    path = tmp_path / "log-0.hours.jsonl"
    path.write_text(json.dumps({**note(9, 0, 9), "is_first": True}) + '\n{"at": 10, "fr')
    after = Hours(time.perf_counter())
    after.note_in(path)
    after.note(9)
    assert [len(notes) for notes in spent._starts(path)] == [1, 1]


def test_a_second_has_one_cause(monkeypatch):
    """A cause inside another that is counted twice; a batch made while the devices worked."""
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    hours = Hours(0.0)

    def passes(seconds):
        clock[0] += seconds

    passes(5)
    with hours.of("compile"):
        passes(3)
    hours.begin("step")
    with hours.of("data"):
        passes(1)
    passes(2)
    assert hours.lap(was_busy=False) == (3, 0)
    with hours.of("data"):
        passes(7)
    with hours.of("save"):
        passes(4)
        with hours.of("step"):
            passes(10)
    assert hours.lap(was_busy=True) == (17, 4)
    assert hours.seconds == dict(start=5, compile=3, step=2 + 17, data=1, save=4, restore=0,
                                 evaluation=0)


def test_a_run_ends_with_its_account_and_the_report_has_it(tmp_path, text):
    """A cause that nobody measures; a report that needs the run to have ended."""
    out = tmp_path / "run"
    said = succeeds(*SMALL, "--steps", 20, "--data", text, "--out", out).stdout
    assert re.search(r"^time +\d+ s: \w+ \d+%(, \w+ \d+%){3}$", said, re.M)
    with open(out / "log-0.hours.jsonl", "a") as f:
        f.write('{"at": 21, "fro')          # a killed process was writing
    lines = succeeds("--report", out).stdout.splitlines()
    assert lines[0].startswith(f"{out}: 20 steps in ") and "(1 start, 1 process)" in lines[0]
    causes = [line.split()[0] for line in lines[1:]]
    assert causes == ["step", "data", "evaluation", "save", "start", "restore", "compile"]
    for words, says in (((tmp_path,), "no log-0.hours.jsonl there"),
                        ((out, "--steps", 9), "--steps")):
        refused = command("--report", *words)
        assert refused.returncode == 2 and says in refused.stderr
        assert refused.stderr.count("\n") == 1


@pytest.mark.full
def test_two_processes_that_are_killed_twice(tmp_path, text):
    """Time between starts that is lost; steps that are made again and not counted, or counted
    without having been made."""
    out, began = tmp_path / "run", time.time()
    words = (*SMALL, "--mesh", "data=2", "--steps", 90, "--save_every", 20, "--data", text,
             "--out", out)
    file, expected = tmp_path / "every_step.py", 0
    file.write_text(EVERY_STEP)
    for step in (30, 55):
        runs = hosts(2, *words, file=file)
        until_step(step, out, *runs)
        for run in runs:
            run.kill()
            run.wait()
        rows = [json.loads(line) for line in open(out / "metrics.jsonl")]
        made = max(row["step"] for row in rows)
        saved = max(int(path.name) for path in (out / "checkpoints").iterdir()
                    if path.name.isdecimal())
        expected += made - saved
    all_succeed(hosts(2, *words, file=file))
    ended = time.time()
    found = spent.accounts_of(str(out))
    assert len(found) == 2
    for process, one in enumerate(found):
        notes = spent._starts(out / f"log-{process}.hours.jsonl")
        assert one.wall == pytest.approx(notes[-1][-1]["now"] - notes[0][0]["from"], rel=0.01)
        assert began <= notes[0][0]["from"] and notes[-1][-1]["now"] <= ended
        assert (one.starts, one.steps) == (3, 90) and abs(one.again - expected) <= 2
        assert one.seconds["again"] > 0 and one.seconds["stopped"] > 0
    assert sum(one.wall for one in found) / 2 > 0.8 * (ended - began)
