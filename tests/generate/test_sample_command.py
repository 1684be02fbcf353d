"""The command sample.py: prompts from all inputs, text printed while it is generated, a
conversation at a real terminal, scores, and refusals.

The engine is tested in test_sample.py. Here a fake model takes its place, whose answers are given
by the test.
"""

import contextlib
import json
import os
import pty
import select
import subprocess
import sys
import time

import pytest

import sample
from tests.common import command, ends, hosts, published_files, refused, started
from tests.helpers import ROOT, config_of, learn, make, needed
from zigzag.commands import sampling
from zigzag.core.errors import ConfigError
from zigzag.disk.tokenizers import Bytes, TokenizerJson
from zigzag.generate.answers import Answer
from zigzag.generate.prompts import Prompt, step_of
from zigzag.generate.rows import context_of
from zigzag.parallel.network import network_of

chat, llama = needed("tools.chat"), needed("published.llama")

CONTEXT = 40


def write_ids(text, tokenizer=Bytes()):
    return tokenizer.encode(text).tolist()


class FakeModel:
    """A stand-in for a model and the engine. It answers each prompt with the next of the `answers`,
    pieces of ids, after a pause."""

    def __init__(self, patch, answers, tokenizer=None, pause=0.0, **config):
        self.answers, self.pause, self.seen = list(answers), pause, []
        config = config_of(**{"vocab_size": 257, "seq_len": CONTEXT, **config})
        patch.setattr(sampling, "load_model", lambda _: ({}, config, tokenizer or Bytes()))
        patch.setattr(sample, "for_decoding", lambda params, config: params)
        patch.setattr(sample, "stream", self.stream)

    def stream(self, params, prompts, config, *_, **choices):
        self.seen.append((prompts, choices))
        rows = [self.answers.pop(0) if self.answers else "" for _ in prompts]
        rows = [write_ids(row) if isinstance(row, str) else row for row in rows]
        for at in range(max(map(len, rows))):
            time.sleep(self.pause)
            yield [(row[at:at + 1], [-1.0]) for row in rows]


def sampled(capsys, *words):
    """The output of a command line."""
    sample.main([str(word) for word in words])
    return capsys.readouterr().out


def given_input(monkeypatch, raw):
    """Set standard input to these bytes; it is not a terminal."""
    reader, writer = os.pipe()
    os.write(writer, raw)
    os.close(writer)
    monkeypatch.setattr(sys, "stdin", open(reader))


# -------------------------------------------------------------------------------------------
# Text while it is generated

def grown(tokenizer, prompt, ids, stop=(), tokens=10**6):
    """The shown text of an answer after each id."""
    answer = Answer(tokenizer.decode, prompt, stop, tokens)
    shown = [answer.shown()]
    for new in [*[[i] for i in ids], []]:
        answer.add((new, [0.0] * len(new)))
        shown.append(answer.shown())
    for before, after in zip(shown, shown[1:]):
        assert after.startswith(before), "what a person has seen cannot be taken back"
    return shown, answer


def test_characters_are_never_split():
    """Half of a character on the screen, and the other half lost; text that is held back for
    ever."""
    text = "naïve 😀👍🏽 – 漢字"
    shown, answer = grown(Bytes(), [256, 65], write_ids(text))
    assert answer.text == text and answer.reason == "stop"
    assert not any("\ufffd" in part for part in shown)
    assert len(set(shown)) > len(text) - 2, "and not only at the end"
    shown, answer = grown(Bytes(), [256], [*write_ids("a"), 0xE2, 0x82])
    assert (shown[-2], answer.text) == ("a", "a\ufffd"), "what stays incomplete is shown at the end"
    assert grown(Bytes(), [256], [0xFF, *write_ids("b" * 40)])[1].text == "\ufffd" + "b" * 40


