"""The command of sample.py: answer prompts, hold a conversation, score texts and choices."""

import itertools
import math
import os
import sys
from typing import Any, Iterable, Iterator, NamedTuple, Sequence

import jax

import networks
import sample
from zigzag.commands import choices, generation_speed, terminal
from zigzag.commands.answers import Answer
from zigzag.core import hosts
from zigzag.core.errors import ConfigError, note
from zigzag.core.flags import check_shards, parse_flags
from zigzag.core.mesh import keep_compiled, mesh_sizes, simulate_devices
from zigzag.disk.tokenizers import Tokenizer
from zigzag.generate.chat import Conversation, conversation
from zigzag.generate.prompts import (
    GROUPS,
    Flags,
    Input,
    Prompt,
    check_given,
    counted_repeats,
    given_input,
    make_prompts,
    max_new_tokens,
    read_input,
    scored_texts,
)
from zigzag.generate.reading import Reading
from zigzag.generate.rows import context_of
from zigzag.hub.llama import special_ids
from zigzag.weights.network import Network

INPUTS = ("prompt", "prompts", "source", "score", "choices", "bench")


class Model(NamedTuple):
    """A model, and what the command line asks of it."""
    flags: Flags
    params: Any             # as decoding uses them
    c: Any                  # the network's configuration
    tokenizer: Tokenizer

    @property
    def network(self) -> Network:
        return networks.network_of(self.c)

    @property
    def has_source(self) -> bool:
        return self.network.source_shape(self.c) is not None

    @property
    def ends(self) -> Sequence[int]:
        """The ids that end a text."""
        has_encoder = self.has_source and not self.network.source_ids(self.c)
        return special_ids(self.c, self.tokenizer)[1:2] if has_encoder else self.tokenizer.ends

    def conversation(self) -> Conversation | None:
        return conversation(self.network, self.tokenizer, self.c, self.flags.system,
                            self.flags.chat)

    def answer(self, prompt: Prompt, tokens: int, **more: Any) -> Answer:
        """The answer to a prompt, before its first id."""
        room = sys.maxsize
        if self.flags.stop_at_context:
            context = context_of(self.network, self.c)
            room = context - min(len(prompt.ids), context) + 1
        return Answer(self.tokenizer.decode, prompt, tokens, self.flags.stop, room, **more)


def main(argv: Sequence[str] | None = None) -> None:
    """Do what a command line asks for. The files that it names are read before the model."""
    with terminal.ends_quietly():
        given, _ = parse_flags(Flags, argv, groups=GROUPS)
        check_shards(given)
        check_given(given)
        flags, has_input = Flags(**given), any(name in given for name in INPUTS)
        is_chat = terminal.is_conversation() and not (has_input or flags.json or flags.beams)
        if flags.system and not (is_chat or flags.chat):
            raise ConfigError("--system is for a conversation: on a terminal with no prompt, or "
                              "with --chat")
        file = given_input(flags)
        if flags.coordinator or flags.distributed:
            _join_processes(flags, has_input)
        keep_compiled(least=0)
        model = Model(flags, *sample.load_model(flags))
        if flags.bench:
            generation_speed.bench(model.params, model.c, flags.model)
        elif flags.score:
            score_texts(model, file)
        elif flags.choices:
            score_choices(model, file)
        elif is_chat:
            converse(model)
        else:
            # (An empty standard input is one empty prompt: the beginning of a document.)
            file = file or (None if has_input else read_input("-", ""))
            write(model, file.texts("prompt") or [""] if file else [flags.prompt])


def _join_processes(flags, has_input):
    """Join the other processes. All of them compute; process 0 prints."""
    if not has_input:
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


# -------------------------------------------------------------------------------------------
# Answers to prompts

def write(model: Model, texts: Sequence[str]) -> None:
    """Print an answer for each of these prompts."""
    flags = model.flags
    if flags.chat:      # (each is the one message of a conversation)
        talk = model.conversation()
        prompts = counted_repeats([talk.ask(text, note) for text in texts])
    else:
        prompts = make_prompts(model.network, model.c, model.tokenizer, texts, flags.source)
    for tokens, some in batches(model, prompts):
        source = [prompt.source for prompt in some] if model.has_source else None
        answers, pieces = (beams if flags.beams else streamed)(model, some, tokens, source)
        terminal.show(pieces, answers, flags.json)


def batches(model: Model, prompts: Iterable[Prompt]) -> Iterator[tuple[int, list[Prompt]]]:
    """Yield (tokens, prompts that all have room for that many new ids), in order. So the length of
    an answer does not depend on the other prompts. They are at most --batch; more, if they take
    each other's rows."""
    flags, is_fixed = model.flags, model.has_source or model.flags.beams

    def tokens_of(prompt):
        return max_new_tokens(model.network, model.c, prompt.ids, flags.tokens
                              ) if is_fixed else flags.tokens

    for tokens, group in itertools.groupby(prompts, tokens_of):
        while some := list(itertools.islice(group, flags.batch * (1 if is_fixed else 16))):
            yield tokens, some


