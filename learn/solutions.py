"""The answers to the lessons' exercises: {exercise: (answer, why)}."""

ANSWERS = {
    "1.1": (
        512 * 512 * 4 / 4,
        "512 x 512 numbers of 4 bytes, cut in 4 by tensor; data holds copies."),
    "1.2": (
        2 * (2 - 1) / 2 * 1e6,
        "2 (n-1)/n S with n = 2, the size of data."),
    "1.3": (
        4,
        "The two devices of data have the same index along tensor, so their sum is twice that "
        "index: 0, 2, 4 or 6."),
    "2.1": (
        2 * 7 / 8 * 4 * 10e6,
        "2 (n-1)/n G with n = 8 and G of 4 bytes a weight; the parts send nothing."),
    "2.2": (
        4 * 2 * 7 / 8 * 4 * 10e6,
        "Four times as many: the transpose of jax's own mark is a psum in each of the four "
        "parts."),
    "2.3": (
        2.5,
        "(60 + 40) / (30 + 10). The mean of the means, 2 and 4, would be 3."),
    "3.1": (
        16e9 / 8,
        "16 bytes for each weight (weight, gradient, two of Adam), cut in 8."),
    "3.2": (
        2 * 3 * 7 / 8 * 2e9,
        "3 (n-1)/n W for each of the two parts, W = 2e9."),
    "3.3": (
        "reduce-scatter",
        "Forward, each device gets all parts; backward, each part gets the sum of what all "
        "devices found for it."),
    "4.1": (
        8 * 7 / 8 * 2 * 8192 * 4096,
        "8 (n-1)/n X with X = 2 x 8,192 x 4,096."),
    "4.2": (
        "row",
        "Heads are the hidden dimension: they leave the first weights as columns, and enter "
        "the output weight."),
    "4.3": (
        128,
        "All: a norm works along D, which nothing splits here. Its gradients are summed over "
        "tensor, since each device has other tokens."),
    "5.1": (
        (128 * 64 * 4 + 2**18) / 32768,
        "y is [128, 64]: 32,768 bytes, and one reduction."),
    "5.2": (
        2,
        "One for each pair of column and row. D joins both blocks, and is whole."),
    "5.3": (
        "no",
        "6 does not divide by 4. The rule refuses the group, and attention stays whole; the "
        "MLP is still split."),
    "6.1": (
        2 * 7 * 2 * 4096 * 8 * 128,
        "2 (n-1) K, with K = 2 bytes x 4,096 tokens x 8 x 128."),
    "6.2": (
        0.5,
        "exp(1) / (exp(1) + exp(1))."),
    "6.3": (
        6,
        "Parts d and 2 n - 1 - d, with d = 1 and n = 4."),
    "7.1": (
        7 / 15,
        "(S - 1) / (M + S - 1)."),
    "7.2": (
        64,
        "7 / (M + 7) < 0.1 from M = 64 on."),
    "7.3": (
        "C and G",
        "Chunk c of stage s is number 4 c + s."),
    "8.1": (
        4 * 7 * 2 * 2048 * 4096,
        "4 (n-1) X with X = 2 x 2,048 x 4,096."),
    "8.2": (
        2 / 16,
        "The others stay idle for it: that is what experts save."),
    "8.3": (
        4,
        "8 x (1/2 x 1/2 + 1/2 x 1/2)."),
    "9.1": (
        70,
        "70e9 x 16 bytes / 16e9."),
    "9.2": (
        3 * 63 / 64 * 16e9 / 90e9,
        "3 (n-1)/n W over the rate."),
    "9.3": (
        "fsdp",
        "It sends weights. data does not depend on tokens either, but sends once in an "
        "update."),
}
