"""Conversations with a model, using its chat template (chats.py)."""

import contextlib
import importlib
from pathlib import Path
from typing import Any, Callable, Sequence

from tools import chats
from zigzag.commands.sampling import Model, write_answers
from zigzag.core.errors import ConfigError, note
from zigzag.generate.prompts import Prompt, make_prompts
from zigzag.generate.rows import context_of


def chat_prompt(folder: str | Path, messages: Sequence[dict[str, Any]], template: str = "default",
                add_generation_prompt: bool = True, **more: Any) -> str:
    """Return the text for a model to continue, for a conversation such as [{"role": "user",
    "content": "Hello"}]. With `add_generation_prompt`, the text ends where the answer begins. The
    text spells out special tokens, so encode it with a tokenizer's `with_places`. `more` is passed
    to the template (for example, tools)."""
    return chats.Template(folder, template).render(messages, add_generation_prompt, **more)


def chat_ids(tokenizer: Any, messages: Sequence[dict[str, Any]]) -> list[int]:
    """Return the ids of chat_prompt's text. As in training, a special token spelled out by the
    template becomes a single id."""
    return tokenizer.with_places(chat_prompt(tokenizer.folder, messages))[0].tolist()


def user(text: str) -> dict[str, str]:
    """Return a user's message to the model."""
    return {"role": "user", "content": text}


def fitting_ids(tokenizer: Any, messages: list[dict[str, Any]], context: int,
                say: Callable[[str], Any]) -> list[int]:
    """Return the ids of a conversation that ends with a message to the model. Drop the oldest turns
    from `messages` until a quarter of the context is left for the answer."""
    first = 1 if messages[0]["role"] == "system" else 0
    while True:
        ids = chat_ids(tokenizer, messages)
        if len(ids) <= context * 3 // 4 or len(messages) <= first + 1:
            return ids
        say(f"this model's context is {context:,} tokens: it forgets the oldest question and "
            f"answer")
        del messages[first:first + 2]


# -------------------------------------------------------------------------------------------
# The command

def has_template(model: Model) -> bool:
    """Return whether the model is a decoder with a chat template."""
    return not model.has_source and chats.has_template(model.tokenizer.folder)


def system(model: Model) -> list[dict[str, str]]:
    """Return the messages that begin a conversation: --system, if given. --chat and --system need
    a chat template."""
    if (model.flags.chat or model.flags.system) and not has_template(model):
        raise ConfigError("--chat and --system need a chat template; this model has none")
    return [{"role": "system", "content": model.flags.system}] if model.flags.system else []


def message(model: Model, messages: list[dict[str, str]]) -> Prompt:
    """Make the Prompt that asks for the model's answer to the last of these messages. If they don't
    fit, drop the oldest from `messages`."""
    ids = fitting_ids(model.tokenizer, messages, context_of(model.network, model.c), note)
    return Prompt(messages[-1]["content"], ids)


def messages_of(model: Model, texts: Sequence[str]) -> list[Prompt]:
    """For --chat, make each text a separate conversation, after any --system message."""
    return [message(model, [*system(model), user(text)]) for text in texts]


def converse(model: Model) -> None:
    """Answer the lines a user types. With a chat template, they form a conversation; without one,
    the model continues each line."""
    with contextlib.suppress(ImportError):      # not every Python has readline
        importlib.import_module("readline")     # makes input lines editable
    said, tokens = system(model), model.flags.tokens
    greeting = "Talk to the model" if has_template(model) else "The model continues each line"
    print(f"{greeting}: Ctrl-C stops an answer, Ctrl-D ends")
    while True:
        try:
            line = input("> ")
        except EOFError:
            return print()
        if not line.strip():
            continue
        if has_template(model):
            said.append(user(line))
            prompt = message(model, said)
        else:
            prompt, = make_prompts(model.network, model.c, model.tokenizer, [line])
        answer = model.answer(prompt, tokens)
        try:
            write_answers(model, [prompt], [answer], [model.flags.seed], piece=1)
            if answer.reason != "stop":
                note(f"--tokens {tokens} or the end of the context ended this answer")
        except KeyboardInterrupt:
            print()
        said.append({"role": "assistant", "content": answer.text})
