"""The dense weight's parts that `project` approximates, each by itself."""


def sub_blocks(weight, shape):
    """The K*L sub-blocks by slicing, and the rank that each may have."""
    padded = weight.new_zeros(shape.L * shape.S, shape.K * shape.P)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    for k in range(shape.K):
        for l in range(shape.L):
            rows = (
                slice(l, None, shape.L)
                if shape.layout == "interleaved"
                else slice(l * shape.S, (l + 1) * shape.S)
            )
            rank = sum((k * shape.Q + q) % shape.L == l for q in range(shape.Q))
            yield padded[rows, k * shape.P : (k + 1) * shape.P], rank
