"""Conversations and completions: the ids are transformers', and only the answers are learned."""

import contextlib
import dataclasses
import json

import jax
import numpy as np
import pytest

import data
import sample
from tests.common import data_py, documents_of, full, go, json_lines, peer, prepared, refused
from tests.helpers import TINY, learn, run_of
from tools import chat, chats
from zigzag.commands import text as text_task
from zigzag.core.errors import ConfigError
from zigzag.disk.corpus import Corpus, Sources
from zigzag.disk.reading import Options
from zigzag.disk.tokenizers import tokenizer_at

# With and without marks around what the assistant wrote.
MARKED = """{% for m in messages %}<{{ m.role }}>
{%- if m.role == 'assistant' -%}
{% generation %}{{ m.content | trim }}{{ eos_token }}{% endgeneration %}
{%- else %}{{ m.content | trim }}{{ eos_token }}{% endif %}
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""
PLAIN = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
CHATS = [[{"role": "user", "content": f"{i} and {i + 1}?"},
          {"role": "assistant", "content": f"  {2 * i + 1}, naïve 日本 🙂 "},
          {"role": "user", "content": "Thanks"},
          {"role": "assistant", "content": "Bye"}][:2 + i % 3] for i in range(40)]


LONG = [{**CHATS[0][0], "content": "so " * 200}, CHATS[0][1]]


@pytest.fixture
def folder(folder):
    """A tokenizer with a chat template that marks the answers."""
    (folder / "chat_template.jinja").write_text(MARKED)
    return folder


@pytest.fixture
def pieces(tmp_path, text):
    """A folder with a tokenizer.model alone, and the template."""
    folder = prepared(text, tmp_path / "tokens", 300).folder
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    (folder / "chat_template.jinja").write_text(MARKED)
    return folder


def write_chats(path, rows):
    return json_lines(path, *({"messages": row} for row in rows))


def corpus_of(out, rows, folder):
    """Conversations as data.py encodes them, into `out`."""
    return prepared(write_chats(out.with_suffix(".jsonl"), rows), out,
                    tokenizer=tokenizer_at(folder))


def encoded(folder, *messages, **more):
    """(ids, which are learned) of a conversation."""
    return chats.encode_chat({"messages": messages, **more}, chats.Template(folder),
                             tokenizer_at(folder))


def config_on(corpus):
    return run_of(**{**TINY, "vocab_size": 300, "seq_len": 64, "layers": 1, "steps": 1,
                     "sample_temperature": 0.0, "data": (str(corpus.folder),)})


@pytest.mark.slow
def test_ids_and_answers_are_those_of_transformers(folder, tmp_path):
    """Answers that begin or end one token off; a template whose blanks differ; conversations in the
    loss that the model should only read."""
    transformers = peer("transformers")
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>", eos_token="</s>",
        chat_template=MARKED)
    want = [theirs.apply_chat_template(row, return_dict=True, return_assistant_tokens_mask=True)
            for row in CHATS]
    want = sorted((w["input_ids"], w["assistant_masks"]) for w in want)
    assert sorted(documents_of(corpus_of(tmp_path / "marked", CHATS, folder))) == want
    (folder / "chat_template.jinja").write_text(PLAIN)
    corpus = corpus_of(tmp_path / "plain", CHATS, folder)
    got = sorted(documents_of(corpus))
    assert [ids for ids, _ in got] == [ids for ids, _ in want]
    # (What an answer adds to the text has the line break after it, too.)
    assert all(np.greater_equal(a, b).all() and 0 <= sum(a) - sum(b) <= 2 * len(CHATS[0])
               for (_, a), (_, b) in zip(got, want))
    record = corpus.record["train"]
    assert record["learned"] == sum(
        sum(learned) for _, learned in documents_of(corpus)[:record["documents"]])


def test_a_template_that_rewrites_earlier_turns_is_refused(folder):
    """A mask that is shifted, because the text of a conversation is not its turns one after the
    other."""
    peer("jinja2")
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ loop.length if loop.first else '' }}{{ m.content }}"
        "{% endfor %}")
    template = chats.Template(folder)
    with pytest.raises(ConfigError, match="one answer, its last message"):
        template.learned(CHATS[0])


def test_a_completion_is_learned_and_its_prompt_is_not(folder, tmp_path):
    """A prompt that is learned, or a completion without its end."""
    path = json_lines(tmp_path / "pairs.jsonl", *(
        {"prompt": f"{i} and 1 are", "completion": f" {i + 1}"} for i in range(30)))
    texts, tokenizer = [], tokenizer_at(folder)
    for ids, learned in documents_of(prepared(path, tmp_path / "out", tokenizer=tokenizer)):
        at = learned.index(1)
        assert learned == [0] * at + [1] * (len(ids) - at) and ids[-1] == tokenizer.ends[0]
        texts.append((tokenizer.decode(ids[:at]), tokenizer.decode(ids[at:])))
    assert sorted(texts) == sorted((f"{i} and 1 are", f" {i + 1}") for i in range(30))


def test_what_is_no_conversation_is_counted(folder, tmp_path, capsys):
    """A role that the template silently leaves out; a conversation without an answer, which only
    costs time."""
    peer("jinja2")
    bad = [[{"role": "bot", "content": "x"}], [{"role": "user", "content": "x"}],
           [{"role": "user", "content": 3}, {"role": "assistant", "content": "x"}], []]
    path = write_chats(tmp_path / "chats.jsonl", CHATS[:20] + bad)
    data_py(path, "--tokenizer", folder, "--out", tmp_path / "out")
    said = capsys.readouterr().out
    assert "skipped  4 lines without messages; the first is" in said and "the role 'bot'" in said
    assert "tokens are answers" in said
    for name, more, says in (("chats", [], "need the chat template"),
                             ("chats", ["--tokenizer", folder, "--strict"], "(--strict)")):
        assert says in refused(capsys, tmp_path / f"{name}.jsonl", "--out", tmp_path / "no", *more,
                               main=data.main)


def test_what_is_no_message_is_skipped(folder):
    """Empty turns that are learned for a field of another name; Python's own notation of a list."""
    tools = [{"type": "function", "function": {"name": "add"}}]
    call = {"role": "assistant", "tool_calls": tools}
    question, answer = CHATS[0][:2]
    for messages, more, says in (
            ([{"role": "user", "value": "x"}, answer], {}, "content is not text"),
            ([question, {"role": "assistant"}], {}, "content is not text"),
            ([question, {**call, "content": [{"text": "x"}]}], {}, "content is not text"),
            ([question, answer], {"tools": "[1"}, "tools are not"),
            ([question, answer], {"tools": ["add"]}, "tools are not"),
            ([question, call, answer], {"tools": json.dumps(tools)}, ""),
            ([question, answer], {"tools": None}, "")):
        with pytest.raises(ConfigError, match=says) if says else contextlib.nullcontext():
            chats.check_record({"messages": messages}, "messages")
            encoded(folder, *messages, **more)
    (folder / "chat_template.jinja").write_text("{{ tools[0].function.name }} " + MARKED)
    as_list, as_text = (encoded(folder, question, answer, tools=x)[0].tolist()
                        for x in (tools, json.dumps(tools)))
    assert as_list == as_text and tokenizer_at(folder).spelled(as_list).startswith("add")


