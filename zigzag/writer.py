"""What sample.py's command line does with a model: answers to prompts, a conversation, scores."""

from typing import Any, Callable, NamedTuple, Sequence

from zigzag import chat, terminal
from zigzag.asked import CHOICES, Asked, prompts_of, room_for, scored_texts
from zigzag.families import special_ids
from zigzag.tokenizers import Tokenizer


class Writer(NamedTuple):
    """sample.py's functions, its flags, and a model."""
    generate: Callable
    stream: Callable
    beam_search: Callable
    score: Callable
    config: Any
    params: Any
    c: Any
    tokenizer: Tokenizer

    def write(self, asked: Sequence[Asked], pressed: Sequence[int] = ()) -> terminal.Answer:
        """Show what the model writes, until Ctrl-C is pressed. The last answer."""
        config, params, c, tokenizer = self[4:]
        ends = special_ids(c, tokenizer)[1:2] if c.encoder_layers else tokenizer.ends
        for first in range(0, len(asked), config.batch):
            some = asked[first:first + config.batch]
            ids = [a.ids for a in some]
            source = [a.source for a in some] if c.encoder_layers else None
            tokens, pieces = room_for(c, ids, config.tokens), None
            choices = {name: getattr(config, name) for name in CHOICES} | dict(
                tokens=tokens, seed=[config.seed + a.repeat for a in some], stop=ends,
                source=source)
            if config.beams:
                found = self.beam_search(params, ids, c, config.beams, tokens, ends, source,
                                         config.length_penalty)
                rows = [(a._replace(begin=f"{score:9.3f}  {a.begin}"), new, {"score": score})
                        for a, best in zip(some, found) for new, score in best]
            elif config.logprobs:
                found = self.generate(params, ids, c, logprobs=True, **choices)
                rows = [(a, new, {"ids": new, "logprobs": each})
                        for a, (new, each) in zip(some, found)]
            else:
                rows, pieces = [(a, [], {}) for a in some], self.stream(params, ids, c, **choices)
            answers = [terminal.Answer(tokenizer.decode, a, tokens, config.stop, **more)
                       for a, _, more in rows]
            terminal.show(pieces or [[new for _, new, _ in rows]], answers, config.json, pressed)
        return answers[-1]

    def converse(self) -> None:
        """A conversation with the model's own template or, where it has none, what continues each
        line."""
        talk = chat.conversation(self.tokenizer, self.c, self.config.system)

        def answer(line, pressed):
            asked = [talk.ask(line)] if talk else prompts_of(self.c, self.tokenizer, [line])
            said = self.write(asked, pressed).text
            if talk:
                talk.keep(line, said)

        terminal.converse("Talk to the model" if talk else "Each line is continued", answer)

    def score_texts(self, lines: Sequence[tuple[str, str]]) -> None:
        """Show how likely each text of the file is."""
        config, params, c, tokenizer = self[4:]
        texts, rows, sources = scored_texts(c, tokenizer, lines, config.score)
        parts = [slice(at, at + config.batch) for at in range(0, len(rows), config.batch)]
        found = (pair for part in parts for pair in self.score(
            params, rows[part], c, sources and sources[part], config.batch))
        terminal.show_scores(texts, found, config.json)
