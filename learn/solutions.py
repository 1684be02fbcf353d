"""Solutions to the lessons.

    GUESSES     {lesson: {the dots of a prediction: what belongs there}}
    ANSWERS     {exercise: (answer, hint, reason, the answer in other words ...)}
    CODE        {exercise in code: what belongs in place of its dots}
    BROKEN      {exercise: (a text in a function, what `lesson.broken` makes of it)}
"""

GUESSES = {
    "1": {'"all-gather": ...': '"all-gather": 3 * S', '"all-reduce": ...': '"all-reduce": 1.5 * S'},
    "2": {'"marked": ...': '"marked": 1.5 * G', '"left to jax": ...': '"left to jax": 6 * G',
          '"one sum too many": ...': '"one sum too many": 0',
          '"a count that is a mean": ...': '"a count that is a mean": 0'},
    "3": {'"kept": ...': '"kept": 1.5 * W', '"again": ...': '"again": 2.25 * W',
          "zero1 = ...": "zero1 = 1.5", '"everything": ...': '"everything": 6',
          '"full": ...': '"full": 1'},
    "4": {'"column, row": ...': '"column, row": 1.5', '"row, row": ...': '"row, row": 7.5',
          '"column, column": ...': '"column, column": 3', '"row, column": ...': '"row, column": 6'},
    "5": {"price = ...": "price = 8.5"},
    "6": {"guess = ...": "guess = 6 * K", '"in order": ...': '"in order": 15',
          '"early and late": ...': '"early and late": 9'},
    "7": {"{4: ...": "{4: 4 * D * (8 * 7 + 48)", "8: ...": "8: 4 * D * (4 * 11 + 48)"},
    "8": {"guess = ...": "guess = 2 * 3 * X"},
    "9": {"share = ...": "share = 0.262", '"data=8": ...': '"data=8": 7 / 4',
          '"fsdp=8": ...': '"fsdp=8": 21 / 8'},
    "10": {"cache_bytes = ...": "cache_bytes = 2 * 2 * 2 * 16 * 64 * 3 * 4",
           '"operations": ...': '"operations": 8', "speed = ...": "speed = 196",
           "reductions = ...": "reductions = 9"}}

