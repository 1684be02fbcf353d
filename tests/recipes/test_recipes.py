"""The scripts in recipes/."""

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sample
import train
from recipes import ddpg, dpo, dpsgd, grpo, lora, ppo
from tests.common import (
    command,
    ends,
    full,
    hosts,
    log_probabilities,
    net,
    peer,
    published_model,
)
from tests.helpers import ROOT, KeepRows, StopAt, config_of, mesh_of, needed, rows_in, without_times
from zigzag.run import running as begin

published = needed("published")


def run_lm_eval(*words, **environment):
    return command(*words, file="recipes/lm_eval.py", cwd=ROOT.parent, env=environment)


@pytest.mark.full
def test_lm_eval_is_found_or_missed_by_its_name(tmp_path):
    """A script that imports itself instead of the package of its name; a traceback without it."""
    if importlib.util.find_spec("lm_eval"):     # then hide it
        (tmp_path / "sitecustomize.py").write_text(
            "import importlib.util as u\nfind = u.find_spec\n"
            "u.find_spec = lambda n, *a: None if n == 'lm_eval' else find(n, *a)\n")
    done = run_lm_eval(PYTHONPATH=tmp_path)
    assert done.returncode == 2 and done.stderr == (
        "error: recipes/lm_eval.py needs the package lm_eval: pip install lm_eval\n")
    done = run_lm_eval("--help", PYTHONPATH=tmp_path)
    assert done.returncode == 2 and "    --run DIR " in done.stdout


@pytest.mark.full
def test_the_help_of_lm_eval_begins_with_ours(tmp_path):
    """lm_eval's help alone, in which --run is not, and --model means something else."""
    for name, content in {
            "__init__": "", "utils": "", "api/__init__": "", "models/__init__": "",
            "__main__": "import sys\ndef cli_evaluate(): print('its help', sys.argv[1:])",
            "api/model": "class TemplateLM: pass",
            "api/registry": "def register_model(name): return lambda kind: kind",
            "models/utils": "def normalize_gen_kwargs(options): return options"}.items():
        path = tmp_path / "lm_eval" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    for word in ("--help", "-h"):
        done = run_lm_eval(word, PYTHONPATH=tmp_path)
        assert done.returncode == 0, done.stderr
        ours, _, theirs = done.stdout.partition("lm_eval's own help")
        assert ours.startswith("Run the tasks of EleutherAI's lm_eval")
        assert "python recipes/lm_eval.py --model smollm2 --tasks" in ours
        assert all(f"    --{name} " in ours for name in (
            "model", "run", "checkpoint", "shards", "mesh"))
        given = ["--model", "zigzag", "--model_args", "{}", "--batch_size", "8", word]
        assert theirs.endswith(f"its help {given}\n")


@pytest.fixture
def folder(tmp_path, text):
    """A published model with weights large enough to have opinions."""
    pytest.importorskip("lm_eval")
    return published_model(tmp_path / "tiny", text, 3, layers=1, seq_len=32, kernel=False)


