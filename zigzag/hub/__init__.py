"""Reading and writing Hugging Face folders. Read it to add a family.

    published           arrays by name: their layouts, reading a device's part, writing
    published_config    a config.json that records which keys were read, and helpers to translate it
    family              `Family`, and names that families share
    llama               LLaMA and the decoders like it; every family by its model_type
    gpt                 GPT-2 and the decoders like it
    pairs               encoder-decoders: T5, BART, Whisper
    encoders            encoders: BERT, RoBERTa, ALBERT, ViT, BEiT
    reference           whether the code of model.py still computes a LLaMA, before an export
    folders             from a folder to weights and back; model.py --export

Imports: core, parallel, rule, disk, weights. Imported by: generate, measure, run, and top-level
files.
"""
