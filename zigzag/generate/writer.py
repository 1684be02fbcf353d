"""The command of sample.py: answer prompts, hold a conversation, score texts and choices."""

import itertools
import math
import os
import sys
from typing import Any, Callable, NamedTuple, Sequence

import jax

from zigzag.core import hosts
from zigzag.core.errors import ConfigError
from zigzag.core.flags import check_shards, parse_flags
from zigzag.core.mesh import mesh_sizes, simulate_devices
from zigzag.disk.tokenizers import Tokenizer
from zigzag.generate import chat, choices, terminal
from zigzag.generate.answers import Answer
from zigzag.generate.bench import bench
from zigzag.generate.passes import Engine
from zigzag.generate.prompts import (
    GROUPS,
    Flags,
    check_used,
    counted_repeats,
    given_text,
    make_prompts,
    max_new_tokens,
    prompt_texts,
    scored_texts,
    split_lines,
)
from zigzag.generate.reading import Reading
from zigzag.generate.rows import context_of
from zigzag.hub.llama import special_ids
from zigzag.weights.network import Network


class Asked(NamedTuple):
    """What a command line asks for."""
    flags: Flags
    text: str               # of the file of prompts, or of what is to be scored
    has_input: bool         # whether nothing is to be read from the standard input
    is_chat: bool           # whether a person types


def parse(argv: Sequence[str] | None) -> Asked:
    """What a command line asks for. It reads the files that the flags name."""
    given, _ = parse_flags(Flags, argv, groups=GROUPS)
    check_shards(given)
    flags = Flags(**given)
    check_used(given)
    has_input = "prompt" in given or bool(flags.prompts or flags.source or flags.score
                                          or flags.choices or flags.bench)
    is_chat = terminal.is_conversation() and not (has_input or flags.json or flags.beams)
    if flags.system and not (is_chat or flags.chat):
        raise ConfigError("--system is for a conversation: on a terminal with no prompt, or with "
                          "--chat")
    asked = Asked(flags, given_text(flags), has_input, is_chat)
    if flags.coordinator or flags.distributed:
        _join_processes(asked)
    return asked


def _join_processes(asked):
    """Join the other processes. All of them compute; process 0 prints."""
    flags = asked.flags
    if not asked.has_input:
        raise ConfigError("several processes do not share one standard input: give --prompt, "
                          "--prompts FILE, --source, --score or --choices")
    count, rest = divmod(math.prod(mesh_sizes(flags.mesh, flags.shards).values()),
                         max(1, flags.processes))
    if not flags.distributed and rest == 0:
        simulate_devices(count)
    hosts.init_distributed(flags)
    jax.devices()       # (these; later nothing can simulate others)
    hosts.watchdog.arm("")
    # The library that connects CPUs writes to file 1 by itself: that goes to stderr.
    out = os.devnull if jax.process_index() else os.dup(1)
    sys.stdout = open(out, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)
    os.dup2(2, 1)