def test_lm_eval_gets_what_forward_says(folder):
    """A context that is scored; the end of greedy decoding that no id says; windows of a long text
    that overlap; an answer with its stop text, or one of another request's options."""
    from recipes.lm_eval import Zigzag
    lm = Zigzag(model=str(folder), batch_size="2", device="cpu")
    params, config, tokenizer = sample.load(folder)

    def requests(*args):
        return [SimpleNamespace(args=a) for a in args]

    pairs = [("bala 3", " and"), ("x", " 17 and four"), ("3 and ", "bala"), ("", "bala")]
    for (context, text), (total, is_greedy) in zip(pairs, lm.loglikelihood(requests(*pairs))):
        begin = [] if context else [tokenizer.separator]
        ids = [*begin, *tokenizer.prompt(context + text)]
        before = len(begin or tokenizer.prompt(context.rstrip()))
        logs, = log_probabilities(params, config, [ids])
        assert total == pytest.approx(logs[before - 1:].sum(), abs=1e-3)
        assert not is_greedy
    new, = sample.generate(params, [tokenizer.prompt("bala")], config, 4, temperature=0)
    (_, is_greedy), = lm._loglikelihood_tokens([(None, tokenizer.prompt("bala"), new)])
    assert is_greedy
    text, want = "bala 3 and 17 " * 9, 0.0
    ids, most = [tokenizer.separator, *tokenizer.prompt(text)], 31
    for begin in range(0, len(ids) - 1, most):
        # (The last window begins earlier, so that it is full.)
        here = ids[begin:begin + most + 1]
        start = max(0, begin + len(here) - most - 1)
        logs, = log_probabilities(params, config, [ids[start:begin + len(here)]])
        want += logs[begin - start:].sum()
    assert lm.loglikelihood_rolling(requests((text,))) == [pytest.approx(want, abs=1e-3)]
    whole, = lm.generate_until(requests(("bala 3", {"max_gen_toks": 9})))
    assert whole == tokenizer.decode(sample.generate(
        params, [tokenizer.prompt("bala 3")], config, 9, temperature=0,
        stop=tokenizer.ends)[0]) != ""
    with pytest.raises(ValueError, match="the context has 31"):
        lm.generate_until(requests(("bala 3", {"max_gen_toks": 31})))
    stop = whole[2]
    assert lm.generate_until(requests(
        ("bala 3", {"until": stop, "max_gen_toks": 9}), ("bala 3", {"max_gen_toks": 1}),
        ("bala 3", {"max_gen_toks": 1}), ("bala 3", {"max_gen_toks": 1}))) == [
            whole.split(stop)[0], *3 * [tokenizer.decode(sample.generate(
                params, [tokenizer.prompt("bala 3")], config, 1, temperature=0)[0])]]


@pytest.mark.full
def test_lm_eval_gives_the_accuracy_of_choices(folder, tmp_path, capsys):
    """Flags that do not reach lm_eval, or the model; a choice without its space."""
    rng = np.random.default_rng(0)
    items = [{"question": f"bala {a}", "choices": ["and", "bala 3 and", f"{b}"], "answer": a % 3}
             for a, b in rng.integers(0, 99, (12, 2)).tolist()]
    (tmp_path / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/ours.yaml").write_text(f"""
task: ours
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path / "items.jsonl"}}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
""")
    done = run_lm_eval(
        "--model", folder, "--mesh", "data=1,tensor=2", "--tasks", "ours",
        "--include_path", tmp_path / "tasks", "--output_path", tmp_path / "found",
        HF_HUB_OFFLINE="1", HF_DATASETS_CACHE=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stderr
    path, = (tmp_path / "found").rglob("results_*.json")
    found = json.loads(path.read_text())["results"]["ours"]
    sample.main(["--model", str(folder), "--choices", str(tmp_path / "items.jsonl"), "--json"])
    want = json.loads(capsys.readouterr().out.splitlines()[-1])
    for name in ("acc", "acc_stderr", "acc_norm", "acc_norm_stderr"):
        assert found[name.replace("_stderr", "") + ("_stderr" * ("stderr" in name)) + ",none"] == (
            pytest.approx(want[name]))


# A nanoGPT whose steps take 10 ms, and whose loss is the mean of its targets.
NANOGPT = {"train.py": """
import sys, torch
given = dict(word[2:].split("=") for word in sys.argv[2:])
for i in range(int(given["max_iters"]) + 1):
    print(f"iter {i}: loss 1.0000, time 10.00ms, mfu 0.01%")
open(given["out_dir"] + "/asked", "w").write(f"{given['lr_decay_iters']} {i} seed 1337"
    if "lr_decay_iters" in given else "")
torch.save({"model": {}, "model_args": {"block_size": 32}}, given["out_dir"] + "/ckpt.pt")
""", "model.py": """
import torch
GPTConfig = dict
class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        print("number of parameters: 0")
    def forward(self, x, y):
        assert x.shape == y.shape == (1, 32)
        return None, y.float().mean()
