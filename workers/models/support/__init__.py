"""Whether a fast path is right for a class of models: found out on a tiny model of the class.

    @Proof
    def packed_rows(model) -> str: ...          # what is wrong with it; an empty text if nothing is

    reason = packed_rows.what_is_wrong(config, attention)

A fast path's proof stands in the file of the path. A path whose proof fails is not taken: a slower
one is, or the model is rejected with the reason.
"""
