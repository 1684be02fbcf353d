"""Data besides running text (which is the engine's own): a file for each kind that --data may hold.

    pairs     sources (texts, pictures, sound) and target texts                  encoder-decoders
    arrays    a row in each array for each example: pictures, sound, classes     the others
    metrics   numbers that compare predictions with references (--metric)
    adds      what they add to command lines

pairs and arrays have `opened`, a context manager that opens --data and yields a `Learned`
(zigzag/run/task.py): the configuration with what follows from the data, the task, what config.json
notes, and what is printed. What it puts into the run's folder is taken back if the run is refused.
The options that one kind alone uses are declared so (`of=`), and refused elsewhere.

To learn from something else, give train.fit functions of your own (docs/tasks.md). Needed by
recipes that learn from pairs (seq2seq, caption). These files import zigzag/ and the five files but
train.py.
"""
