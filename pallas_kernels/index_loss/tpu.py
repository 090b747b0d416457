def index_loss(q, w, k, a, c, lse, scale, first, last):
    raise NotImplementedError("not yet")


def sparse_index_loss(q, w, k, a, c, lse, scale, index, count):
    raise NotImplementedError("gather")
