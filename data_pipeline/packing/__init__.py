"""Packing: which tokens of which documents make up each example of a shard.

Reading order for newcomers: `plan` (the result), `documents` (the packings of plain text), `bins`
(the algorithm behind best_fit), `full_sentences` (RoBERTa's packing), `policy` (chooses a packing).
`segment_pairs`, `text_pairs` and `task_rows` are packings for next-sentence prediction, translation
and labeled data.

Packing is the first of four steps from documents to the batch of a rank:

    documents  --packing-->  examples of a shard       (this package)
    examples   --order---->  a global sequence 0, 1, 2, ... over all shards and epochs  (`order`)
    sequence   --order---->  global batches, and the rows of each rank                  (`order`)
    rows       --reading-->  arrays                                                     (`reading`)

Vocabulary: a *chunk* is a run of tokens of one document; a *bin* is an example being filled with
chunks; a *plan* lists the chunks of every example of a shard; a *policy* is the setting
`data.packing`.
"""