"""}


@pytest.mark.full
def test_five_minutes_beside_nanogpt(text, tmp_path):
    """A schedule that does not end with the minutes; other held-out bytes, or targets that are
    inputs; a second line on the standard output."""
    peer("torch")
    for name, content in NANOGPT.items():
        (tmp_path / name).write_text(content)
    out = tmp_path / "out"
    done = subprocess.run(
        [ROOT / "recipes/five_minutes.sh", text], text=True, capture_output=True,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
             "MINUTES": "0.01", "SEED": "7", "OUT": str(out), "NANOGPT": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    *_, row = [row for row in rows_in(out / "metrics.jsonl") if "bits_per_byte" in row]
    held_out = np.fromfile(out / "data/held_out.bin", np.uint16)
    targets = held_out[1:(len(held_out) - 1) // 32 * 32 + 1]
    bits = targets.mean() * row["bits_per_byte"] / row["eval_loss"]
    assert done.stdout == (f"bits per byte after 0.01 minutes: zigzag "
                           f"{row['bits_per_byte']:.3f}, nanoGPT {bits:.3f}\n")
    assert json.loads((out / "config.json").read_text())["seed"] == 7
    assert (out / "nanogpt/asked").read_text() == "60 60 seed 7"
    same = np.fromfile(out / "nanogpt/train.bin", np.uint16)
    np.testing.assert_array_equal(same, np.fromfile(out / "data/train.bin", np.uint16))


# -------------------------------------------------------------------------------------------
# Algorithms

# Flags with which few updates of a recipe are quick.
RECIPES = {name: ["--batch", "16"] for name in (
    "classify", "contrastive", "ddpg", "diffusion", "dpo", "dpsgd", "fedavg", "lora", "maml",
    "ppo", "regress")} | {
        "caption": ["--batch", "8", "--eval_every", "9"], "grpo": ["--batch", "32"],
        "distill": ["--batch", "8", "--seq_len", "16", "--layers", "1"],
        "seq2seq": ["--batch", "8", "--eval_every", "9"], "uva3d": ["--microbatches", "1"]}
QUICK = {"ddpg", "dpo", "grpo", "regress", "seq2seq", "uva3d"}    # for .ci/run
OF_SKLEARN = {"classify", "contrastive", "diffusion", "fedavg", "regress"}    # (its data)
MESHES = ["data=4", "tensor=2", "fsdp=2,tensor=2"]


@pytest.mark.slow
def test_the_help_of_a_recipe_is_its_own(monkeypatch, capsys):
    """train.py's help, with values that the recipe does not have, and no word of what it does; a
    distill that asks for a teacher first; a shell script that takes --help for a file's name."""
    for name in "dpo", "distill":
        module = importlib.import_module(f"recipes.{name}")
        monkeypatch.setitem(sys.modules, "__main__", module)
        with pytest.raises(SystemExit) as e:
            module.main(["--seq_len", "77", "--help"])
        says, _, options = capsys.readouterr().out.partition("its own defaults:")
        assert not e.value.code and says.strip() == module.__doc__.strip()
        assert "training example  [77]" in options and "--optimizer" not in options
        assert ("updates of the weights  [600]" in options) == (name == "dpo")
        assert "python train.py --help" in options
    for path in (ROOT / "recipes").glob("*.sh"):
        done = subprocess.run([path, "--help"], text=True, capture_output=True)
        assert done.returncode == 0 and not done.stderr and "pipefail" not in done.stdout
        assert len(done.stdout.splitlines()) > 3, (path, done)


@pytest.fixture
def recipe(monkeypatch, tmp_path, text):
    """recipe(name, mesh, *flags, stop): the rows of its updates, and its metrics.jsonl."""
    fit = train.fit
    pairs = list(dpo.made_pairs(99))
    monkeypatch.setattr(dpo, "made_pairs", lambda count=99: pairs[:count])

    def run(name, mesh, *words, stop=0, out="run"):
        rows = []
        if name in OF_SKLEARN:
            peer("sklearn")
        monkeypatch.setattr(train, "fit", lambda *given, **named: fit(
            *given, **named, mesh=mesh_of(mesh), say=StopAt(stop) if stop else KeepRows(rows, [])))
        if name == "distill":
            config = config_of(layers=1, seq_len=16, vocab_size=257, kernel=False)
            if not (tmp_path / "teacher").exists():
                # (Not the student's own first weights, with which the gradient is all rounding.)
                published.save_hf(tmp_path / "teacher", net.init(config, jax.random.key(1)), config)
            words = *words, "--teacher", tmp_path / "teacher", "--data", text
        if name == "lora":
            if not (tmp_path / "sums").exists():
                lora.main(["--steps", "1", "--layers", "1", "--eval_every", "0", "--out",
                           str(tmp_path / "sums")])
                rows.clear()
            words = *words, "--init_from", tmp_path / "sums", "--lora_rank", 4
        importlib.import_module(f"recipes.{name}").main(list(map(str, [
            "--eval_every", 0, "--fsdp_min", 1, "--decay", "constant", "--dtype", "float32",
            "--out", out and tmp_path / out, *RECIPES[name], *words])))
        return [row for row in rows if "loss" in row], tmp_path / out / "metrics.jsonl"

    return run


