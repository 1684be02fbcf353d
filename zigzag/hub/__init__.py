"""Hugging Face folders, in and out. Read it to add a family.

    published           arrays by name: how each lies, what a device reads, what is written
    published_config    a config.json, which notes what is read of it, and helpers to translate it
    family              what a family is made of
    llama               LLaMA and the decoders like it; every family by its model_type
    gpt                 GPT-2 and the decoders like it
    pairs               encoder-decoders: T5, BART, Whisper
    encoders            encoders: BERT, RoBERTa, ALBERT, ViT, BEiT
    reference           what transformers computes of a LLaMA, which an export is compared with
    folders             a folder to weights and back; model.py --export

Imports: core, parallel, rule, disk, weights. Imported by: generate, measure, run, and top-level
files.
"""
