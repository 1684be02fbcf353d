"""What else one can train: data besides running text (which is the engine's own), a file for each
kind that --data may hold; and a step of one's own.

    pairs     sources (texts, pictures, sound) and target texts                  encoder-decoders
    arrays    a row in each array for each example: pictures, sound, classes     the others
    examples  both, read from files
    metrics   numbers that compare predictions with references (--metric)
    own_step  fit(step=...): several networks and losses, state beside the weights
    adds      what they add to command lines

pairs and arrays have `opened`, a context manager that opens --data and yields a `Learned`
(zigzag/run/task.py): the configuration with what follows from the data, the task, what config.json
notes, and what is printed. What it puts into the run's folder is taken back if the run is refused.
The options that one kind alone uses are declared so (`of=`), and refused elsewhere.

To learn from something else, give train.fit functions of your own (docs/tasks.md). Needed by
recipes that learn from pairs or make steps of their own. These files import zigzag/ and the five
files but train.py.
"""
