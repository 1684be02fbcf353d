"""Reading data and writing checkpoints. Read it to bring your own data.

    tokenizers      text to ids and back: bytes, SentencePiece, tokenizer.json
    examples        tokens, pairs of texts, and arrays, read from files
    batches         from examples to arrays, placed on the mesh
    checkpoint      the folder of a run: what is saved, and how it is restored

Imports: core. Imported by: weights, hub, generate, measure, run, and top-level files.
"""