@pytest.mark.parametrize("text", ["The quick – brown  fox 😀 jumps\n\n  ", "naïve漢字 " * 9])
def test_grown_text_is_the_text(tmp_path, text):
    """Spaces that are lost, or text that is repeated, where the window over the last ids begins."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text/a").write_text("the quick brown fox jumps over the lazy dog " * 9)
    folder = published_files(tmp_path / "model", tmp_path / "text")
    for tokenizer in (Bytes(), TokenizerJson(folder / "tokenizer.json")):
        prompt, ids = tokenizer.prompt("Once upon"), tokenizer.encode(text).tolist() * 3
        whole = tokenizer.decode([*prompt, *ids])[len(tokenizer.decode(prompt)):]
        assert grown(tokenizer, prompt, ids)[1].text == whole


def test_text_ends_before_a_stop():
    """A stop text that is noticed only when it is on the screen, missed between two pieces, or
    found in the prompt."""
    shown, answer = grown(Bytes(), write_ids("##"), write_ids("# a #b ###c"), ["###", "zz"])
    assert (answer.text, answer.reason) == ("# a #b ", "stop")
    assert shown[-1] == "# a #b " and not any(part.endswith("##") for part in shown)
    assert len(answer.ids) == len("# a #b ###"), "what comes later is not counted"
    shown, answer = grown(Bytes(), [], write_ids("a##"), ["###"], tokens=3)
    assert (answer.text, answer.reason) == ("a##", "length"), "it was no stop after all"


def test_answers_come_in_order(capsys, monkeypatch):
    """Two texts mixed, a short one that waits for ever, or a missing last batch."""
    FakeModel(monkeypatch, ["bcdef", "", "yz"])
    given_input(monkeypatch, b"a\n\n123\nx\n")
    assert sampled(capsys, "--batch", 2) == "abcdef\n123\nxyz\n"


# -------------------------------------------------------------------------------------------
# Prompts and output

@pytest.mark.parametrize("raw, want", [
    (b"one\r\n\n two\x0c\n", ["one", " two\x0c"]),
    (b'\xef\xbb\xbf{"prompt": "one\\ntwo", "n": 1}\n\n{"prompt": "\xc3\xa4"}', ["one\ntwo", "ä"]),
    (b'{text}\nlast', ['{text}', "last"]), (b"", [""])])
def test_prompts_are_read(capsys, monkeypatch, tmp_path, raw, want):
    """A prompt that is cut at a character that only str.splitlines treats as a line end; JSON that
    is continued as text; an empty input."""
    fake = FakeModel(monkeypatch, [])
    given_input(monkeypatch, raw)
    sampled(capsys)
    assert fake.seen[-1][0] == [Bytes().prompt(text) for text in want]
    if raw:
        (tmp_path / "p").write_bytes(raw)
        sampled(capsys, "--prompts", tmp_path / "p")
        assert fake.seen[-1][0] == [Bytes().prompt(text) for text in want]
    sampled(capsys, "--prompt", "")     # (what is given is not asked for)
    assert fake.seen[-1][0] == [[256]]


def test_a_json_object_for_each_answer(capsys, monkeypatch):
    """A wrong number of ids in the JSON, or a wrong reason."""
    fake = FakeModel(monkeypatch, ["é#x", "abc", "abcd"])
    given_input(monkeypatch, b"1\n2\n3")
    lines = sampled(capsys, "--json", "--tokens", 4, "--stop", "#", "--seed", 5).splitlines()
    assert list(map(json.loads, lines)) == [
        {"prompt": "1", "text": "é", "tokens": 3, "stopped": "stop"},
        {"prompt": "2", "text": "abc", "tokens": 3, "stopped": "stop"},
        {"prompt": "3", "text": "abcd", "tokens": 4, "stopped": "length"}]
    assert fake.seen[0][1]["stop"] == (256,) and fake.seen[0][1]["seed"] == [5] * 3


def test_a_prompt_that_is_there_twice_has_two_answers(capsys, monkeypatch):
    """The same text for equal lines, although a person wants several; other texts with another
    --batch."""
    fake = FakeModel(monkeypatch, [])
    for batch in (1, 2, 4):
        given_input(monkeypatch, b"a\nb\na\na")
        sampled(capsys, "--seed", 7, "--batch", batch)
        seeds = [seed for _, choices in fake.seen for seed in choices["seed"]]
        assert seeds == [7, 7, 8, 9]
        fake.seen.clear()


def test_a_prompt_near_the_end_of_the_positions_cuts_no_other(capsys, monkeypatch):
    """An answer that is silently cut because another prompt of the batch is long."""
    fake = FakeModel(monkeypatch, ["a" * 20, "b" * 20, "c" * 20, "d" * 20], positions="learned",
                     position_rows=CONTEXT)
    given_input(monkeypatch, b"1\n2\n" + b"x" * 36 + b"\n3\n")
    records = map(json.loads, sampled(capsys, "--json", "--tokens", 9, "--stop_at_context"
                                      ).splitlines())
    assert [(r["tokens"], r["stopped"]) for r in records] == [(9, "length")] * 4
    assert all(options["stop_at_context"] for _, options in fake.seen)
    given_input(monkeypatch, b"1\n2\n" + b"x" * 36 + b"\n3\n")
    fake.seen.clear()
    beams = []

    def beam_search(params, prompts, c, count, tokens, *_):
        beams.append((len(prompts), tokens))
        return [[([1], -1.0)] for _ in prompts]

    monkeypatch.setattr(sample, "beam_search", beam_search)
    sampled(capsys, "--beams", 2, "--tokens", 9)
    assert beams == [(2, 9), (1, 4), (1, 9)]


def test_log_probabilities_are_of_the_ids_that_are_shown(capsys, monkeypatch):
    """Log-probabilities of ids after a stop, or in another order than the ids."""
    FakeModel(monkeypatch, [])
    monkeypatch.setattr(sample, "stream", lambda *_, **options: iter([[
        (write_ids("ab#c"), [-1.0, -2.0, -0.5, -9.0])]]))
    record = json.loads(sampled(capsys, "--json", "--logprobs", "--prompt", "x", "--stop", "#"))
    assert record == {"prompt": "x", "text": "ab", "tokens": 3, "stopped": "stop",
                      "ids": [97, 98, 35], "logprobs": [-1.0, -2.0, -0.5], "logprob": -3.5}


def test_beams_are_shown_with_their_scores(capsys, monkeypatch):
    """Beams of one prompt printed for another."""
    FakeModel(monkeypatch, [])

    def beams(params, prompts, *_, **__):
        return [[(write_ids(f"{p[-1]}"), -1.5), (write_ids("zz"), -2.0)] for p in prompts]

    monkeypatch.setattr(sample, "beam_search", beams)
    given_input(monkeypatch, b"a\nb")
    assert sampled(capsys, "--beams", 2).splitlines() == [
        "   -1.500  a97", "   -2.000  azz", "   -1.500  b98", "   -2.000  bzz"]
    record = json.loads(sampled(capsys, "--beams", 2, "--json", "--prompt", "c").splitlines()[0])
    assert record == {"prompt": "c", "text": "99", "tokens": 2, "stopped": "stop", "score": -1.5}


def test_texts_are_scored(capsys, monkeypatch, tmp_path):
    """A total perplexity that is the mean of perplexities; each line of running text scored without
    the lines before it."""
    FakeModel(monkeypatch, [])
    seen = []

    def score(params, rows, config, batch):
        seen.append(rows)
        return [(-2.0 * (len(row) - 1) - len(rows), len(row) - 1) for row in rows]

    monkeypatch.setattr(sample, "score", score)
    (tmp_path / "t").write_text('ab\n{"text": "cde"}\n\nf\n')     # (not objects: "ab" is first)
    by_line = ["--score", tmp_path / "t", "--by", "line"]
    rows = [json.loads(line) for line in sampled(capsys, *by_line, "--json", "--batch", 2
                                                 ).splitlines()]
    assert [len(rows) for rows in seen] == [2, 1]
    assert [row["tokens"] for row in rows] == [2, 15, 1, 18]
    assert rows[0] == {"text": "ab", "logprob": -6.0, "tokens": 2,
                       "perplexity": pytest.approx(2.718281828**3)}
    assert rows[-1]["logprob"] == -41 and rows[-1]["perplexity"] == pytest.approx(9.75, abs=0.01)
    assert "all 3 texts" in sampled(capsys, *by_line).splitlines()[-1]
    (tmp_path / "t").write_text("ab\n\ncd\n")
    one, total = map(json.loads, sampled(capsys, *by_line[:2], "--json").splitlines())
    assert one["text"] == "ab\n\ncd\n" and one["tokens"] == 7 and total["texts"] == 1
    (tmp_path / "t").write_text('{"text": "a\\nb"}\n{"text": "c"}\n')
    assert [json.loads(line).get("text") for line in sampled(
        capsys, *by_line[:2], "--json").splitlines()] == ["a\nb", "c", None]


# -------------------------------------------------------------------------------------------
# Refusals

def test_bad_flags_and_files_are_one_line(capsys, monkeypatch, tmp_path):
    """A traceback; a refusal only after minutes of reading a model; a flag that is silently
    ignored."""
    def assert_refused(*cases):
        for said, *words in cases:
            assert said in refused(capsys, *words, main=sample.main)

    files = {"latin": b"ok\n\xe4\xf6", "a.jsonl": b'{"prompt": "x"}\nnot so\n',
             "b.jsonl": b'{"promt": "x"}', "empty": b"\n\n"}
    for name, raw in files.items():
        (tmp_path / name).write_bytes(raw)
    some = tmp_path / "a.jsonl"
    assert_refused(
        ("--prompts nowhere: No such file", "--prompts", "nowhere"),
        ("latin: not UTF-8", "--score", tmp_path / "latin"),
        ("no run there", "--run", tmp_path / "none", "--prompts", some),
        ("min_p=1.5", "--min_p", 1.5), ("expected text", "--stop", ""),
        ("--system works only in a conversation", "--system", "x", "--prompt", "a"),
        ("--json", "--logprobs", "--prompt", "a"), ("--batch 0", "--batch", 0),
        ("--shards 0: expected at least 1", "--shards", 0),
        ("--top_k: no effect with --beams", "--beams", 2, "--top_k", 5),
        ("give --beams too", "--length_penalty", 2),
        ("--tokens: no effect with --score; leave it out", "--score", some, "--tokens", 3),
        ("--tokens: no effect with --choices; leave it out", "--choices", some, "--tokens", 3),
        ("--tokens: no effect with --bench; leave it out", "--bench", "true", "--tokens", 3))
    with pytest.raises(ConfigError, match="expected the number of a step"):
        step_of("out", "9" * 5000)
    FakeModel(monkeypatch, [])
    assert_refused(
        ("a.jsonl line 2: not JSON", "--prompts", some),
        ("no field 'prompt'", "--prompts", tmp_path / "b.jsonl"),
        ("no text in it", "--prompts", tmp_path / "empty"),
        ("need a chat template", "--chat", "--prompt", "one"),
        ("--by word: expected line", "--by", "word", "--score", some),
        ("this model reads text", "--source", "nowhere"))
    FakeModel(monkeypatch, [], encoder_layers=1)
    assert_refused(("a prompt is empty", "--prompt", " "))


def test_the_context_is_that_of_the_positions():
    """A context shorter than the published model's; positions that do not exist."""
    def context(c):
        c = getattr(c, "network", c)
        return context_of(network_of(c), c)

    def scaled(kind):
        return json.dumps({"rope_type": kind, "factor": 4.0,
                           "original_max_position_embeddings": 16})

    learned = make(seq_len=16, positions="learned", position_rows=18, position_offset=2)
    assert context(learned) == 16
    assert context(make(seq_len=16, rope_scaling=scaled("dynamic"))) == 64
    for kind in "dynamic", "linear":
        assert context(make(seq_len=100, rope_scaling=scaled(kind))) == 100
    of_learned = sampling.Model(None, {}, learned.network, Bytes())
    assert [of_learned.room(Prompt("", [1] * n)) for n in (17, 16, 15, 1)] == [1, 1, 2, 16]
    record = json.dumps({"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 1,
                            "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 9,
                            "max_position_embeddings": 64})
    assert context(llama.whole_context(make(seq_len=16, published=record).network)) == 64


