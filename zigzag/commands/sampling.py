"""sample.py's command line, which answers prompts. tools/ adds chats, scoring and beam search."""

import collections
import itertools
import json
import math
import os
import sys
from typing import Any, Iterable, NamedTuple, Sequence

import jax
import numpy as np

import sample
from zigzag.core import hosts
from zigzag.core.errors import ConfigError, note, printable
from zigzag.core.flags import check_shards, parse_flags
from zigzag.core.mesh import keep_compiled, mesh_of_flags, simulate_own_devices
from zigzag.core.parts import added, has_part, part
from zigzag.disk.tokenizers import Tokenizer
from zigzag.generate.answers import Answer
from zigzag.generate.prompts import (
    GROUPS,
    Flags,
    Prompt,
    check_given,
    make_prompts,
    needed_tokenizer,
    read_input,
    special_ids,
    step_of,
)
from zigzag.generate.rows import check_writes, context_of
from zigzag.parallel.network import Network, config_of_run, network_of

INPUTS = ("prompt", "prompts", "source")
# {a part's flag: the module to run instead of answering prompts}
COMMANDS = collections.ChainMap(*added("SAMPLING"))


class Model(NamedTuple):
    """A model and the command line's flags."""
    flags: Flags
    params: Any             # in the form that decoding uses
    c: Any                  # the network's config
    tokenizer: Tokenizer

    @property
    def network(self) -> Network:
        return network_of(self.c)

    @property
    def has_source(self) -> bool:
        return self.network.source_shape(self.c) is not None

    @property
    def ends(self) -> Sequence[int]:
        """Return the ids that end a text."""
        has_encoder = self.has_source and not self.network.source_ids(self.c)
        return special_ids(self.c, self.tokenizer)[1:2] if has_encoder else self.tokenizer.ends

    def sources(self, prompts: Sequence[Prompt]) -> list[Any] | None:
        if self.network.source_text(self.c):    # the encoder reads the prompts too
            return [(prompt.source, self.tokenizer.with_ends(prompt.text)) for prompt in prompts]
        return [prompt.source for prompt in prompts] if self.has_source else None

    def room(self, prompt: Prompt) -> int:
        """Count the new ids that fit after a prompt. The model never reads the last one, so it
        needs no room."""
        context = context_of(self.network, self.c)
        return context - min(len(prompt.ids), context) + 1

    def answer(self, prompt: Prompt, tokens: int) -> Answer:
        """Start an answer to a prompt, with no ids yet."""
        ends = self.flags.stop_at_context or self.has_source
        return Answer(self.tokenizer.decode, prompt.ids, self.flags.stop, tokens,
                      self.room(prompt) if ends else sys.maxsize)


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command line. Ctrl-C ends it silently, with status 130."""
    try:
        run(argv)
    except KeyboardInterrupt:
        sys.exit(130)


def run(argv: Sequence[str] | None) -> None:
    """Read the command line's files, then the model, and print the answers."""
    given, _ = parse_flags(Flags, argv, groups=GROUPS)
    check_shards(given)
    check_given(given)
    flags, has_input = Flags(**given), any(name in given for name in (*INPUTS, *COMMANDS))
    chat, system, beams = (given.get(name) for name in ("chat", "system", "beams"))
    is_talk = has_part("tools") and is_conversation() and not (has_input or flags.json or beams)
    if system and not (is_talk or chat):
        raise ConfigError("--system works only in a conversation: with --chat, or on a terminal "
                          "without a prompt")
    command = next((name for name in COMMANDS if given.get(name)), "")
    named = next((name for name in (command, "prompts") if isinstance(given.get(name), str)), "")
    file = read_input(given[named], f"--{named}") if named else None
    if flags.coordinator or flags.distributed:
        _join_processes(flags, has_input)
    keep_compiled(least=0)
    model = Model(flags, *load_model(flags))
    if model.has_source and command:
        raise ConfigError(f"--{command}: expected a decoder; this model has an encoder"
                          + " (sample.score takes its sources)" * (command != "bench"))
    if command:
        part(COMMANDS[command], f"--{command}").run(model, file)
    elif is_talk:
        part("tools.chat", "a conversation").converse(model)
    else:
        texts = [flags.prompt]
        if file or not has_input:
            # Empty standard input is a single empty prompt, which begins a document.
            texts = (file or read_input("-", "")).texts("prompt") or [""]
        prompts = part("tools.chat", "--chat").messages_of(model, texts) if chat else make_prompts(
            model.network, model.c, model.tokenizer, texts, flags.source)
        answer = part("tools.beams", "--beams").write if beams else write
        answer(model, prompts)


