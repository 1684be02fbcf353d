"""Chat templates: a conversation as the text that a published model expects.

    chat_template.jinja, or chat_template in tokenizer_config.json (one, or several with names)

A template is a program from the model's folder. It runs in jinja2's sandbox, with the functions
that transformers provides. (The sandbox does not limit time or memory.)
"""

import datetime
import json
from pathlib import Path
from typing import Any, Callable, Sequence

from zigzag.core.errors import ConfigError, did_you_mean, one_line, optional_package
from zigzag.disk.tokenizers import read_record
from zigzag.generate.prompts import Prompt
from zigzag.generate.rows import context_of
from zigzag.weights.network import Network


def chat_prompt(folder: str | Path, messages: Sequence[dict[str, Any]], template: str = "default",
                add_generation_prompt: bool = True, **more: Any) -> str:
    """The text that a model continues, for a conversation such as [{"role": "user", "content":
    "Hello"}]. With `add_generation_prompt` it ends where the answer begins. Special tokens are
    spelled out in it: encode it with a tokenizer's `encode`. `more` is passed to the template
    (tools)."""
    config = read_record(Path(folder) / "tokenizer_config.json")
    special = {**read_record(Path(folder) / "special_tokens_map.json"), **config}
    special = {name: token["content"] if isinstance(token, dict) and "content" in token else token
               for name, token in special.items() if name.endswith("_token")}
    jinja2 = optional_package("jinja2", "a chat template")
    text, environment = _template_of(Path(folder), config, template), _environment(jinja2)
    try:
        prompt = environment.from_string(text).render(**{
            "tools": None, "documents": None, **special, "messages": messages,
            "add_generation_prompt": add_generation_prompt, **more})
        prompt.encode()         # (fails on lone surrogates)
        return prompt
    except Exception as e:      # (a template can raise anything)
        raise ConfigError(f"{folder}: its chat template refuses these messages ({one_line(e)})"
                          ) from None


class Conversation:
    """A conversation with a model, as its chat template writes it."""

    def __init__(self, network: Network, tokenizer: Any, c: Any, system: str = ""):
        self.tokenizer, self.context = tokenizer, context_of(network, c)
        self.begin(system)

    def begin(self, system: str) -> None:
        """Start a new conversation with this system message."""
        self.system, self.messages = system, []

    def ask(self, text: str, say: Callable[[str], Any]) -> Prompt:
        """The Prompt whose continuation is the model's answer to this text. The oldest turns are
        dropped if less than a quarter of the context is left for the answer."""
        count = len(self.messages)
        while True:
            ids = self._ids(text)
            if len(ids) <= self.context * 3 // 4 or not self.messages:
                break
            self.messages = self.messages[2:]
        if dropped := count - len(self.messages):
            say(f"the context of this model is {self.context:,} tokens: the oldest {dropped} "
                f"messages are forgotten")
        return Prompt(text, ids)

    def _ids(self, text):
        system = [{"role": "system", "content": self.system}] if self.system else []
        now = [*system, *self.messages, {"role": "user", "content": text}]
        return self.tokenizer.encode(chat_prompt(self.tokenizer.folder, now)).tolist()

    def keep(self, text: str, answer: str) -> None:
        """Add this text and its answer to the conversation."""
        self.messages += [{"role": "user", "content": text},
                          {"role": "assistant", "content": answer}]


def conversation(network: Network, tokenizer: Any, c: Any, system: str = ""
                 ) -> Conversation | None:
    """A new conversation, if the model has a chat template."""
    folder = getattr(tokenizer, "folder", None)     # (bytes have no files)
    if folder and network.source_shape(c) is None and (
            (folder / "chat_template.jinja").is_file()
            or read_record(folder / "tokenizer_config.json").get("chat_template")):
        return Conversation(network, tokenizer, c, system)
    if system:
        raise ConfigError("--system: this model has no chat template, which a system message needs")
    return None


def _template_of(folder, config, name):
    path, found = folder / "chat_template.jinja", config.get("chat_template")
    if isinstance(found, list):
        found = {str(t.get("name")): t.get("template") for t in found if isinstance(t, dict)}
    else:
        found = {"default": found} if found else {}
    if path.is_file():
        found["default"] = path.read_text(encoding="utf-8", errors="replace")
    if not isinstance(found.get(name), str):
        raise ConfigError(f"{folder}: no chat template {name!r}" + (
            f"; there are {', '.join(map(str, found))}{did_you_mean(name, map(str, found))}"
            if found else " (in chat_template.jinja, or tokenizer_config.json)"))
    return found[name]


def _environment(jinja2):
    """A jinja2 environment like the one in which transformers compiles templates."""
    sandbox = optional_package("jinja2.sandbox", "a chat template")

    class Generation(optional_package("jinja2.ext", "a chat template").Extension):
        """{% generation %} marks text of the assistant; it leaves the text unchanged."""
        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=line)

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
