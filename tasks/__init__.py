"""Tasks besides running text, which zigzag/ itself trains on: a file for each kind of data that
--data may hold, and custom steps.

    pairs     sources (texts, pictures, sound) and target texts                  encoder-decoders
    arrays    a row in each array for each example: pictures, sound, classes     other networks
    examples  reads both from files
    metrics   numbers that compare predictions with references (--metric)
    own_step  fit(step=...): several networks and losses, state next to the weights
    adds      the flags that these files add

pairs and arrays have `opened`, a context manager that opens --data and yields a `Learned`
(zigzag/run/task.py): the configuration with the values that follow from the data, the task, its
entries in config.json, and the description to print. If `fit` refuses the run, `opened` removes its
files from the run's folder. Options of one kind declare it (`of=`); elsewhere they are an error.

To learn from something else, pass custom functions to train.fit (docs/tasks.md). Needed by recipes
that learn from pairs or have custom steps. These files import zigzag/ and the five files except
train.py.
"""
