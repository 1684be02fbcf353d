"""Maps other codebases' flags to ours.

A command recognizes a word only if it has the flag that the word stands for: `--dim` means
--d_model in train.py, and nothing in sample.py.
"""

from collections.abc import Collection

# {our flag: other codebases' words}. If two flags list a word, `meaning` suggests the first one
# that the command has.
WORDS = {
    # train.py
    "seq_len": "block_size context ctx context_len context_length context_size ctx_len max_length "
               "max_len max_seq_len max_seq_length max_position_embeddings n_ctx n_positions "
               "sequence_length seqlen",
    "layers": "n_layer n_layers num_layers num_hidden_layers nlayer nlayers",
    "heads": "n_head n_heads num_heads num_attention_heads nhead nheads",
    "kv_heads": "n_kv_head n_kv_heads num_kv_heads num_key_value_heads n_query_groups",
    "d_model": "n_embd n_embed embedding_dim emb_dim hidden_size hidden_dim dim width model_dim",
    "d_ff": "ffn_dim ffn_hidden_size ff_dim mlp_dim intermediate_size d_mlp",
    "head_dim": "head_size d_head",
    "experts": "n_experts num_experts num_local_experts moe",
    "experts_per_token": "num_experts_per_tok top_k_experts moe_top_k",
    "tied": "tie_embeddings tie_weights tie_word_embeddings weight_tying",
    "rope_theta": "rope_base rotary_base",
    "norm_eps": "rms_norm_eps layer_norm_eps eps",
    "data": "dataset datasets data_dir data_path dataset_path train_data train_file text corpus",
    "batch": "batch_size bs global_batch_size train_batch_size total_batch_size",
    "accumulate": "grad_accum accum gradient_accumulation grad_accumulation_steps "
                  "gradient_accumulation_steps accumulation_steps",
    "microbatches": "num_microbatches micro_batches n_microbatches",
    "lr": "learning_rate max_lr peak_lr",
    "warmup": "warmup_steps warmup_iters num_warmup_steps lr_warmup_steps warmup_ratio warmup_frac",
    "decay": "lr_scheduler lr_scheduler_type lr_schedule scheduler lr_decay decay_lr",
    "decay_steps": "lr_decay_iters lr_decay_steps",
    "cooldown": "cooldown_steps cooldown_frac warmdown warmdown_iters warmdown_ratio decay_frac",
    "beta1": "betas adam_beta1 b1",
    "beta2": "adam_beta2 b2",
    "epochs": "epoch num_epochs n_epochs num_train_epochs max_epochs",
    "weight_decay": "wd",
    "clip": "grad_clip max_grad_norm clip_grad gradient_clip grad_norm_clip gradient_clip_val",
    "optimizer": "optim opt",
    "steps": "max_iters iters iterations n_iters num_iterations train_iters max_steps num_steps "
             "n_steps total_steps train_steps num_train_steps training_steps updates",
    "eval_every": "eval_interval eval_steps eval_freq val_every val_interval val_check_interval",
    "eval_tokens": "eval_iters eval_batches val_iters",
    "save_every": "save_interval save_steps save_freq ckpt_every checkpoint_every "
                  "checkpoint_interval ckpt_interval",
    "keep": "save_total_limit keep_checkpoints",
    "dtype": "precision mixed_precision amp bf16 fp16 bfloat16 param_dtype compute_dtype",
    "remat": "gradient_checkpointing activation_checkpointing checkpoint_activations "
             "grad_checkpoint recompute",
    "lora_rank": "lora lora_r lora_dim",
    "shards": "tp tensor_parallel tensor_parallel_size tensor_model_parallel_size tp_size",
    "zero": "zero_stage",
    "init_from": "finetune finetune_from pretrained",
    "kernel": "flash flash_attention flash_attn use_flash_attention attn_implementation",
    "distributed": "multihost multi_host multinode",
    # sample.py
    "temperature": "temp",
    "beams": "num_beams beam beam_size beam_width",
    "stop": "eos stop_token stop_words",
    "run": "ckpt checkpoint_path ckpt_path out_dir run_dir load_from",
    # shared by several commands
    "model": "model_name model_name_or_path model_path arch architecture pretrained_model",
    "out": "out_dir output output_dir save_dir save_path ckpt_dir checkpoint_dir run_dir log_dir "
           "logdir work_dir",
    "seed": "random_seed rng_seed manual_seed",
    "mix": "data_weights mixture mixture_weights dataset_weights sampling_weights",
    "vocab_size": "n_vocab vocab num_embeddings padded_vocab_size vocabulary",
}

