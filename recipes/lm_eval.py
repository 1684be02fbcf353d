"""Run the tasks of EleutherAI's lm_eval (pip install lm_eval) on a run or a published model.

    python recipes/lm_eval.py --model smollm2 --tasks hellaswag,arc_easy
    python recipes/lm_eval.py --run out --shards 2 --tasks lambada_openai --limit 100

    --model DIR         a Hugging Face folder with a published model
    --run DIR           or a run's folder, the --out of train.py
    --checkpoint STEP   the run's checkpoint at this step, or best (default: the newest)
    --shards N          how many devices to split the model over
    --mesh AXIS=N,...   or a mesh; data takes the remaining devices
    --edited true       load a published model into an edited model.py

These flags are sample.py's. All other flags go to lm_eval's own command. A row must fit into
seq_len, including the ids to score, so the context is a token shorter than in lm_eval's hf model.
"""

import sys

if __name__ == "__main__":
    import importlib.util
    import os

    # This file has the package's name, so Python must not search this folder, but its parent.
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    wants_help = not {"-h", "--help"}.isdisjoint(sys.argv)
    if wants_help:
        print(__doc__, flush=True)
    if importlib.util.find_spec("lm_eval") is None:
        print("error: recipes/lm_eval.py needs the package lm_eval: pip install lm_eval",
              file=sys.stderr)
        sys.exit(2)
    if wants_help:
        print("lm_eval's own help (its --model and --model_args are set here):\n", flush=True)

import argparse
import functools
import itertools
import json

from lm_eval import utils
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from tqdm import tqdm

import sample
from zigzag.commands.sampling import load_model
from zigzag.generate.prompts import Flags

# The flags of sample.py that choose the model, and the ones that lm_eval's tasks may set.
FLAGS = {"model": str, "run": str, "checkpoint": str, "shards": int, "mesh": str,
         "edited": lambda text: text.lower() in ("true", "1", "yes")}
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@register_model("zigzag")
class Zigzag(TemplateLM):
    """A decoder with the methods that lm_eval calls. `flags` are some of sample.py's flags."""

    def __init__(self, batch_size: str | int = 8, max_batch_size: int | None = None,
                 device: str | None = None, **flags):
        super().__init__()
        self.params, self.config, self.tokenizer = load_model(Flags(**flags))
        self.batch = 8 if str(batch_size).startswith("auto") else int(batch_size)
        self.max_length = self.config.seq_len - 1
        self.score = functools.partial(sample.score, self.params, config=self.config,
                                       batch=self.batch, likeliest=True)

    @property
    def eot_token_id(self):
        return self.tokenizer.ends[0]

    @property
    def prefix_token_id(self):
        return self.tokenizer.separator

    def tok_encode(self, string, add_special_tokens=None, **_):
        encode = self.tokenizer.encode if add_special_tokens is False else self.tokenizer.prompt
        return [int(i) for i in encode(string)]

    def _loglikelihood_tokens(self, requests, disable_tqdm=False, **_):
        """Return (log-probability, whether greedy decoding yields it) for each continuation.
        Requests are (texts, ids of the context, ids of the continuation)."""
        rows = [context + ids for _, context, ids in requests]
        given = [len(context) for _, context, _ in requests]
        found = []
        for some in self._batches(range(len(rows)), disable_tqdm, 16 * self.batch):
            part = slice(some[0], some[-1] + 1)
            found += self.score(rows[part], given=given[part])
        return [(total, count == best) for total, count, best in found]

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        """Return the log-probability of each text, split into windows by lm_eval."""
        windows = [(number, (None, *utils.make_disjoint_window(window)))
                   for number, request in enumerate(requests)
                   for window in utils.get_rolling_token_windows(
                       self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length, 1)]
        totals = [0.0] * len(requests)
        scores = self._loglikelihood_tokens([window for _, window in windows], disable_tqdm)
        for (number, _), (total, _) in zip(windows, scores):
            totals[number] += total
        return totals

    def generate_until(self, requests, disable_tqdm=False):
        """Generate text after each prompt, up to the first of its stop texts."""
        texts = []
        for options, group in itertools.groupby(
                (request.args for request in requests), key=lambda pair: pair[1]):
            prompts = [prompt for prompt, _ in group]
            for some in self._batches(prompts, disable_tqdm, 16 * self.batch):
                texts += self._generate(some, normalize_gen_kwargs(options))
        return texts

    def _generate(self, prompts, options):
        tokens, until = options["max_gen_toks"], options["until"]
        options.setdefault("temperature", 1.0 if options["do_sample"] else 0.0)
        if tokens >= self.max_length:
            raise ValueError(f"max_gen_toks {tokens}: the context has {self.max_length} tokens; "
                             f"--gen_kwargs max_gen_toks=N asks for fewer")
        rows = [self.tok_encode(prompt)[-(self.max_length - tokens):] for prompt in prompts]
        found = sample.generate(
            self.params, rows, self.config, tokens, tokenizer=self.tokenizer, batch=self.batch,
            stop=[*filter(None, until), *self.tokenizer.ends],
            **{name: options[name] for name in SAMPLING if name in options})
        return [functools.reduce(lambda text, end: text.split(end)[0], filter(None, until), text)
                for text in map(self.tokenizer.decode, found)]

    def _batches(self, items, disable_tqdm, size):
        for first in tqdm(range(0, len(items), size), disable=disable_tqdm):
            yield items[first:first + size]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name, kind in FLAGS.items():
        parser.add_argument(f"--{name}", type=kind, default=argparse.SUPPRESS)
    flags, others = parser.parse_known_args(argv)
    sys.argv[1:] = ["--model", "zigzag", "--model_args", json.dumps(vars(flags)),
                    "--batch_size", "8", *others]
    cli_evaluate()


if __name__ == "__main__":
    sample.run_main(main)
