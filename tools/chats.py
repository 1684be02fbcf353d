"""Conversations: a published model's chat template turns messages into text, and the tokenizer
turns the text into ids. Only the answers' ids count in the loss.

    chat_template.jinja, or chat_template in tokenizer_config.json (one, or several by name)

    {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi."}]}
    {"prompt": "2 + 2 =", "completion": " 4"}
    {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"}     (each a text, or messages)

The model learns the text that the template marks with {% generation %}. If the template marks
nothing, the model learns the text that each assistant message adds. It also learns completions. A
preference is a pair of such texts; the model doesn't learn the part they share.

A template is a program from the model's folder. It runs in jinja2's sandbox, with the functions
that transformers provides. The sandbox doesn't limit time or memory.
"""

import contextlib
import datetime
import functools
import json
import os
import re
from pathlib import Path
from typing import Any, Sequence

import numpy as np

from zigzag.core.errors import ConfigError, did_you_mean, one_line, optional_package
from zigzag.disk.lines import Marked, Record, is_text, texts_in
from zigzag.disk.reading import Document, Options
from zigzag.disk.tokenizers import Tokenizer, read_record
from zigzag.disk.weights import WrongWeight, as_weights

ROLES = ("system", "user", "assistant", "tool", "developer")
# Private-use characters that mark the learned text during rendering.
BEGIN, END = "\ue0f0", "\ue0f1"


class Template:
    """The chat template in a tokenizer's folder."""

    def __init__(self, folder: str | Path, name: str = "default"):
        self.folder = Path(folder)
        config = read_record(self.folder / "tokenizer_config.json")
        special = {**read_record(self.folder / "special_tokens_map.json"), **config}
        self.special = {name: token.get("content", token) if isinstance(token, dict) else token
                        for name, token in special.items()
                        if name.endswith("_token") and token is not None}
        templates = _templates_of(self.folder)
        if name not in templates:
            raise ConfigError(f"{self.folder}: no chat template {name!r}; there are "
                              f"{', '.join(templates) or 'none'}{did_you_mean(name, templates)}")
        self.text, self.environment = templates[name], _environment()

    @functools.cached_property
    def compiled(self) -> Any:
        """The template, compiled by jinja2."""
        return self.environment.from_string(self.text)

    def render(self, messages: Sequence[Record], add_generation_prompt: bool = False,
               marks: bool = False, **more: Any) -> str:
        """Return a conversation's text. With `marks`, BEGIN and END enclose the assistant's text,
        if the template marks it. `more` is passed to the template (for example, tools)."""
        begin, end = (BEGIN, END) if marks else ("", "")
        try:
            text = self.compiled.render(**{
                "tools": None, "documents": None, **self.special, "messages": messages,
                "add_generation_prompt": add_generation_prompt, **more,
                "generation_begin": begin, "generation_end": end})
            text.encode()       # fails on lone surrogates
            return text
        except Exception as e:  # a template can raise anything
            raise ConfigError(f"{self.folder}: its chat template refuses these messages "
                              f"({one_line(e)})") from None

    def learned(self, messages: Sequence[Record], first: int = 0, **more: Any
                ) -> tuple[str, list[tuple[int, int]]]:
        """Return a conversation's text and its learned spans (first character, end): the answers
        among its messages, ignoring those before message number `first`."""
        text = self.render(messages, **more)
        if BEGIN in text or END in text:
            raise ConfigError("a message has a private-use character (U+E0F0 or U+E0F1)")
        marked = self.render(messages, marks=True, **more)
        if marked.replace(BEGIN, "").replace(END, "") == text and BEGIN in marked:
            begin = len(self._before(messages, first, text, more)) if first else 0
            # The marks around the i earlier answers shift answer number i by 2 * i characters.
            spans = [(found.start() - 2 * i, found.end() - 2 * i - 2)
                     for i, found in enumerate(re.finditer(f"{BEGIN}[^{BEGIN}]*?{END}", marked))]
            return text, [span for span in spans if span[0] >= begin]
        spans = []
        for i in range(first, len(messages)):
            if messages[i]["role"] != "assistant":
                continue
            before = self.render(messages[:i], add_generation_prompt=True, **more)
            after = self.render(messages[:i + 1], **more)
            if not (after.startswith(before) and text.startswith(after)):
                raise ConfigError("the chat template changes earlier turns (or an answer's "
                                  "beginning) when a turn is added, and marks no answers with "
                                  "{% generation %}: give each conversation one answer, its last "
                                  "message")
            spans.append((len(before), len(after)))
        return text, spans

    def _before(self, messages, first, text, more):
        """Return the part of a conversation's text that comes from its first messages."""
        for begins_answer in (True, False):
            before = self.render(messages[:first], add_generation_prompt=begins_answer, **more)
            if text.startswith(before):
                return before
        raise ConfigError("the chat template changes earlier turns when a turn is added, so the "
                          "parts that differ between two answers are unknown")