def test_answers_that_no_row_reaches_are_told(folder, tmp_path, capsys):
    """A run that learns nothing, with a loss of 0."""
    corpus = corpus_of(tmp_path / "long", [LONG] * 20, folder)
    begins = int(np.argmax(corpus.documents("train").weights))
    for length in (64, begins - 1):
        assert f"starts after {begins:,} tokens" in refused(
            capsys, "--data", tmp_path / "long", "--seq_len", length, "--out", tmp_path / "no")
    assert corpus.documents("train").unlearned(begins) == 0
    # (Ends of the tokens: the last conversation is a long one, or a short one.)
    for number, rows in enumerate(([*CHATS[:30], LONG], [LONG, *CHATS[:30]])):
        corpus = corpus_of(tmp_path / f"{number}", rows, folder)
        documents = corpus.documents("train")
        marks = [marks for _, marks in documents_of(corpus)[:len(documents)]]
        for length in (1, 5, 64, 300, len(marks[-1]) - 1, len(marks[-1])):
            assert documents.unlearned(length) == sum(
                len(m) > length and not any(m[1:length + 1]) for m in marks)


def test_a_held_out_loss_of_nothing_is_refused(folder, tmp_path):
    """A held-out loss of 0, of conversations whose answers no row reaches."""
    corpus = corpus_of(tmp_path / "out", [*CHATS[:20], LONG, LONG], folder)
    with pytest.raises(ConfigError, match="nothing to evaluate; .* a longer --seq_len"):
        text_task.task_of(config_on(corpus), Sources([corpus], [""]))


