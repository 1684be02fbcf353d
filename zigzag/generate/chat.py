"""A conversation with a model, in the text that its chat template makes (zigzag/disk/chats.py)."""

from pathlib import Path
from typing import Any, Callable, Sequence

from zigzag.core.errors import ConfigError
from zigzag.disk.chats import Template, has_template
from zigzag.generate.prompts import Prompt
from zigzag.generate.rows import context_of
from zigzag.weights.network import Network


def chat_prompt(folder: str | Path, messages: Sequence[dict[str, Any]], template: str = "default",
                add_generation_prompt: bool = True, **more: Any) -> str:
    """The text that a model continues, for a conversation such as [{"role": "user", "content":
    "Hello"}]. With `add_generation_prompt` it ends where the answer begins. Special tokens are
    spelled out in it: encode it with a tokenizer's `with_places`. `more` is passed to the template
    (tools)."""
    return Template(folder, template).render(messages, add_generation_prompt, **more)


def chat_ids(tokenizer: Any, messages: Sequence[dict[str, Any]]) -> list[int]:
    """The ids of that text. As in training, a special token that the template spells out is one
    id."""
    return tokenizer.with_places(chat_prompt(tokenizer.folder, messages))[0].tolist()


def user(text: str) -> dict[str, str]:
    """A message to the model."""
    return {"role": "user", "content": text}


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
        return chat_ids(self.tokenizer, [*system, *self.messages, user(text)])

    def keep(self, text: str, answer: str) -> None:
        """Add this text and its answer to the conversation."""
        self.messages += [user(text), {"role": "assistant", "content": answer}]


def conversation(network: Network, tokenizer: Any, c: Any, system: str = "", is_asked: bool = False
                 ) -> Conversation | None:
    """A new conversation, if the model has a chat template, or None. With a system message, or if
    one is asked for, a model without a template is refused."""
    folder = tokenizer.folder if tokenizer else None        # (bytes have no files)
    if folder and network.source_shape(c) is None and has_template(folder):
        return Conversation(network, tokenizer, c, system)
    if system or is_asked:
        flag, needs = ("--system", "a system message") if system else ("--chat", "a message")
        raise ConfigError(f"{flag}: this model has no chat template, which {needs} needs")
    return None
