"""What the command line of sample.py does: answer prompts, hold a conversation, score texts."""

import itertools
from typing import Any, Callable, NamedTuple, Sequence

from zigzag.disk.tokenizers import Tokenizer
from zigzag.generate import chat, terminal
from zigzag.generate.prompts import (
    SAMPLING_FLAGS,
    Prompt,
    make_prompts,
    max_new_tokens,
    scored_texts,
)
from zigzag.generate.terminal import Answer
from zigzag.hub.llama import special_ids
from zigzag.weights.network import Network


class Writer(NamedTuple):
    """sample.py's functions (zigzag/ does not import them), its flags, and a model."""
    generate: Callable
    stream: Callable
    beam_search: Callable
    score: Callable
    config: Any
    network: Network
    params: Any
    c: Any
    tokenizer: Tokenizer

    def write(self, prompts: Sequence[Prompt], pressed: Sequence[int] = ()) -> Answer:
        """Print an answer for each prompt, until Ctrl-C is pressed. Returns the last answer."""
        config, params, c, tokenizer = self.config, self.params, self.c, self.tokenizer
        has_source = self.network.source_shape(c) is not None
        ends = special_ids(c, tokenizer)[1:2] if has_source else tokenizer.ends
        for tokens, some in self._batches(prompts):
            ids = [prompt.ids for prompt in some]
            source = [prompt.source for prompt in some] if has_source else None
            pieces = None
            options = {name: getattr(config, name) for name in SAMPLING_FLAGS} | dict(
                tokens=tokens, seed=[config.seed + prompt.repeat for prompt in some], stop=ends,
                source=source)
            if config.beams:
                best = self.beam_search(params, ids, c, config.beams, tokens, ends, source,
                                        config.length_penalty)
                rows = [(prompt._replace(begin=f"{score:9.3f}  {prompt.begin}"), new,
                         {"score": score})
                        for prompt, beams in zip(some, best) for new, score in beams]
            elif config.logprobs:
                results = self.generate(params, ids, c, logprobs=True, **options)
                rows = [(prompt, new, {"ids": new, "logprobs": logprobs})
                        for prompt, (new, logprobs) in zip(some, results)]
            else:
                rows = [(prompt, [], {}) for prompt in some]
                pieces = self.stream(params, ids, c, **options)
            answers = [Answer(tokenizer.decode, prompt, tokens, config.stop, **more)
                       for prompt, _, more in rows]
            terminal.show(pieces or [[new for _, new, _ in rows]], answers, config.json, pressed)
        return answers[-1]

    def _batches(self, prompts):
        """(tokens, at most --batch prompts that can have so many new ones), in order: where
        positions end, a prompt's answer does not depend on the others' lengths."""
        def tokens_of(prompt):
            return max_new_tokens(self.network, self.c, prompt.ids, self.config.tokens)

        for tokens, group in itertools.groupby(prompts, tokens_of):
            while some := list(itertools.islice(group, self.config.batch)):
                yield tokens, some

    def converse(self) -> None:
        """A conversation, with the model's chat template. If it has none, each line is a prompt."""
        conversation = chat.conversation(self.network, self.tokenizer, self.c,
                                         self.config.system)

        def answer(line, pressed):
            prompts = ([conversation.ask(line)] if conversation else
                       make_prompts(self.network, self.c, self.tokenizer, [line]))
            text = self.write(prompts, pressed).text
            if conversation:
                conversation.keep(line, text)

        terminal.converse("Talk to the model" if conversation else "Each line is continued", answer)

    def score_texts(self, lines: Sequence[tuple[str, str]]) -> None:
        """Print the log-probability of each text of the file --score."""
        config, params, c, tokenizer = self.config, self.params, self.c, self.tokenizer
        texts, rows, sources = scored_texts(self.network, c, tokenizer, lines, config.score)
        parts = [slice(at, at + config.batch) for at in range(0, len(rows), config.batch)]
        found = (pair for part in parts for pair in self.score(
            params, rows[part], c, sources and sources[part], config.batch))
        terminal.show_scores(texts, found, config.json)
