"""How fast an NVIDIA GPU trains and generates, beside torch: .ci/gpu runs this, in some minutes.

    python -m tests.gpu             print tables for docs/measurements.md
    python -m tests.gpu ours 0      measure one size; theirs 0: the same model in torch

Each measurement is a process of its own, with a GPU for itself. The peer is transformers' Llama of
the same sizes, with the same tokens in a batch: weights in float32 and products in bfloat16
(autocast), scaled_dot_product_attention, torch.compile, fused AdamW, gradients clipped.
"""

import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
VOCABULARY = 8192
# name: layers, d_model, heads, d_ff, seq_len, batch, more flags of ours
SIZES = {"GPT-2's": (12, 768, 12, 2048, 1024, 32, []),
         "GPT-2 medium's": (24, 1024, 16, 2816, 1024, 16, []),
         "1.2B": (24, 2048, 16, 5632, 2048, 8, ["--remat", "selective"])}


def text(folder):
    """A file with something to learn a tokenizer from."""
    rng, lines = random.Random(0), (ROOT / "README.md").read_text().splitlines()
    path = Path(folder) / "text.txt"
    path.write_text("\n".join(rng.choice(lines) for _ in range(200_000)))
    return str(path)


def ours(name, *more):
    """The last line of train.py --bench, and the mfu that it prints."""
    layers, d_model, heads, d_ff, seq_len, batch, flags = SIZES[name]
    with tempfile.TemporaryDirectory() as folder:
        said = subprocess.run([
            sys.executable, "train.py", "--bench", "--data", text(folder), "--vocab_size",
            str(VOCABULARY), "--layers", str(layers), "--d_model", str(d_model), "--heads",
            str(heads), "--d_ff", str(d_ff), "--seq_len", str(seq_len), "--batch", str(batch),
            *flags, *more], cwd=ROOT, text=True, capture_output=True)
    if said.returncode:
        raise SystemExit(said.stdout[-500:] + said.stderr[-2000:])
    return json.loads(said.stdout.splitlines()[-1]) | {
        "mfu": re.search(r"mfu (\S+)", said.stdout)[1]}


def theirs(name, steps=30):
    """The same figures of torch, in this process."""
    import torch
    import transformers
    layers, d_model, heads, d_ff, seq_len, batch, _ = SIZES[name]
    begin, device, first = time.perf_counter(), torch.device("cuda"), 0.0
    torch.set_float32_matmul_precision("high")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=d_model, intermediate_size=d_ff,
        num_hidden_layers=layers, num_attention_heads=heads, max_position_embeddings=seq_len,
        attn_implementation="sdpa", use_cache=False)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=True)
    compiled, took = torch.compile(model), []
    for _ in range(steps):
        ids, start = torch.randint(0, VOCABULARY, (batch, seq_len), device=device), time.time()
        torch.cuda.synchronize()
        with torch.autocast("cuda", torch.bfloat16):
            loss = compiled(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        took.append(time.time() - start)
        first = first or time.perf_counter() - begin
    step = statistics.median(took[steps // 3:])
    return {"tokens_per_second": batch * seq_len / step, "step_seconds": step,
            "peak_bytes": torch.cuda.max_memory_allocated(), "first_step_seconds": first}


def published(folder):
    """A folder of the shape of SmolLM2-135M with random weights, which transformers wrote."""
    import tokenizers
    import transformers
    config = transformers.LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.train_from_iterator(["some text"], tokenizers.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()))
    made.save(str(Path(folder) / "tokenizer.json"))


def row(name, what, found):
    share = ""
    if "mfu" in found:
        share = f"{found['model_flops_per_second'] / 1e12:.0f}; {found['mfu']}"
    return (f"| {name} | {what} | {found['tokens_per_second']:,.0f} | "
            f"{found['step_seconds'] * 1e3:.1f} ms | {share} | {found['peak_bytes'] / 1e9:.1f} GB "
            f"| {found['first_step_seconds']:.1f} s |")


def measured(*args):
    """ours or theirs, in a process of its own."""
    done = subprocess.run([sys.executable, "-m", "tests.gpu", *map(str, args)], cwd=ROOT, text=True,
                          capture_output=True)
    if done.returncode:
        return {"error": done.stderr[-1000:]}
    return json.loads(done.stdout.splitlines()[-1])


def main():
    if len(sys.argv) > 1:
        which = {"ours": ours, "theirs": theirs}[sys.argv[1]]
        return print(json.dumps(which(list(SIZES)[int(sys.argv[2])], *sys.argv[3:])))
    print("| size | by | tokens/s | a step | Tflop/s; MFU | memory | first step |\n"
          "|---|---|---|---|---|---|---|", flush=True)
    for i, name in enumerate(SIZES):
        for what, args in (("zigzag", ["ours", i]), ("torch", ["theirs", i])):
            found = measured(*args)
            print(found["error"] if "error" in found else row(name, what, found), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        published(folder)
        print("\nDecoding, with the sizes of SmolLM2-135M and random weights:", flush=True)
        subprocess.run([sys.executable, "sample.py", "--model", folder, "--bench"], cwd=ROOT,
                       env={**os.environ, "TOKENIZERS_PARALLELISM": "false"})


if __name__ == "__main__":
    main()