def test_a_preference_is_two_documents(folder, tmp_path, capsys):
    """A rejected answer that is learned like the chosen one; a prompt that counts as an answer; one
    of a pair that is held out."""
    question, answers = {"role": "user", "content": "Why?"}, [
        [{"role": "assistant", "content": word}] for word in ("Because.", "No.")]
    before = [question, {"role": "assistant", "content": "Hm"}, question]
    names, texts = ("chosen", "rejected"), ("Because.", "No.")
    system = [{"role": "system", "content": "Be short"}]

    def both(*begin):
        return {name: [*begin, *answer] for name, answer in zip(names, answers)}

    rows = [{"prompt": before, **both()}, {"prompt": "Why?", **both()},
            {"prompt": "Why?", **both(question)}, both(*before),
            {"prompt": system, **both(question)}, {"prompt": [*system, question], **both(question)},
            {"prompt": "Why? ", **dict(zip(names, texts))},
            {"prompt": "Why? ", **{n: "Why? " + t for n, t in zip(names, texts)}},
            {n: "Why? " + t for n, t in zip(names, texts)}]
    path, tokenizer = tmp_path / "dpo.jsonl", tokenizer_at(folder)
    template = chats.Template(folder)
    for number, (row, messages) in enumerate(zip(rows, (
            before, [question], [question], before, [*system, question], [*system, question],
            None, None, None), strict=True)):
        corpus = prepared(json_lines(path, row, row, row), tmp_path / f"{number}",
                          tokenizer=tokenizer)
        held_out = corpus.record["held_out"]["documents"]
        assert held_out in (0, 2) and corpus.record["documents"] == 6
        for at, (ids, learned) in enumerate(documents_of(corpus)):
            text = texts[at % 2]
            whole = "Why? " + text if messages is None else template.render(
                [*messages, {"role": "assistant", "content": text}])
            assert tokenizer.spelled(ids).replace("</s>", "").split() == whole.replace(
                "</s>", "").split()
            assert tokenizer.decode(np.array(ids)[np.array(learned) > 0]).strip() == text
    json_lines(path, rows[0], {**rows[6], "rejected": "Because."},
               {**rows[0], "prompt": [{"role": "bot"}]}, {**rows[0], "chosen": "x"},
               {**rows[2], "prompt": "What?"},
               {"chosen": before, "rejected": [*before, *answers[0]]})
    data_py(path, "--tokenizer", folder, "--out", tmp_path / "out")
    said = capsys.readouterr().out
    assert "skipped  4 lines without preference; the first is" in said and "are the same" in said
    assert "skipped  1 preference that cannot be encoded" in said and "adds no answer" in said
    assert "made     2 documents" in said
    assert Corpus(tmp_path / "out").record["train"]["documents"] == 2
    assert "which only python -m recipes.dpo" in refused(capsys, "--data", tmp_path / "out")
    assert "need the chat template" in refused(
        capsys, path, "--out", tmp_path / "no", "--tokenizer", "bytes", main=data.main)


