"""A conversation with a model, in the text that its chat template makes (zigzag/disk/chats.py)."""

from pathlib import Path
from typing import Any, Callable, Sequence

from zigzag.disk.chats import Template


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


def fitting_ids(tokenizer: Any, messages: list[dict[str, Any]], context: int,
                say: Callable[[str], Any]) -> list[int]:
    """The ids of a conversation that ends with a message to the model. The oldest turns are dropped
    from it if less than a quarter of the context is left for the answer."""
    first = 1 if messages[0]["role"] == "system" else 0
    while True:
        ids = chat_ids(tokenizer, messages)
        if len(ids) <= context * 3 // 4 or len(messages) <= first + 1:
            return ids
        say(f"the context of this model is {context:,} tokens: the oldest question and its answer "
            f"are forgotten")
        del messages[first:first + 2]