# -------------------------------------------------------------------------------------------
# A conversation

TEMPLATE = ("{% for m in messages %}{% if m.content == 'fail' %}{{ raise_exception('no') }}"
            "{% endif %}{{ m.role[0] + ':' + m.content + ';' }}{% endfor %}"
            "{% if add_generation_prompt %}a:{% endif %}")


class WithFolder(Bytes):
    """Bytes, and a folder with a chat template."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "chat_template.jinja").write_text(TEMPLATE)

    def with_places(self, text):
        return self.encode(text), None, None        # (of ids from which text they are: not asked)


def test_a_conversation_has_a_memory(tmp_path):
    """Turns that the model does not see, or sees twice; a system message that is forgotten; a
    conversation that ends when the context is full."""
    said, messages = [], [{"role": "system", "content": "S"}, chat.user("one")]

    def ask():
        return bytes(chat.fitting_ids(WithFolder(tmp_path), messages, CONTEXT, said.append))

    assert ask() == ask() == b"s:S;u:one;a:"
    with pytest.raises(ConfigError, match="surrogates not allowed"):
        chat.chat_prompt(tmp_path, [{"role": "user", "content": "\ud800"}])
    messages += [{"role": "assistant", "content": "1"}, chat.user("2"),
                 {"role": "assistant", "content": "3"}, chat.user("two")]
    assert ask() == b"s:S;u:one;a:1;u:2;a:3;u:two;a:" and not said
    messages[-1] = chat.user("x" * 8)
    assert ask() == b"s:S;u:2;a:3;u:xxxxxxxx;a:"
    assert said == [f"this model's context is {CONTEXT} tokens: it forgets the oldest question and "
                    f"answer"]
    messages[-1] = chat.user("x" * CONTEXT)
    assert ask() == b"s:S;u:" + b"x" * CONTEXT + b";a:"
    del messages[0]
    assert ask() == b"u:" + b"x" * CONTEXT + b";a:"


def test_chat_takes_prompts_as_messages(capsys, monkeypatch, tmp_path):
    """A prompt that is continued, not answered; one conversation that all prompts share; a question
    in the answer; equal prompts with equal answers; a flag that is ignored."""
    fake = FakeModel(monkeypatch, ["abc", "d", "e", "f", "g"], WithFolder(tmp_path))
    assert sampled(capsys, "--chat", "--prompt", "one") == "abc\n"
    (tmp_path / "p").write_text("one\ntwo\none\n")
    out = sampled(capsys, "--chat", "--prompts", tmp_path / "p", "--system", "S", "--json")
    assert [[json.loads(line)[name] for name in ("prompt", "text")] for line in out.splitlines()
            ] == [["one", "d"], ["two", "e"], ["one", "f"]]
    given_input(monkeypatch, b"two\n")
    assert sampled(capsys, "--chat") == "g\n"
    rows = [[bytes(ids).decode() for ids in prompts] for prompts, _ in fake.seen]
    assert rows == [["u:one;a:"], [f"s:S;u:{text};a:" for text in ("one", "two", "one")],
                    ["u:two;a:"]]
    assert fake.seen[1][1]["seed"] == [0, 0, 1]


def test_what_was_said_before_ctrl_c_is_remembered(capsys, monkeypatch, tmp_path):
    """An interrupted answer that is missing from the conversation, or that ends it."""
    fake, lines = FakeModel(monkeypatch, [], WithFolder(tmp_path)), ["one", " ", "two"]

    def stream(_, prompts, *__, **___):
        fake.seen.append(bytes(prompts[0]).decode())
        yield [([97], [-1.0])]
        if len(fake.seen) == 1:
            raise KeyboardInterrupt

    def typed(_):
        if lines:
            return lines.pop(0)
        raise EOFError

    monkeypatch.setattr(sample, "stream", stream)
    monkeypatch.setattr(sampling, "is_conversation", lambda: True)
    monkeypatch.setattr("builtins.input", typed)
    assert sampled(capsys, "--system", "S").splitlines()[1:] == ["a", "a", ""]
    assert fake.seen == ["s:S;u:one;a:", "s:S;u:one;a:a;u:two;a:"]


# A model that answers each line with 40 letters, one in a tenth of a second, at a terminal of its
# own. Its first answer has a character of four bytes.
TALKS = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)    # (tests in the background ignore it)
if os.isatty(0):
    os.open(os.ttyname(0), os.O_RDWR)       # whoever leads a session has it then: Ctrl-C comes here
from pathlib import Path
import pytest, sample
from zigzag.core.flags import run_main
from tests.generate.test_sample_command import FakeModel, WithFolder
patch = pytest.MonkeyPatch()
folder = sys.argv.pop(1)
FakeModel(patch, ["ok \\N{GRINNING FACE}\\x1b[2J", *["abcdefgh" * 5] * 9],
          WithFolder(Path(folder)) if folder else None, 0.1)
run_main(sample.main)
"""


