"""learn/explain.py: a page that needs nothing else, whose figures are the program's."""

import json
import math
from html.parser import HTMLParser

import jax
import pytest

import train
from learn import explain
from tests.common import refused
from zigzag.commands import programs
from zigzag.parallel.network import network_of
from zigzag.run.continuing import record_of

FLAGS = "--layers 4 --d_model 64 --heads 4 --d_ff 128 --seq_len 32 --vocab_size 257 --batch 16"


class Page(HTMLParser):
    """What a reader, a keyboard and a screen reader meet on a page."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.ids, self.links, self.rows, self.text = [], [], [], [], [], ""
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.append((tag, attrs))
        self.ids += [attrs["id"]] if "id" in attrs else []
        self.links += [attrs["href"]] if "href" in attrs else []
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if {"td", "th"} & {*self.open}:
            self.rows[-1][-1] += data


def written(tmp_path, *flags):
    explain.main([str(tmp_path / "page.html"), *FLAGS.split(), *flags])
    text = (tmp_path / "page.html").read_text()
    return text, Page(text)


def write_run(folder, *flags):
    """A run as explain reads it, of FLAGS and these flags."""
    folder.mkdir()
    config = train.parse([*FLAGS.split(), *flags])
    (folder / "config.json").write_text(json.dumps(record_of(config)))
    return str(folder)


def test_a_page(tmp_path):
    """A weight's part or a collective's bytes that are not the program's; something that is loaded;
    a table without headings, a place that no key reaches."""
    text, page = written(tmp_path, "--mesh", "data=2,fsdp=2,tensor=2")
    program = programs.program_of(train.parse(
        ["--mesh", "data=2,fsdp=2,tensor=2", *FLAGS.split()]))
    for path, x in jax.tree.leaves_with_path(program.state["params"]):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        row, = (row for row in page.rows if row[0] == name)
        part = x.sharding.shard_shape(x.shape)
        assert row[1] == str(list(x.shape)) and row[3] == str(list(part))
        split = {a for entry in x.sharding.spec for a in
                 ((entry,) if isinstance(entry, str) else entry or ())}
        assert split == {axis for axis in program.mesh.shape if axis in row[2]}
    sent = explain.compiled(program.config).sent
    first = next(i for i, row in enumerate(page.rows) if row[-1] == "ratio") + 1
    rows = page.rows[first:first + len(sent)]
    assert [row[:4] for row in rows] == [
        [one.axis, one.kind, f"{one.count:,}", f"{one.bytes:,}"] for one in sent]
    assert all(0.98 < float(row[5]) < 1.02 for row in rows if row[5])
    total = sum(4 * math.prod(x.sharding.shard_shape(x.shape))
                for x in jax.tree.leaves(program.state["params"]))
    assert f"Each device stores {explain.human_bytes(total)} of weights" in page.text

    assert len(text) < 2e6 and "http" not in text
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in page.tags}
    assert all(link[1:] in page.ids for link in page.links) and len(page.links) == 4
    assert len({*page.ids}) == len(page.ids)
    for tag, attrs in page.tags:
        assert tag != "th" or attrs["scope"] in ("col", "row")
        assert "wide" not in attrs.get("class", "") or attrs["tabindex"] == "0"
    assert "prefers-color-scheme: dark" in text and 'lang="en"' in text


def test_a_page_about_a_run(tmp_path, capsys):
    """The default model in place of the run's; a flag that is ignored, or that the run was not made
    with; 1 devices."""
    run = write_run(tmp_path / "small", "--layers", "1", "--batch", "8", "--mesh", "tensor=8")
    explain.main([str(tmp_path / "page.html"), "--run", run, "--mesh", "data=2,fsdp=4",
                  "--layers", "1"])
    page = Page((tmp_path / "page.html").read_text())
    config = train.parse([*FLAGS.split(), "--layers", "1"])
    count, _ = network_of(config).parameters(config.network)
    assert f"{count:,} parameters on data=2 fsdp=4" in page.text
    assert "8 rows of 32 tokens" in page.text and f"; 8 devices; the step of the run {run}." in (
        page.text)
    for said, *words in ((f"--layers 2: --run {run} has layers 1; leave", "--layers", 2),
                         (f"--run {run} has model tiny; leave one out", "--model", "1.2b")):
        assert said in refused(capsys, tmp_path / "page.html", "--run", run, *words,
                               main=explain.main)


@pytest.mark.full
@pytest.mark.parametrize("mesh, idle", [("pipe=4,tensor=2", "43%"), ("pipe=4,seq=2", "64%")])
def test_a_page_with_a_pipeline(tmp_path, mesh, idle):
    """Another schedule's idle time; idle passes that a ring does not let a stage skip, and that the
    page leaves out."""
    text, _ = written(tmp_path, "--mesh", mesh, "--schedule", "1f1b", "--microbatches", "4")
    assert f"1f1b is idle for {idle} of the time" in text


def test_what_is_refused(tmp_path, capsys):
    for said, *words in (
            ("expected the file to write first", "--mesh", "data=8"),
            ("expected a run folder", "out.html", "--run"),
            ("reads no data", "out.html", "--data", "a.txt"),
            # (before minutes of compiling)
            ("a folder that exists", tmp_path), ("a folder that exists", tmp_path / "no/out.html")):
        assert said in refused(capsys, *words, main=explain.main)
    explain.main(["--help"])
    assert "python -m learn.explain out.html" in capsys.readouterr().out