@pytest.mark.parametrize("name", [
    name if name in QUICK else full(name) for name in RECIPES])
def test_a_recipe_takes_two_updates_on_a_mesh(recipe, name, monkeypatch):
    """A recipe that no longer runs (the next test compares its numbers); answers drawn from other
    weights, or at another temperature, than are trained."""
    monkeypatch.setattr(begin, "must_compare", lambda *_: False)    # (half of the time)
    rows, _ = recipe(name, "fsdp=2,tensor=2", "--steps", 2, "--eval_every", 0, "--metric", "",
                     out="run" if name == "distill" else "")        # (it opens --data for a run)
    assert len(rows) == 2 and np.isfinite([row["loss"] for row in rows]).all()
    assert name != "grpo" or max(row["shift_since_drawn"] for row in rows) < 1e-4


@pytest.mark.full
def test_grpo_says_when_there_is_nothing_to_learn_from(recipe, monkeypatch, capfd):
    """Hours in which no answer is better than another, without a word."""
    monkeypatch.setattr(grpo, "advantages", lambda rewards: rewards * 0.0)
    recipe("grpo", "", "--steps", 20, "--batch", 8, "--eval_every", 0)
    assert capfd.readouterr().out.count("step 20: in the last 20 updates all answers") == 1


@pytest.mark.full
def test_devices_do_not_wait_for_each_other(tmp_path):
    """A program in which some of a CPU's devices come to a collective of the pipeline's loop first,
    others to one beside the loop. (It is the comparison with one device.)"""
    flags = "--layers 2 --dropout 0 --qk_norm false --positions rotary --microbatches 2 --batch 4"
    done = command("--mesh", "pipe=2,tensor=2", *flags.split(), "--accuracy", "false", "--check",
                   "--steps", 1, "--out", tmp_path / "run", file="-m recipes.uva3d", env={
                       "XLA_FLAGS": "--xla_force_host_platform_device_count=4 "
                                    "--xla_cpu_collective_call_terminate_timeout_seconds=30"})
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]


