"""Reading data and writing checkpoints. Read it to bring your own data.

    tokenizers      text to ids and back: bytes, SentencePiece, tokenizer.json; tiktoken
    reading         files of any kind to documents
    encoding        documents to tokens on all cores; output writes the files
    corpus          the folder of tokens that --data opens, and several of them
    token_files     tokens that other programs wrote
    chats           conversations by a model's chat template, and which of their tokens are targets
    packing         rows of whole documents
    mixture         several sources, mixed by weights; the order of examples
    lines           lines of JSON, and other helpers that readers share
    batches         from examples to arrays, placed on the mesh
    checkpoint      the folder of a run: saving and restoring its state

Imports: core. Imported by: everything above.
"""