def encode_record(document: Document, tokenizer: Tokenizer, options: Options) -> list[Marked]:
    """Return a line's pairs (ids, their weights as targets): one, or two for a preference."""
    record = document.content
    if options.form == "completion":
        found = [encode_completion(record, tokenizer)]
    elif options.form == "messages":
        found = [encode_chat(record, template_of(tokenizer.folder), tokenizer,
                             weight_field=options.weight_field)]
    elif isinstance(record["chosen"], str):
        prompt, chosen, rejected = split_preference(record)
        found = [encode_completion({"prompt": prompt, "completion": text}, tokenizer)
                 for text in (chosen, rejected)]
    else:
        found = encode_preference(record, template_of(tokenizer.folder), tokenizer)
    weight = as_weights(document.weight)
    return [(ids, learned * weight) for ids, learned in found]


def encode_chat(record: Record, template: Template, tokenizer: Tokenizer, first: int = 0,
                weight_field: str = "") -> Marked:
    """Return a conversation's ids, and which of them are learned: the answers, except those before
    message `first`. With a `weight_field`, return each id's weight instead (0: not learned)."""
    text, spans = template.learned(record["messages"], first, tools=_tools_of(record) or None)
    ids, begins, ends = tokenizer.with_places(text)
    learned = np.zeros(len(ids), np.float32 if weight_field else bool)
    weights = _weights_of(record["messages"][first:], weight_field, len(spans))
    for (begin, end), weight in zip(spans, weights):
        learned[(begins < end) & (ends > begin)] = weight
    return ids, learned


def _weights_of(messages: list[Record], field: str, count: int) -> list[Any]:
    """Return the weight of each of the `count` answers among these messages: the message's value in
    this field, or 1 if the message lacks it."""
    found = [message.get(field) for message in messages if message["role"] == "assistant"]
    if not field or not any(x is not None for x in found):
        return [1] * count
    if len(found) != count:
        raise WrongWeight(f"weighs {len(found)} answers, but the chat template marks {count}; give "
                          f"the whole line one weight")
    return [as_weights(x) for x in found]


def _tools_of(record):
    """Return a conversation's list of tools. It may be stored as JSON text, as in tables."""
    tools = record.get("tools") or []
    if isinstance(tools, str):
        with contextlib.suppress(ValueError, RecursionError):
            tools = json.loads(tools)
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ConfigError("its tools are not a list of objects")
    return tools


def encode_completion(record: Record, tokenizer: Tokenizer) -> Marked:
    """Return the ids of a prompt, its completion and an end id, and which of them are learned."""
    prompt = tokenizer.prompt(record["prompt"])
    both = tokenizer.prompt(record["prompt"] + record["completion"])
    new = both[len(prompt):]
    if both[:len(prompt)] != prompt:        # an id spans the boundary
        new = tokenizer.encode(record["completion"]).tolist()
    ids = np.array([*prompt, *new, *tokenizer.ends[:1]], np.int64)
    return ids, np.arange(len(ids)) >= len(prompt)


def encode_preference(record: Record, template: Template, tokenizer: Tokenizer) -> list[Marked]:
    """Return (ids, which of them are learned) for the chosen and the rejected conversation."""
    before = record.get("prompt") or []
    if isinstance(before, str):
        before = [{"role": "user", "content": before}]
    both = [_joined(before, record[name]) for name in ("chosen", "rejected")]
    common = next((i for i, (a, b) in enumerate(zip(*both)) if a != b), min(map(len, both)))
    found = [encode_chat({**record, "messages": messages}, template, tokenizer, common)
             for messages in both]
    if not all(learned.any() for _, learned in found):
        raise ConfigError("one of the two adds no answer to what they share")
    return found


def _joined(before, messages):
    """Append `messages` to `before`, dropping leading messages that repeat the end of `before`. A
    repeat has the same role and content; other fields may differ."""
    def said(some):
        return [(message["role"], message.get("content")) for message in some]

    repeated = next(n for n in range(min(len(before), len(messages) - 1), -1, -1)
                    if said(messages[:n]) == said(before[len(before) - n:]))
    return [*before, *messages[repeated:]]