@pytest.mark.full
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_the_same_on_a_mesh(recipe, name, mesh):
    """A gradient of second order, of clipped rows or of rows that are compared, which a mesh adds
    up wrongly; answers or episodes that depend on the mesh."""
    want, found = ([row["loss"] for row in recipe(name, where, "--steps", 3, out=out)[0]]
                   for where, out in (("", "run"), (mesh, "other")))
    assert len(want) == 3 and found == pytest.approx(want, rel=1e-5, abs=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_stops_and_goes_on(recipe, name):
    """A buffer, an average or a drawn answer that a stop loses; a batch that is seen twice."""
    _, whole = recipe(name, "fsdp=2,tensor=2", "--steps", 4)
    recipe(name, "fsdp=2,tensor=2", "--steps", 4, stop=2, out="other")
    _, other = recipe(name, "fsdp=2,tensor=2", "--steps", 4, out="other")
    assert without_times(other) == without_times(whole)


def test_each_rows_gradient_is_clipped_and_the_sum_has_noise(monkeypatch):
    """A sum that is clipped as one; noise of another size, or the same in each update."""
    params = dpsgd.init(jax.random.key(0))
    batch = dpsgd.collate(dpsgd.points(8, 0))
    found = jax.grad(lambda p: dpsgd.loss(p, batch)[0])(params)
    want = jax.tree.map(jnp.zeros_like, params)
    for i in range(8):
        own = jax.grad(dpsgd.of_row)(params, {name: x[i] for name, x in batch.items()})
        norm = jnp.sqrt(sum((g**2).sum() for g in jax.tree.leaves(own)))
        want = jax.tree.map(lambda a, g: a + g * jnp.minimum(1, dpsgd.CLIP / norm), want, own)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    zeros, given = {"w": jnp.zeros(100_000), "b": jnp.zeros(100_000)}, []
    monkeypatch.setattr(train, "fit", lambda *_, optimizer, **__: given.append(optimizer))
    dpsgd.main(["--batch", "2"])
    means, state = [], given[0].init(zeros)
    for _ in range(2):
        _, state = given[0].update(zeros, state)
        means.append(state[1][0].mu)            # Adam's: a tenth of the first gradient, then
    first = {name: x / 0.1 for name, x in means[0].items()}
    second = {name: (x - 0.9 * means[0][name]) / 0.1 for name, x in means[1].items()}
    assert float(first["w"].std()) == pytest.approx(0.5, rel=0.02)
    # Chi-square, in 20 bins of equal probability: 43.8 is exceeded once in a thousand times.
    inside = (1 + jax.scipy.special.erf(first["w"] / 0.5 / 2**0.5)) / 2
    bins = np.histogram(inside, 20, (0, 1))[0]
    assert ((bins - 5000.0) ** 2 / 5000).sum() < 43.8, bins
    for other in (first["b"], second["w"]):
        assert abs(float(jnp.corrcoef(first["w"], other)[0, 1])) < 0.02


def test_preferences_are_learned_by_the_papers_formula():
    """A reference that is added, or subtracted from one answer alone; another BETA."""
    logs, reference = np.random.default_rng(0).normal(-5, 2, (2, 6, 2)).astype(np.float32)
    found, margin = dpo.dpo_loss(logs, reference)
    for i, ((chosen, rejected), (first, other)) in enumerate(zip(logs, reference)):
        want = 0.1 * (float(chosen - first) - float(rejected - other))
        assert float(found[i]) == pytest.approx(np.log1p(np.exp(-want)), rel=1e-5)
        assert (float(margin[i]) > 0) == (want > 0)


@pytest.mark.full
def test_preferences_are_learned_as_trl_learns_them(recipe, tmp_path, text, monkeypatch):
    """Probabilities of the prompt, or none of the end; a reference that moves with the weights."""
    trl, transformers, datasets = map(pytest.importorskip, ("trl", "transformers", "datasets"))
    folder = published_model(tmp_path / "model", text, layers=2, d_model=32, heads=4, seq_len=32,
                             kernel=False)
    # (A prompt that ends in a space would be cut elsewhere: trl reads it and the answer as one.)
    pairs = [{"prompt": pair["prompt"].rstrip(), "chosen": " " + pair["chosen"],
              "rejected": " " + pair["rejected"]} for pair in dpo.made_pairs(40)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    encoded = dpo.encoded

    def all_learned(*given):
        """No pair is held out, so each update has all of them."""
        learned, held_out = encoded(*given)
        return learned + held_out, held_out

    monkeypatch.setattr(dpo, "encoded", all_learned)
    rows, _ = recipe(
        "dpo", "", "--model", folder, "--data", tmp_path / "pairs.jsonl", "--steps", 4, "--batch",
        len(pairs), "--warmup", 0, "--beta2", 0.999, "--lr", 0.001)
    trainer = trl.DPOTrainer(
        transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32"),
        args=trl.DPOConfig(
            str(tmp_path / "trl"), per_device_train_batch_size=len(pairs), max_steps=4,
            learning_rate=0.001, lr_scheduler_type="constant", logging_steps=1, beta=dpo.BETA,
            bf16=False, gradient_checkpointing=False, report_to=[], use_cpu=True, max_length=None),
        train_dataset=datasets.Dataset.from_list(pairs),
        # (As its file says: before version 5, LLaMA's own class puts <s> before every text.)
        processing_class=transformers.PreTrainedTokenizerFast.from_pretrained(
            folder, pad_token="</s>"))
    trainer.train()
    want = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert len(want) == 4 and [row["loss"] for row in rows] == pytest.approx(want, rel=1e-4)


def test_rewards_are_learned_by_the_papers_formula():
    """Advantages over the whole batch; a ratio that is clipped where it should not be."""
    rng = np.random.default_rng(0)
    rewards = rng.integers(0, 2, (3, grpo.GROUP, 2))
    advantage = grpo.advantages(rewards)
    for group, of_group in zip(rewards, advantage):
        for digit in range(2):
            r = group[:, digit]
            np.testing.assert_allclose(of_group[:, digit], (r - r.mean()) / (r.std() + 1e-4))
    logits, drawn = rng.normal(size=(4, 2, 5)), rng.normal(-1.6, 0.3, (4, 2))
    answer, advantage = rng.integers(0, 5, (4, 2)), rng.normal(size=(4, 2))
    found, _ = grpo.grpo_loss(*map(jnp.asarray, (logits, answer, drawn, advantage)))
    for row in range(4):
        want = 0.0
        for t in range(2):
            p = np.exp(logits[row, t]) / np.exp(logits[row, t]).sum()
            ratio, a = p[answer[row, t]] / np.exp(drawn[row, t]), advantage[row, t]
            gain = min(ratio * a, np.clip(ratio, 0.8, 1.2) * a)
            want -= (gain - grpo.ENTROPY * (p * np.log(p)).sum()) / 2
        assert float(found[row]) == pytest.approx(want, rel=1e-5)


@pytest.mark.full
def test_answers_are_the_same_in_two_processes(tmp_path):
    """Answers that each process draws for itself; rewards of one that the other does not see."""
    words = ("--steps", 3, "--batch", 32, "--eval_every", 0, "--fsdp_min", 1, "--dtype", "float32",
             "--mesh", "fsdp=2,tensor=2", "--out")
    two = hosts(2, *words, tmp_path / "two", file="-m recipes.grpo")
    assert all(status == 0 for status, *_ in ends(two))
    one = command(*words, tmp_path / "one", file="-m recipes.grpo")
    assert one.returncode == 0, one.stderr
    rows, others = (rows_in(tmp_path / name / "metrics.jsonl") for name in ("one", "two"))
    for a, b in zip(rows, others, strict=True):
        for name in {"loss", "reward"} & a.keys():
            assert a[name] == pytest.approx(b[name], rel=1e-5)


def test_clients_that_are_the_same_learn_as_one():
    """An average of gradients, of other weights, or of a sum."""
    peer("sklearn")
    fedavg = importlib.import_module("recipes.fedavg")
    (client, *_), _ = fedavg.clients()
    params, batch = fedavg.init(jax.random.key(0)), fedavg.collate([client] * 4)
    grads = jax.grad(lambda params: fedavg.loss(params, batch)[0] / 4)(params)
    x, labels = client
    want = params
    for _ in range(fedavg.LOCAL):
        def mean(w):
            logs = jax.nn.log_softmax(fedavg.logits(w, x))
            return -logs[jnp.arange(len(x)), labels].mean()

        want = jax.tree.map(lambda w, g: w - fedavg.RATE * g, want, jax.grad(mean)(want))
    for w, g, after in zip(*map(jax.tree.leaves, (params, grads, want)), strict=True):
        np.testing.assert_allclose(w - g, after, atol=1e-6)


@pytest.mark.parametrize("name, of_recipe", [("CartPole-v1", ppo), ("Pendulum-v1", ddpg)])
def test_an_environment_is_that_of_gymnasium(name, of_recipe):
    """A sign, a length or a bound that makes the task another one."""
    world = peer("gymnasium").make(name).unwrapped
    world.reset(seed=0)
    rng = np.random.default_rng(0)
    for _ in range(20):
        if of_recipe is ppo:
            action = int(rng.integers(2))
            found, over = ppo.move(jnp.array(world.state), action)
            _, _, want, *_ = world.step(action)
            assert bool(over) == want
            if want:
                world.reset(seed=1)
                continue
        else:
            torque = float(rng.uniform(-1, 1))
            found, reward = ddpg.move(jnp.array(world.state), jnp.float32(torque))
            _, want, *_ = world.step(np.array([2 * torque]))
            assert float(reward) == pytest.approx(float(want), rel=1e-4, abs=1e-5)
        np.testing.assert_allclose(found, world.state, rtol=1e-4, atol=1e-5)