class Writer(NamedTuple):
    """The command, with the functions of sample.py that it calls (zigzag/ imports no top-level
    file), a model, and what is asked of it."""
    generate: Callable
    stream: Callable
    beam_search: Callable
    score: Callable
    engine: Engine
    params: Any             # as decoding uses them
    tokenizer: Tokenizer
    asked: Asked

    @property
    def flags(self) -> Flags:
        return self.asked.flags

    @property
    def network(self) -> Network:
        return self.engine.network

    @property
    def c(self) -> Any:
        return self.engine.config

    def run(self) -> None:
        """Do what is asked for."""
        flags, text = self.flags, self.asked.text
        if flags.bench:
            if self.network.source_ids(self.c):
                raise ConfigError("--bench: is for models that read text")
            bench(self.stream, self.params, self.c, flags.model)
        elif flags.score:
            self.score_texts(text)
        elif flags.choices:
            self.score_choices(text)
        elif self.asked.is_chat:
            self.converse()
        else:
            self.write(prompt_texts(flags, text, self.asked.has_input))

    @property
    def has_source(self) -> bool:
        return self.network.source_shape(self.c) is not None

    @property
    def ends(self) -> Sequence[int]:
        """The ids that end a text."""
        has_encoder = self.has_source and not self.network.source_ids(self.c)
        return special_ids(self.c, self.tokenizer)[1:2] if has_encoder else self.tokenizer.ends

    def write(self, texts: Sequence[str]) -> None:
        """Print an answer for each of these prompts."""
        flags, params, c = self.flags, self.params, self.c
        for tokens, some in self._batches(self._prompts(texts)):
            ids = [prompt.ids for prompt in some]
            source = [prompt.source for prompt in some] if self.has_source else None
            pieces = None
            options = dict(
                tokens=tokens, sampling=flags.sampling,
                seed=[flags.seed + prompt.repeat for prompt in some], stop=self.ends,
                source=source, stop_at_context=flags.stop_at_context, say=terminal.note,
                batch=flags.batch)
            if flags.beams:
                if tokens < flags.tokens:
                    terminal.note(f"--tokens {flags.tokens}: a beam search ends with the context, "
                                  f"after {tokens}")
                best = self.beam_search(params, ids, c, flags.beams, tokens, self.ends, source,
                                        flags.length_penalty)
                rows = [(prompt._replace(begin=f"{total:9.3f}  {prompt.begin}"), new,
                         {"score": total})
                        for prompt, beams in zip(some, best) for new, total in beams]
            elif flags.logprobs:
                results = self.generate(params, ids, c, logprobs=True, **options)
                rows = [(prompt, new, {"ids": new, "logprobs": logprobs})
                        for prompt, (new, logprobs) in zip(some, results)]
            else:
                rows = [(prompt, [], {}) for prompt in some]
                pieces = self.stream(params, ids, c, ended=lambda n: answers[n].reason,
                                     **options)
            answers = [self._answer(prompt, tokens, **more) for prompt, _, more in rows]
            terminal.show(pieces or [[new for _, new, _ in rows]], answers, flags.json)

    def _prompts(self, texts):
        """The texts as Prompts; with --chat, each is the one message of a conversation."""
        if self.flags.chat:
            talk = self._conversation()
            return counted_repeats([talk.ask(text, terminal.note) for text in texts])
        return make_prompts(self.network, self.c, self.tokenizer, texts, self.flags.source)

    def _conversation(self):
        return chat.conversation(self.network, self.tokenizer, self.c, self.flags.system,
                                 self.flags.chat)

    def _answer(self, prompt, tokens, **more):
        room = sys.maxsize
        if self.flags.stop_at_context:
            context = context_of(self.network, self.c)
            room = context - min(len(prompt.ids), context) + 1
        return Answer(self.tokenizer.decode, prompt, tokens, self.flags.stop, room, **more)

    def _batches(self, prompts):
        """Yield (tokens, prompts that all have room for that many new ids), in order. So the length
        of an answer does not depend on the other prompts. They are at most --batch; more, if they
        take each other's rows (with --logprobs, few are printed together)."""
        size = self.flags.batch * (1 if self.has_source or self.flags.beams else
                                   4 if self.flags.logprobs else 16)
        def tokens_of(prompt):
            if self.has_source or self.flags.beams:
                return max_new_tokens(self.network, self.c, prompt.ids, self.flags.tokens)
            return self.flags.tokens

        for tokens, group in itertools.groupby(prompts, tokens_of):
            while some := list(itertools.islice(group, size)):
                yield tokens, some

    # A conversation

    def converse(self) -> None:
        """Hold a conversation by the model's chat template. Without one, each line is a prompt."""
        talk = self._conversation()
        reading = None if self.has_source else Reading(
            self.engine, self.params, self.flags.sampling)

        def answer(line, pressed):
            prompt = talk.ask(line, terminal.note) if talk else make_prompts(
                self.network, self.c, self.tokenizer, [line])[0]
            text = self._say(prompt, reading, pressed)
            if talk and (text or not pressed):
                talk.keep(line, text)

        def begin(system):
            talk.begin(system)
            return f"a new conversation{', with this system message' if system else ''}"

        commands = {
            "reset": ("forget what was said, and begin anew", lambda _: begin(talk.system)),
            "system": ("TEXT: begin anew, and tell the model this first", begin)} if talk else {}
        terminal.converse("Talk to the model" if talk else "Each line is continued", answer,
                          commands, reading and reading.compile())

    def _say(self, prompt, reading, pressed):
        """Print an answer while it is generated, until Ctrl-C is pressed. Returns its text."""
        flags, tokens = self.flags, self.flags.tokens
        if reading and len(prompt.ids) > reading.context:
            terminal.note(f"that is {len(prompt.ids):,} tokens: the last {reading.context:,}, the "
                          f"model's context, are read")
        if reading:
            pieces = reading.stream(prompt.ids, tokens, flags.seed, self.ends,
                                    flags.stop_at_context)
        else:
            tokens = max_new_tokens(self.network, self.c, prompt.ids, tokens)
            pieces = self.stream(
                self.params, [prompt.ids], self.c, tokens, flags.sampling, seed=flags.seed,
                stop=self.ends, source=[prompt.source], piece=1, say=terminal.note)

        def status():
            return "reading ..." if reading and reading.is_ready else "compiling ..."

        pieces = terminal.in_background(pieces, pressed, status)
        first, answer = list(itertools.islice(pieces, 1)), self._answer(prompt, tokens)
        terminal.show(itertools.chain(first, pieces), [answer], pressed=pressed)
        if reading and reading.has_rolled:
            terminal.note(f"the context of {reading.context:,} tokens was full: the answer went on "
                          f"from its last half")
        if answer.reason in ("length", "context") and not pressed:
            terminal.note(f"--tokens {tokens} ended this answer" if answer.reason == "length" else
                          "the context is full")
        return answer.text

    # Scores

    def score_texts(self, text: str) -> None:
        """Print the log-probability of each text of the file --score."""
        flags = self.flags
        texts, rows, sources = scored_texts(self.network, self.c, self.tokenizer, text,
                                            flags.score, flags.by == "line")
        parts = [slice(at, at + flags.batch) for at in range(0, len(rows), flags.batch)]
        found = (pair for part in parts for pair in self.score(
            self.params, rows[part], self.c, sources and sources[part], flags.batch))
        terminal.show_scores(texts, found, flags.json)

    def score_choices(self, text: str) -> None:
        """Print how many questions of the file --choices the model answers right."""
        flags = self.flags
        items = choices.read_items(split_lines(text, flags.choices, "--choices"))
        if self.has_source:
            raise ConfigError(f"--choices {flags.choices}: expected a decoder; this model has an "
                              f"encoder")

        def score(rows, given):
            return self.score(self.params, rows, self.c, batch=flags.batch, given=given)

        choices.show(items, choices.logprobs(score, self.tokenizer, items, flags.batch),
                     flags.json)