ANSWERS = {
    "1.1": (512 * 512 * 4 / 4, "Which axes does the spec name? The others hold copies.",
            "512 x 512 numbers of 4 bytes, split in 4 over tensor; along data, there are copies."),
    "1.2": (2 * (2 - 1) / 2 * 1e6, "How many devices are along data?",
            "2 (n-1)/n S with n = 2, the size of data."),
    "1.3": (4, "Which two indices does each sum add up?",
            "The two devices along data have the same tensor index, so their sum is twice that "
            "index: 0, 2, 4 or 6."),
    "1.4": ("code", "Along which axis do devices have different rows of the same columns?",
            "data splits the rows, so the sum is over data; tensor still splits the columns."),
    "2.1": (2 * 7 / 8 * 4 * 10e6, "Gradients are float32. In how many parts are they sent?",
            "2 (n-1)/n G, with n = 8 and 4 bytes per weight in G; the parts send nothing."),
    "2.2": (4 * 2 * 7 / 8 * 4 * 10e6, "In how many parts are gradients sent now?",
            "Four times as many: the transpose of jax's own cast is a psum in each part."),
    "2.3": (2.5, "Which sum, divided by which count?",
            "(60 + 40) / (30 + 10). The mean of the means, 2 and 4, would be 3."),
    "2.4": ("code", "Name each axis along which devices have different data, and no other.",
            "data and seq split the rows. Over an axis without a cast, jax sums in each part. A "
            "cast over tensor would add up two equal gradients."),
    "3.1": (16e9 / 8, "How many bytes for each weight, its gradient and Adam?",
            "16 bytes per weight (weight, gradient, two numbers for Adam), split in 8."),
    "3.2": (2 * 3 * 7 / 8 * 2e9, "Three collectives for each part. How large is W in bfloat16?",
            "3 (n-1)/n W for each of the two parts, W = 2e9."),
    "3.3": ("reduce-scatter", "In the backward pass, each device has a gradient for every part. "
                              "Who needs it?",
            "Forward, each device gets all parts. Backward, each part gets the sum of all devices' "
            "gradients for it.", "psum_scatter", "a reduce-scatter"),
    "3.4": ("code", "Add up over devices, and keep a part of dimension 0.",
            "A reduce-scatter along the dimension that was gathered, here 0."),
    "4.1": (8 * 7 / 8 * 2 * 8192 * 4096, "Two blocks, each with two collectives forward and two "
                                         "backward.",
            "8 (n-1)/n X with X = 2 x 8,192 x 4,096."),
    "4.2": ("row", "Which dimension do the first weights share with the output weight?",
            "The heads are the hidden dimension: columns of the first weights, and rows of the "
            "output weight.", "rows", "a row", "row, over heads"),
    "4.3": (128, "Does anything here split D?",
            "All of it: a norm works along D, which nothing splits here. jax sums its gradients "
            "over tensor, because each device has different tokens."),
    "4.4": ("code", "h @ w is a partial sum for the whole sequence. Add up, and keep a part of it.",
            "A reduce-scatter along the sequence, dimension 1, adds up the partial sums. An "
            "all-reduce would leave the sequence whole and send twice the bytes."),
    "5.1": ((128 * 64 * 4 + 2**18) / 32768, "Only the bytes of y change.",
            "y is [128, 64]: 32,768 bytes, and one reduction."),
    "5.2": (2, "Which products sum over a dimension that is split?",
            "One for each pair of column and row. D runs through both blocks and stays whole."),
    "5.3": ("no", "Does 4 divide 6?",
            "4 does not divide 6. The rule rejects the group, and attention stays whole; the MLP "
            "is still split.", "false", "not", "none", "they stay whole"),
    "5.4": ("code", "If x has a gradient, what does the backward pass sum over F?",
            "(1 + has_gradient) x (4 rows D + 256 KiB) / (2 D F): x's gradient is as large as y."),
    "6.1": (2 * 7 * 2 * 4096 * 8 * 128, "How many tokens are on a device? Keys and values.",
            "2 (n-1) K, with K = 2 bytes x 4,096 tokens x 8 x 128."),
    "6.2": (0.5, "The weights are exp(L), divided by their sum.", "exp(1) / (exp(1) + exp(1))."),
    "6.3": (6, "An early part d is paired with the part equally far from the end.",
            "Parts d and 2 n - 1 - d, with d = 1 and n = 4."),
    "6.4": ("code", "A device has two halves: part `me` and part 2 n - 1 - me.",
            "Half of the positions begin at me size/2, the others at (2 n - 1 - me) size/2."),
    "7.1": (7 / 15, "S - 1 idle ticks, of how many?", "(S - 1) / (M + S - 1)."),
    "7.2": (64, "Solve (S - 1) / (M + S - 1) < 0.1.", "7 / (M + 7) < 0.1 from M = 64 on."),
    "7.3": ("C and G", "The second chunks begin after one chunk for each stage.",
            "Chunk c of stage s is number 4 c + s.", "2 and 6"),
    "7.4": ("code", "Forward, each stage adds a tick. Backward, count from the last stage.",
            "Forward in tick m + s. The last stage turns around in tick m + S - 1, and stage s is "
            "S - 1 - s ticks later: m + 2 (S - 1) - s. zigzag adds a tick: m + 2 S - 1 - s."),
    "8.1": (4 * 7 * 2 * 2048 * 4096, "Two all-to-alls forward, two backward; zeros count.",
            "4 (n-1) X with X = 2 x 2,048 x 4,096."),
    "8.2": (2 / 16, "How many of the 16 work for a token?",
            "The others do no work for it, which is what experts save."),
    "8.3": (4, "visits and probability are 1/2 for two experts, and 0 for the others.",
            "8 x (1/2 x 1/2 + 1/2 x 1/2)."),
    "8.4": ("code", "A token chose two experts, which may be on two devices. Does it reach both?",
            "A token must go to a device if any of its experts is there: any(-1), not all(-1)."),
    "9.1": (70, "How many bytes does a weight need in total?", "70e9 x 16 bytes / 16e9."),
    "9.2": (3 * 63 / 64 * 16e9 / 90e9, "Nearly three times W.", "3 (n-1)/n W over the rate."),
    "9.3": ("fsdp", "Which axis sends weights, and not activations?",
            "It sends weights. What data sends does not depend on tokens either, but data sends "
            "only once per update.", "zero-3"),
    "9.4": ("code", "Set 2 B D F / flops equal to (2 B D + D F + 2 B F) / bandwidth.",
            "B = D F / (2 D F bandwidth / flops - 2 D - 2 F): about half of that for bfloat16."),
    "10.1": (2 * 32 * 8 * 128 * 2, "Keys and values, in every layer.",
             "2 x 32 x 8 x 128 numbers of 2 bytes: 131 kB."),
    "10.2": (300.0, "Two operations for each weight and row, two bytes for each weight.",
             "flops / bandwidth: 2 rows / 2 bytes must reach 990 / 3.3."),
    "10.3": ("prefill", "Which of them waits for memory?",
             "Arithmetic limits prefill. Decode reads as many bytes as before."),
    "10.4": ("code", "In which slot does the first new token belong, after a prompt of P tokens?",
             "The prompt fills slots 0 to P - 1. One slot lower would overwrite its last token.")}

CODE = {
    "1.4": 'lax.psum(x.sum(0), "data")',
    "2.4": 'lax.pcast(w, ("data", "seq"), to="varying")',
    "3.4": 'lax.psum_scatter(grads, "fsdp", scatter_dimension=0, tiled=True)',
    "4.4": 'lax.psum_scatter(h @ w, "tensor", scatter_dimension=1, tiled=True)',
    "5.4": "(1 + has_gradient) * (4 * rows * D + 2**18) / (2 * D * F)",
    "6.4": "jnp.concatenate([part * (size // 2) + jnp.arange(size // 2)\n"
           "                            for part in (me, 2 * n - 1 - me)])",
    "7.4": "m + s, m + 2 * (S - 1) - s",
    "8.4": '"all(-1)", "any(-1)"',
    "9.4": "D * F / (2 * D * F * bandwidth / flops - 2 * D - 2 * F)",
    "10.4": '"count - 1, start", "count, start"'}

BROKEN = {"8.4": ("any(-1)", "all(-1)"), "10.4": ("count, start", "count - 1, start")}