@pytest.mark.parametrize("template", [
    MARKED, PLAIN,
    # One that marks only the last answer, and one that marks two parts of each.
    MARKED.replace("{% generation %}", "{% if loop.last %}{% generation %}").replace(
        "{{ eos_token }}{% endgeneration %}", "{{ eos_token }}{% endgeneration %}{% else %}"
        "{{ m.content | trim }}{{ eos_token }}{% endif %}"),
    MARKED.replace("{{ m.content | trim }}{{ eos_token }}{% endgen", "{{ m.content | trim }}"
                   "{% endgeneration %}{% generation %}{{ eos_token }}{% endgen"),
    # One that leaves the thoughts of earlier answers out, and marks nothing.
    PLAIN.replace("{{ m.content | trim }}", "{{ (m.content if loop.last else m.content.split("
                  "'</think>')[-1]) | trim }}")])
def test_what_a_preference_has_in_common_is_not_learned(folder, template):
    """Marks that are counted as answers: the common answer is learned, or nothing."""
    peer("jinja2")
    (folder / "chat_template.jinja").write_text(template)
    tokenizer = tokenizer_at(folder)
    before = [{"role": "user", "content": "Why?"},
              {"role": "assistant", "content": "<think>Hm</think>Hm"},
              {"role": "user", "content": "Well?"}]
    record = {"prompt": before, **{name: [{"role": "assistant", "content": text}] for name, text
                                   in (("chosen", "Because."), ("rejected", "No."))}}
    (ids, marks), _ = chats.encode_preference(record, chats.Template(folder), tokenizer)
    assert tokenizer.spelled(ids[marks].tolist()) == "Because.</s>"


@pytest.mark.parametrize("template", [MARKED, PLAIN])
def test_weights_of_conversations_are_those_of_their_answers(tmp_path, folder, template):
    """A question that is learned because its line has a weight; the weight of another answer."""
    peer("jinja2")
    (folder / "chat_template.jinja").write_text(template)
    turn = [chat.user("1 and 2?"), {"role": "assistant", "content": "3"},
            chat.user("Thanks"), {"role": "assistant", "content": "Bye"}]

    def made(name, **row):
        options = Options(weight_field="w" if name != "0" else "")
        return documents_of(prepared(
            json_lines(tmp_path / f"{name}.jsonl", *[row] * 20), tmp_path / name,
            tokenizer=tokenizer_at(folder), options=options))

    (_, plain), *_ = made("0", messages=turn)
    first = plain.index(1) + plain[plain.index(1):].index(0)        # where the first answer ends
    assert [w for _, w in made("1", messages=turn, w=0.5)] == [[x / 2 for x in plain]] * 20
    own = [*turn[:1], {**turn[1], "w": 0.25}, turn[2], {**turn[3], "w": None}]
    for name, more in ("2", {}), ("3", {"w": 2}):
        want = [x * (0.25 if i < first else 1) * more.get("w", 1) for i, x in enumerate(plain)]
        assert made(name, messages=own, **more)[0][1] == want, name
    for wrong, says in (
            ({"w": [1, 2]}, r"line 1: 'w' is \[1, 2\]; expected a number of 0 or more$"),
            ({"messages": [turn[0], {**turn[1], "w": -1}]}, "line 1: 'w' is -1")):
        with pytest.raises(ConfigError, match=says):
            made("wrong", **{"messages": turn, **wrong})
    pairs = made("4", prompt="1 and 2 are", completion=" 3", w=0.5)
    assert {*pairs[0][1]} == {0, 0.5} and pairs[0][1][-1] == 0.5


def test_every_byte_of_an_answer_is_learned(pieces):
    """The first bytes of a character without a piece, left out at the beginning of an answer."""
    peer("jinja2")
    tokenizer = tokenizer_at(pieces)
    ids, learned = encoded(pieces, chat.user("Why?"), {"role": "assistant", "content": "🙂日"})
    assert tokenizer.decode(ids[learned].tolist()) == "🙂日"
    _, begins, ends = tokenizer.with_places("a🙂日b")
    assert (begins < ends).all() and begins[0] == 0 and ends[-1] == 4


