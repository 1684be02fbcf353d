"""Reading data and writing checkpoints. Read this package to bring your own data.

    tokenizers      text to ids and back: bytes, SentencePiece, tokenizer.json
    reading         files of any kind to documents
    encoding        documents to tokens on all cores; output writes the files
    corpus          the folder of tokens that --data opens, or several of them
    token_files     tokens written by other programs
    packing         rows of whole documents
    mixture         several sources mixed by weight; the order of examples
    lines           lines of JSON, and other helpers shared by the readers
    batches         from examples to arrays, placed on the mesh
    checkpoint      a run's folder: saving and restoring its state

Imports: core. Imported by: everything above.
"""