class Terminal:
    """A process at a terminal of its own, which ends with the block."""

    def __init__(self, *words):
        mine, its = pty.openpty()
        self.mine, self.text = mine, ""
        self.run = subprocess.Popen(
            [sys.executable, "-c", TALKS, *map(str, words)], cwd=ROOT, stdin=its, stdout=its,
            stderr=its, start_new_session=True,
            env={**os.environ, "JAX_PLATFORMS": "cpu", "TERM": "dumb"})
        os.close(its)
        self.raw = b""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.run.kill()

    def type(self, text):
        os.write(self.mine, text.encode())

    def until(self, text, within=60):
        """Wait for this text. Returns the output before it, since the last wait."""
        end = time.monotonic() + within
        while text.encode() not in self.raw:
            ready = select.select([self.mine], [], [], max(0, end - time.monotonic()))[0]
            assert ready, f"no {text!r} in {self.raw!r}"
            self.raw += os.read(self.mine, 1000)
        before, self.raw = self.raw.split(text.encode(), 1)
        return before.decode()

    def end(self):
        """(the exit status, the remaining output)."""
        with contextlib.suppress(OSError):      # (that is how its end shows)
            while more := os.read(self.mine, 1000):
                self.raw += more
        os.close(self.mine)
        return self.run.wait(20), self.raw.decode()