def test_a_chat_is_read_as_it_was_learned(pieces):
    """A special token that a template spells out: one id where it was learned, several in a chat
    (with a tokenizer that is only a tokenizer.model)."""
    peer("jinja2")
    tokenizer = tokenizer_at(pieces)
    ids = chat.chat_ids(tokenizer, [chat.user("Why?")])
    learned, _ = encoded(pieces, chat.user("Why?"), {"role": "assistant", "content": "Because."})
    end = ids.index(tokenizer.ends[0]) + 1      # (after it, a piece may end elsewhere)
    assert end > 4 and ids[:end] == learned[:end].tolist()


@pytest.mark.full
def test_a_run_shows_what_it_learns(folder, tmp_path, capsys):
    """A long fine-tuning with the loss on the wrong tokens, which nobody saw."""
    corpus = corpus_of(tmp_path / "out", CHATS, folder)
    shown = Sources([corpus], [""]).described(60)
    record = corpus.record["train"]
    assert f"{record['documents']} conversations, " in shown and "of them longer than 60" in shown
    assert "[[" in shown and "</s>]]" in shown and "tokens are answers" in shown
    go("--data", tmp_path / "out", "--layers", 1, "--d_model", 32, "--heads", 4, "--seq_len", 64,
       "--batch", 4, "--steps", 2, "--out", tmp_path / "run")
    said = capsys.readouterr().out
    assert "tokens are answers" in said
    assert said.endswith(f'--run {tmp_path / "run"} --chat --prompt "..."\n')
    assert "--pack documents" in refused(
        capsys, "--data", tmp_path / "out", "--pack", "stream", "--out", tmp_path / "no")
    assert (tmp_path / "run" / "chat_template.jinja").exists()


@pytest.mark.full
@pytest.mark.parametrize("mesh", ["", full("data=2,tensor=2")])
def test_an_evaluation_asks_a_held_out_question(folder, tmp_path, mesh):
    """A sample that begins in the middle of a conversation, goes on past the end of its answer into
    a turn that the model invents, or is another one on a mesh; questions of what was learned."""
    corpus = corpus_of(tmp_path / "out", CHATS, folder)
    tokenizer = corpus.tokenizer
    asked = {tokenizer.spelled(ids[:learned.index(1)]) for ids, learned in documents_of(corpus)
             [corpus.record["train"]["documents"]:]}
    assert all(text.startswith("<user>") and text.endswith("<assistant>") for text in asked)
    config = config_on(corpus)
    task = text_task.task_of(config, Sources([corpus], [""]))
    _, result = learn(config, mesh, **vars(task))
    shown = task.show(result.outputs)
    assert list(shown) == ["question", "answer"] and shown["question"] in asked
    begin = len(tokenizer.with_places(shown["question"])[0])
    question, new = result.outputs[0][:begin].tolist(), result.outputs[0][begin:].tolist()
    want, = sample.generate(jax.device_get(result.params), [question], config.network, len(new),
                            temperature=0)
    assert tokenizer.spelled(question) == shown["question"] and new == want
    said = tokenizer.encode("It is.").tolist()
    outputs = np.array([[*question, *said, *tokenizer.ends, *question]])
    assert task.show(outputs)["answer"] == "It is."
    # (One that is too long is cut on the left: half of the context is for the answer.)
    short = dataclasses.replace(config, network=dataclasses.replace(config.network, seq_len=32))
    task = text_task.task_of(short, Sources([corpus], [""]))
    outputs = task.predict(result.params, {"tokens": np.zeros((1, 32), np.int32)})
    assert outputs.shape == (1, 16 + 17) and begin > 16
    end = tokenizer.spelled(outputs[0, :16].tolist())
    assert any(text.endswith(end) and text != end for text in asked)
