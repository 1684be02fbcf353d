"""Tasks other than running text, which zigzag/ itself trains on: a file per kind of --data, and
custom steps.

    pairs     sources (texts, images, sound) and target texts                    encoder-decoders
    arrays    arrays with a row per example: images, sound, classes              other networks
    examples  reads both from files
    metrics   numbers that compare predictions with references (--metric)
    custom_step  fit(step=...): several networks and losses, state besides the weights
    adds      the flags that these files add

pairs and arrays have `opened`, a context manager that opens --data and yields an `OpenedData`
(zigzag/run/task.py): the config with the values derived from the data, the task, its entries in
config.json, and the description to print. An option for only some kinds of data declares them with
`of=`; with other data, it is an error.

To learn from something else, pass custom functions to train.fit (docs/tasks.md). Recipes that learn
from pairs or have custom steps need this folder. Its files import zigzag/ and the five files except
train.py.
"""