def load_model(flags: Flags) -> tuple[Any, Any, Tokenizer]:
    """Return a model's weights for decoding, its network's config and its tokenizer."""
    mesh = mesh_of_flags(flags.mesh, flags.shards)
    if flags.model:
        published = part("published", f"--model {flags.model}")
        return published.load_for_decoding(flags.model, mesh, flags.edited)
    c = config_of_run(flags.run)
    check_writes(network_of(c), c, f"--run {flags.run}", mesh)
    tokenizer = needed_tokenizer(flags.run)
    params, c, _ = sample.load(flags.run, mesh, step_of(flags.run, flags.checkpoint))
    return sample.for_decoding(params, c), c, tokenizer


def is_conversation() -> bool:
    """Return whether input and output are both terminals, so that a user types and reads."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def _join_processes(flags, has_input):
    """Join the other processes. They all compute; only process 0 prints."""
    if not has_input:
        names = ", ".join(f"--{name}" for name in (*INPUTS, *COMMANDS))
        raise ConfigError(f"several processes cannot share one standard input: give one of {names}")
    simulate_own_devices(flags)
    hosts.init_distributed(flags)
    jax.devices()       # fixes the devices, so nothing can simulate others later
    hosts.watchdog.arm("")
    # The library that connects CPUs writes to file descriptor 1; redirect that to stderr.
    out = os.devnull if jax.process_index() else os.dup(1)
    sys.stdout = open(out, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)
    os.dup2(2, 1)


# -------------------------------------------------------------------------------------------
# Answers to prompts

def write(model: Model, prompts: Sequence[Prompt]) -> None:
    """Print an answer to each of these prompts."""
    flags = model.flags
    seeds, size = seeds_of(prompts, flags.seed), 16 * flags.batch
    for at in range(0, len(prompts), size):
        some = prompts[at:at + size]
        answers = [model.answer(prompt, flags.tokens) for prompt in some]
        write_answers(model, some, answers, seeds[at:at + size])


def seeds_of(prompts: Sequence[Prompt], seed: int) -> list[int]:
    """Return a seed per prompt: `seed` plus the number of identical prompts before it."""
    seen, seeds = collections.Counter(), []
    for prompt in prompts:
        key = prompt.text, hash(np.asarray(prompt.source).tobytes())
        seeds.append(seed + seen[key])
        seen[key] += 1
    return seeds


def write_answers(model: Model, prompts: Sequence[Prompt], answers: Sequence[Answer],
                  seeds: Sequence[int], piece: int = 8) -> None:
    """Generate answers to these prompts, printing them as they grow."""
    flags = model.flags
    pieces = sample.stream(
        model.params, [prompt.ids for prompt in prompts], model.c, flags.tokens, flags.sampling,
        seed=seeds, source=model.sources(prompts), stop=model.ends, piece=piece, logprobs=True,
        stop_at_context=flags.stop_at_context, say=note, batch=flags.batch,
        ended=lambda n: answers[n].reason)
    show(pieces, prompts, answers, flags)


def show(pieces: Iterable[Sequence], prompts: Sequence[Prompt], answers: Sequence[Answer],
         flags: Flags) -> None:
    """Print the answers in order, as they grow or, with --json, once they have ended. Each piece
    holds, for every answer, the argument to pass to Answer.add."""
    clean = printable if sys.stdout.isatty() else str
    before, after = ([nothing] * len(answers) for nothing in (None, ((), ())))
    at = sent = 0
    for piece in itertools.chain([before], pieces, [after]):
        for answer, pair in zip(answers, piece, strict=True):
            answer.add(pair)
        while at < len(answers):
            text, has_ended = prompts[at].begin + answers[at].shown(), answers[at].reason
            if not flags.json:
                print(clean(text[sent:]), end="\n" if has_ended else "", flush=True)
            elif has_ended:
                print(json.dumps(record(prompts[at], answers[at], flags)), flush=True)
            sent = len(text)
            if not has_ended:
                break
            at, sent = at + 1, 0        # move on once this answer has ended


def record(prompt: Prompt, answer: Answer, flags: Flags) -> dict[str, Any]:
    """Return an answer as a JSON object."""
    found = {"prompt": prompt.text, "text": answer.text, "tokens": len(answer.ids),
             "stopped": answer.reason}
    if flags.logprobs:
        found |= {"ids": answer.ids, "logprobs": answer.logprobs,
                  "logprob": math.fsum(answer.logprobs)}
    return found if prompt.score is None else found | {"score": prompt.score}
