"""Hugging Face folders, in and out. Read it to add a family.

    published           arrays by name: how each lies, what a device reads, what is written
    published_config    helpers that translate a config.json
    family              what a family is made of
    llama               LLaMA and the decoders like it; every family by its model_type
    gpt                 GPT-2 and the decoders like it
    pairs               encoder-decoders: T5, BART, Whisper
    encoders            encoders: BERT, RoBERTa, ALBERT, ViT, BEiT
    folders             a folder to weights and back; model.py --export

Imports: core, parallel, rule, disk, weights. Imported by: generate, measure, run, and top-level
files.
"""