@pytest.mark.slow
def test_a_conversation_at_a_terminal(tmp_path):
    """Ctrl-C that ends the program; text that is printed only when it is complete; control
    characters that clear the screen; an answer that is not in the conversation."""
    with Terminal(tmp_path) as person:
        assert "Talk to the model: Ctrl-C stops an answer, Ctrl-D ends" in person.until("> ")
        person.type("hi\n")
        assert person.until("> ").split("\r\n")[1:] == ["ok 😀\ufffd[2J", ""]
        person.type("more\n")
        person.until("abcdefgh")            # now, in the middle of the answer
        person.type("\x03")
        stopped = person.until("> ")
        assert "abcdefghabcdefgh" not in stopped
        person.type("y" * CONTEXT + "\n")
        assert "forgets the oldest question" in person.until("> ")
        person.type("fail\n")
        status, rest = person.end()
        assert status == 2 and "error: " in rest and "Traceback" not in rest


@pytest.mark.full
def test_lines_are_continued_at_a_terminal():
    """A model without a template that cannot be used at a terminal; an error after Ctrl-D."""
    with Terminal("") as person:
        assert "The model continues each line" in person.until("> ")
        person.type("1 2\n")
        assert person.until("> ").split("\r\n")[1:] == ["1 2ok 😀\ufffd[2J", ""]
        person.type("\x04")
        assert person.end()[0] == 0