# Words that match none of our flags: (a flag that the command must have, the sentence to print, the
# words).
SENTENCES = [
    ("accumulate", "--batch counts the examples of an update, over all devices",
     "per_device_train_batch_size per_device_batch_size device_batch_size micro_batch_size"),
    ("save_every", "--out RUN alone continues the run in that folder", "resume resume_from "
     "resume_from_checkpoint auto_resume continue continue_from load load_checkpoint restore"),
    ("log", "every number is in OUT/metrics.jsonl, and --log wandb, tensorboard or trackio sends "
     "them there", "wandb wandb_log wandb_project wandb_name wandb_run_name use_wandb tensorboard "
                   "tb trackio report_to log_to log_with mlflow log_every log_interval "
                   "logging_steps"),
    ("final_share", "--final_share is the last rate, as a share of --lr",
     "min_lr final_lr end_lr lr_end lr_min eta_min final_lr_frac min_lr_ratio"),
    ("save_every", "every step is compiled", "compile torch_compile jit"),
    ("mesh", "every run uses all devices; JAX_PLATFORMS=cpu before the command limits it to the "
             "CPU, and --mesh splits the work",
     "device devices gpu gpus cpu cuda num_gpus n_gpus num_devices nproc_per_node platform"),
    ("mesh", "set the size of this mesh axis: --mesh data=N", "dp data_parallel "
     "data_parallel_size dp_size ddp"),
    ("mesh", "set the size of this mesh axis: --mesh fsdp=N", "fsdp fsdp_size fully_shard"),
    ("mesh", "set the size of this mesh axis: --mesh pipe=N", "pp pipeline pipeline_parallel "
     "pipeline_parallel_size pipeline_model_parallel_size pp_size"),
    ("mesh", "set the size of this mesh axis: --mesh seq=N", "cp sp context_parallel "
     "context_parallel_size sequence_parallel"),
    ("mesh", "set the size of this mesh axis: --mesh expert=N", "ep expert_parallel "
     "expert_parallel_size expert_model_parallel_size"),
    ("prompt", "--prompts FILE samples each line of a file",
     "num_samples n_samples num_return_sequences samples n"),
    ("save_every", "that is an option of sample.py", "prompt prompts max_new_tokens "
     "temperature top_k top_p min_p stop score json logprobs num_samples"),
    ("prompt", "that is an option of train.py", "data steps batch_size lr layers seq_len dtype"),
    ("prompt", "did you mean --tokens?",
     "max_new_tokens max_tokens num_tokens n_tokens new_tokens max_length length"),
    ("prompt", "without a prompt, sample.py starts a chat on a terminal", "interactive"),
    ("prompt", "--temperature 0 is greedy", "do_sample greedy sample"),
    ("PATH", "paths need no flag: python data.py PATH ... --out DIR",
     "data dataset input inputs path paths file files in text corpus data_dir"),
]


def meaning(word: str, flags: Collection[str]) -> str:
    """Given a flag from another codebase, return what to use instead in a command that has these
    flags, or '' if the word is unknown."""
    ours = [(flag, f"did you mean --{flag}?", words) for flag, words in WORDS.items()]
    for flag, sentence, words in ours + SENTENCES:
        if flag in flags and word in words.split():
            return sentence
    return ""