def streamed(model: Model, prompts: Sequence[Prompt], tokens: int, source: Any
             ) -> tuple[list[Answer], Iterator[list]]:
    """(the answers to these prompts, pieces with their ids)."""
    flags = model.flags
    logs: list[list[float]] = [[] for _ in prompts]
    answers = [model.answer(prompt, tokens, **{"logprobs": own} if flags.logprobs else {})
               for prompt, own in zip(prompts, logs)]
    pieces = sample.stream(
        model.params, [prompt.ids for prompt in prompts], model.c, tokens, flags.sampling,
        seed=[flags.seed + prompt.repeat for prompt in prompts], stop=model.ends, source=source,
        stop_at_context=flags.stop_at_context, say=note, batch=flags.batch,
        logprobs=flags.logprobs, ended=lambda n: answers[n].reason)
    return answers, _only_ids(pieces, logs) if flags.logprobs else pieces


def _only_ids(pieces, logs):
    """The ids of pieces (ids, log-probabilities); the latter are added to `logs`."""
    for piece in pieces:
        for known, pair in zip(logs, piece):
            known.extend(pair[1] if pair else ())
        yield [pair and pair[0] for pair in piece]


def beams(model: Model, prompts: Sequence[Prompt], tokens: int, source: Any
          ) -> tuple[list[Answer], list[list]]:
    """(the beams of each prompt as answers, one piece with their ids)."""
    flags = model.flags
    if tokens < flags.tokens:
        note(f"--tokens {flags.tokens}: a beam search ends with the context, after {tokens}")
    best = sample.beam_search(model.params, [prompt.ids for prompt in prompts], model.c,
                              flags.beams, tokens, model.ends, source, flags.length_penalty)
    found = [(prompt._replace(begin=f"{score:9.3f}  {prompt.begin}"), new, score)
             for prompt, of_prompt in zip(prompts, best) for new, score in of_prompt]
    return ([model.answer(prompt, tokens, score=score) for prompt, _, score in found],
            [[new for _, new, _ in found]])


# -------------------------------------------------------------------------------------------
# A conversation

def converse(model: Model) -> None:
    """Hold a conversation by the model's chat template. Without one, each line is a prompt."""
    talk = model.conversation()
    reading = None if model.has_source else Reading(
        sample.engine_of(model.c), model.params, model.flags.sampling)

    def answer(line, pressed):
        prompt = talk.ask(line, note) if talk else make_prompts(
            model.network, model.c, model.tokenizer, [line])[0]
        text = say(model, prompt, reading, pressed)
        if talk and (text or not pressed):
            talk.keep(line, text)

    def begin(system):
        talk.begin(system)
        return f"a new conversation{', with this system message' if system else ''}"

    commands = {
        "reset": ("forget what was said, and begin anew", lambda _: begin(talk.system)),
        "system": ("TEXT: begin anew, and tell the model this first", begin)} if talk else {}
    terminal.converse("Talk to the model" if talk else "Each line is continued", answer, commands,
                      reading and reading.compile(sample.draw))


def say(model: Model, prompt: Prompt, reading: Reading | None, pressed: Sequence[int]) -> str:
    """Print an answer while it is generated, until Ctrl-C is pressed. Returns its text."""
    flags, tokens = model.flags, model.flags.tokens
    if reading:
        pieces = reading.stream(prompt.ids, tokens, flags.seed, model.ends, sample.draw,
                                flags.stop_at_context)
        if len(prompt.ids) > reading.context:
            note(f"that is {len(prompt.ids):,} tokens: the last {reading.context:,}, the model's "
                 f"context, are read")
    else:
        tokens = max_new_tokens(model.network, model.c, prompt.ids, tokens)
        pieces = sample.stream(
            model.params, [prompt.ids], model.c, tokens, flags.sampling, seed=flags.seed,
            stop=model.ends, source=[prompt.source], piece=1, say=note)

    def status():
        return "reading ..." if reading and reading.is_ready else "compiling ..."

    pieces = terminal.in_background(pieces, pressed, status)
    first, answer = list(itertools.islice(pieces, 1)), model.answer(prompt, tokens)
    terminal.show(itertools.chain(first, pieces), [answer], pressed=pressed)
    if reading and reading.has_rolled:
        note(f"the context of {reading.context:,} tokens was full: the answer went on from its "
             f"last half")
    if not pressed and answer.reason != "stop":
        note(f"--tokens {tokens} ended this answer" if answer.reason == "length" else
             "the context is full")
    return answer.text


# -------------------------------------------------------------------------------------------
# Scores

def score_texts(model: Model, file: Input) -> None:
    """Print the log-probability of each text of the file --score."""
    flags = model.flags
    texts, rows, sources = scored_texts(model.network, model.c, model.tokenizer, file,
                                        flags.by == "line")
    parts = [slice(at, at + flags.batch) for at in range(0, len(rows), flags.batch)]
    found = (pair for part in parts for pair in sample.score(
        model.params, rows[part], model.c, sources and sources[part], flags.batch))
    terminal.show_scores(texts, found, flags.json)


def score_choices(model: Model, file: Input) -> None:
    """Print how many questions of the file --choices the model answers right."""
    flags = model.flags
    items = choices.read_items(file.lines)
    if model.has_source:
        raise ConfigError(f"{file.name}: expected a decoder; this model has an "
                          f"encoder")
    found = choices.logprobs(model.params, model.c, model.tokenizer, items, flags.batch)
    choices.show(items, found, flags.json)