@pytest.mark.full
def test_answers_grow_at_a_terminal(tmp_path):
    """An answer that is printed only when it is complete; a second answer without the text that was
    generated while the first was shown."""
    (tmp_path / "prompts").write_text("1 2\n3 4\n")
    with Terminal("", "--prompts", tmp_path / "prompts") as person:
        assert person.until("1 2ok") == ""
        assert person.until("3 4abcdefghabcdefgh") == " 😀\ufffd[2J\r\n"
        assert b"abcdefgh" not in person.raw, "40 letters take four seconds"
        assert person.end() == (0, "abcdefgh" * 3 + "\r\n")


@pytest.mark.slow
def test_ctrl_c_ends_a_single_answer():
    """Ctrl-C that prints a traceback, or advice about checkpoints."""
    with Terminal("", "--prompt", "1 2") as person:
        person.until("1 2ok")
        person.type("\x03")
        status, rest = person.end()
        assert status == 130 and "Traceback" not in rest and "checkpoint" not in rest


@pytest.mark.full
def test_the_command_runs_in_several_processes(tmp_path):
    """Two answers, none, or lines of a library among them; a wait for ever on standard input."""
    run, file = tmp_path / "run", tmp_path / "prompts.txt"
    learn(make(vocab_size=257, out=str(run), steps=3, save_every=0, dtype=""), tokenizer=Bytes())
    file.write_text("ab\nabca\na\n")
    words = ("--run", run, "--prompts", file, "--mesh", "data=2,tensor=2", "--tokens", 6,
             "--temperature", 0, "--json")
    one = command(*words, file="sample.py")
    assert one.returncode == 0, one.stderr
    (status, out, error), (other, nothing, _) = ends(hosts(2, *words, file="sample.py"))
    assert status == other == 0 and not nothing, error
    assert out == one.stdout and out.count("\n") == 3
    run = started("--run", run, "--coordinator", "127.0.0.1:1", "--processes", 2,
                  "--process_id", 0, file="sample.py")
    assert "cannot share one standard input" in run.communicate()[1]


@pytest.mark.full
def test_an_encoding_that_lacks_a_character():
    """A traceback, or JSON that cannot be read."""
    run = subprocess.run(
        ["bash", "-c", '"$@"; "$@" --json', "bash", sys.executable, "-c", TALKS, "", "--prompt",
         "é"], cwd=ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONIOENCODING": "ascii"},
        capture_output=True)
    assert run.returncode == 0, run.stderr
    text, record = run.stdout.splitlines()
    assert text.startswith(rb"\xe9ok \U0001f600") and json.loads(record)["text"].startswith("ok 😀")


@pytest.mark.full
def test_a_pipe_that_closes_early_is_one_line():
    """A traceback after `| head -1`."""
    run = subprocess.Popen(
        [sys.executable, "-c", TALKS, "", "--batch", "1"], cwd=ROOT, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "JAX_PLATFORMS": "cpu"})
    run.stdin.write(b"1\n2\n3\n")
    run.stdin.close()
    assert run.stdout.readline() == "1ok 😀\x1b[2J\n".encode(), "no terminal: as it is"
    run.stdout.close()
    assert run.wait(60) == 1
    assert run.stderr.read() == (
        b"error: the reader closed the output before this command finished\n")