def split_preference(record: Record) -> tuple[str, str, str]:
    """Return a text preference as (prompt, chosen, rejected), removing the prompt if both answers
    begin with it. A missing prompt becomes their common prefix, cut after whitespace."""
    prompt, chosen, rejected = (record.get(name) for name in ("prompt", "chosen", "rejected"))
    if prompt is None:
        prompt = os.path.commonprefix([chosen, rejected])
        while prompt and not prompt[-1].isspace():
            prompt = prompt[:-1]
    if chosen.startswith(prompt) and rejected.startswith(prompt):
        chosen, rejected = chosen[len(prompt):], rejected[len(prompt):]
    return prompt, chosen, rejected


def check_record(record: Record, form: str) -> None:
    """Reject a line that isn't of this form: messages, completion or preference."""
    prompt, chosen, rejected = (record.get(name) for name in ("prompt", "chosen", "rejected"))
    if form == "messages":
        _check_messages(record.get("messages"))
    elif form == "completion":
        texts_in(record, ("prompt", "completion"))
    elif chosen == rejected:
        raise ConfigError("'chosen' and 'rejected' are the same")
    elif not isinstance(chosen, list):
        texts_in(record, ("chosen", "rejected"))
        if prompt is not None:
            texts_in(record, ("prompt",))
    else:
        for messages in (chosen, rejected):
            _check_messages(messages)
            begin = messages[0]
            if prompt and is_text(prompt) and (
                    begin["role"] != "assistant" and begin.get("content") != prompt):
                raise ConfigError("messages that begin neither with the prompt nor with an answer")
        if prompt and not is_text(prompt):
            _check_messages(prompt, answers=False)


def _check_messages(messages, answers=True):
    """Reject anything but a list of messages. With `answers`, require an assistant message."""
    if not isinstance(messages, list) or not messages:
        raise ConfigError("no list of messages")
    for message in messages:
        role = message.get("role") if isinstance(message, dict) else None
        if not isinstance(role, str):
            raise ConfigError("a message without a role")
        if role not in ROLES:
            raise ConfigError(f"the role {role!r:.40}; expected {', '.join(ROLES)}"
                              + did_you_mean(role, ROLES))
        content = message.get("content")
        if not is_text(content) and (content is not None or not message.get("tool_calls")):
            raise ConfigError("a message whose content is not text")
    if answers and not any(message["role"] == "assistant" for message in messages):
        raise ConfigError("no assistant answer")


def has_template(folder: Path | None) -> bool:
    """Return whether a tokenizer's folder has a chat template. For bytes, the folder is None."""
    return folder is not None and bool(_templates_of(folder))


@functools.cache
def template_of(folder: Path | None) -> Template:
    """Read the chat template in a tokenizer's folder. The ConfigError explains how to name one."""
    if not has_template(folder):
        none = f" (no chat_template in {folder})" if folder else ""
        raise ConfigError(f"conversations need the chat template of a published model: data.py "
                          f"--tokenizer DIR, or train.py --model DIR{none}")
    return Template(folder)


def _templates_of(folder):
    """Return {name: chat template} from a tokenizer's folder."""
    path = folder / "chat_template.jinja"
    found = read_record(folder / "tokenizer_config.json").get("chat_template") or []
    if not isinstance(found, list):
        found = [{"name": "default", "template": found}]
    if path.is_file():
        found.append({"name": "default", "template": path.read_text(errors="replace")})
    return {str(t["name"]): t["template"] for t in found}


def _environment():
    """Make a jinja2 environment like the one transformers uses to compile templates."""
    jinja2 = optional_package("jinja2", "a chat template")
    sandbox = optional_package("jinja2.sandbox", "a chat template")

    class Generation(optional_package("jinja2.ext", "a chat template").Extension):
        """{% generation %} ... {% endgeneration %} encloses the assistant's text."""
        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            begin, end = (jinja2.nodes.Output([jinja2.nodes.Name(mark, "load")])
                          for mark in ("generation_begin", "generation_end"))
            return jinja2.nodes.Scope([begin, *body, end], lineno=line)

    def raise_exception(message):
        raise jinja2.TemplateError(message)

    def strftime_now(form):
        return datetime.datetime.now().strftime(form)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                          sort_keys=sort_keys)

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    return environment
