"""FlashAttention-2 (Dao 2023) in Triton, with the masks, the bias and the dropout of our models.

No kernel stores a matrix of scores. The forward pass reads keys block by block and keeps a running
maximum and sum of each row of the softmax (Algorithm 1). The backward pass recomputes probabilities
from the logarithm of that sum, in two kernels: one owns blocks of queries and sums their gradient
over keys, the other owns blocks of keys. The paper adds the former with atomic operations in one
kernel (Algorithm 2); two kernels compute seven products instead of five, and each gradient is a sum
in a fixed order.

Blocks without an allowed score are skipped: they would add exact zeros, so results keep their bits.
Tiles in which all scores are allowed branch around the masks.

Softmax statistics and all sums are in fp32. Exponents are in units of log2, because exponentials of
base 2 are one instruction, and one multiply-add gives them. Indices: b batch, h head, i query of T,
j key of S, K head width.
"""

# Triton reads the annotations of these functions, so they are not postponed.
import triton
import triton.language as tl

from trainer.accelerators.flash.ranges import count_tiles, tile_range, tile_start

LOG2_E = tl.constexpr(1.4426950408889634)
COLUMN = tl.constexpr(0xCFC6B285)  # of trainer/models/layers/dropout.py
NOWHERE = tl.constexpr(-(2**31))  # no query has this segment


@triton.jit
def _mix(x):
    """`mix` of trainer/models/layers/dropout.py; unsigned, so that shifts need no mask."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _row_bits(head, i, queries, keys, key, DROPOUT: tl.constexpr):
    """What dropout computes once for query i; see `_kept`."""
    row = head * queries + i
    if DROPOUT == 1:
        return row * keys
    mixed = _mix(_mix(row.to(tl.uint32, bitcast=True)) ^ key.to(tl.uint32, bitcast=True))
    return mixed.to(tl.int32, bitcast=True)


@triton.jit
def _kept(row_bits, j, key, threshold, DROPOUT: tl.constexpr):
    """Whether dropout keeps the scores of queries with `row_bits` and keys j: a tile of both.

    DROPOUT is the version: 1 has the masks of `dropout`, 2 those of `attention_dropout`.
    """
    if DROPOUT == 1:
        place = (row_bits + j).to(tl.uint32, bitcast=True)
        bits = (_mix(place) ^ key.to(tl.uint32, bitcast=True)) * 0x7FEB352D
    else:
        bits = row_bits.to(tl.uint32, bitcast=True) + j.to(tl.uint32, bitcast=True) * COLUMN
    bits ^= bits >> 15
    bits *= 0x846CA68B
    return bits.to(tl.int32, bitcast=True) >= threshold


@triton.jit
def _load(
    pointer, n, k, stride, length,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Vectors number n of `length`, [n, PADDED], with zeros in the padding. EVEN: all exist."""
    places = pointer + n[:, None] * stride + k[None, :]
    if not EVEN:
        tile = tl.load(places, mask=(n < length)[:, None] & (k < WIDTH)[None, :], other=0.0)
    elif WIDTH == PADDED:
        tile = tl.load(places)
    else:
        tile = tl.load(places, mask=(k < WIDTH)[None, :], other=0.0)
    return tile


@triton.jit
def _biased(products, i, j, head, bias, queries, keys, scale, EVEN: tl.constexpr):
    """Scores with the relative bias, in units of log2."""
    by_distance = bias + head * (queries + keys - 1) + (j - i + (queries - 1))
    if EVEN:
        added = tl.load(by_distance)
    else:
        added = tl.load(by_distance, mask=(i < queries) & (j < keys), other=0.0)
    return products * (scale * LOG2_E) + added.to(tl.float32) * LOG2_E


@triton.jit
def _allowed(
    i, j, segment, key_segment, prefix, queries, keys, window,
    SEGMENTS: tl.constexpr, CAUSAL: tl.constexpr, PREFIX: tl.constexpr, LOCAL: tl.constexpr,
):  # fmt: skip
    """What `segment_mask` and the window allow, of keys that exist.

    i and j, and their segments, broadcast to the shape of a tile, which may be transposed. Queries
    that do not exist need no mask: their results are not stored, and their probabilities in the
    backward pass are 0.
    """
    allowed = (segment == key_segment) if SEGMENTS else ((j < keys) & (i >= 0))
    if CAUSAL:
        past = j <= i
        if PREFIX:
            past = past | (tl.load(prefix + j, mask=j < keys, other=0) != 0)
        allowed = allowed & past
    if LOCAL:
        allowed = allowed & (j - i <= window) & (i - j <= window)
    return allowed


@triton.jit
def forward_kernel(
    query, key, value, segments, key_segments, ranges, prefix, bias, dropout_key, out, normalizer,
    query_b, query_h, query_t, key_b, key_h, key_s, value_b, value_h, value_s,
    heads, queries, keys, window, scale, threshold, keep_scale,
    SEGMENTS: tl.constexpr, CAUSAL: tl.constexpr, PREFIX: tl.constexpr, LOCAL: tl.constexpr,
    BIAS: tl.constexpr, DROPOUT: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
    EVEN_T: tl.constexpr, EVEN_S: tl.constexpr,
):  # fmt: skip
    """One block of queries of one head: `out` [B, T, H, K] and `normalizer` [B, H, T].

    The normalizer is log2 of the softmax's denominator, or infinity for a row that may attend to
    nothing: its output is 0, and its probabilities in the backward pass are 0.
    """
    blocks = tl.cdiv(queries, BLOCK_T)
    start = tl.program_id(0) % blocks * BLOCK_T
    head = tl.program_id(0) // blocks % heads
    row = (tl.program_id(0) // blocks // heads).to(tl.int64)

    i = start + tl.arange(0, BLOCK_T)
    k = tl.arange(0, PADDED)
    in_query = (i < queries)[:, None] & (k < WIDTH)[None, :]
    query += row * query_b + head * query_h
    q = _load(query, i, k, query_t, queries, WIDTH, PADDED, EVEN_T)
    own_key = 0
    row_bits = i
    if DROPOUT:
        own_key = tl.load(dropout_key + row)
        row_bits = _row_bits(head, i, queries, keys, own_key, DROPOUT)

    maximum = tl.full([BLOCK_T], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_T], tl.float32)
    mixed = tl.zeros([BLOCK_T, PADDED], tl.float32)
    key += row * key_b + head * key_h
    value += row * value_b + head * value_h
    if PREFIX:
        prefix += row * keys
    segment = 0
    if SEGMENTS:
        segment = tl.load(segments + row * queries + i, mask=i < queries, other=0)[:, None]
        key_segments += row * keys
        ranges += (row * blocks + tl.program_id(0) % blocks) * 4
    low, high, full_low, full_high = tile_range(
        start, ranges, keys, window, BLOCK_T, BLOCK_S, SEGMENTS, CAUSAL, PREFIX, LOCAL, True
    )
    MASKED: tl.constexpr = SEGMENTS or CAUSAL or LOCAL or not EVEN_S
    unit = 1.0 if BIAS else scale * LOG2_E
    before, full, others = count_tiles(low, high, full_low, full_high, BLOCK_S, MASKED, True)
    for part in tl.static_range(2 if MASKED else 1):
        for number in range(full if part == 0 else others):
            start_s = tile_start(number, low, before, full, BLOCK_S, part)
            j = start_s + tl.arange(0, BLOCK_S)
            block_k = _load(key, j, k, key_s, keys, WIDTH, PADDED, EVEN_S)
            products = tl.dot(q, tl.trans(block_k), input_precision=PRECISION)
            if BIAS:
                products = _biased(
                    products, i[:, None], j[None, :], head, bias, queries, keys, scale,
                    EVEN_T and EVEN_S,
                )  # fmt: skip
            if MASKED and part == 1:
                key_segment = 0
                if SEGMENTS:
                    key_segment = tl.load(key_segments + j, mask=j < keys, other=NOWHERE)[None, :]
                allowed = _allowed(
                    i[:, None], j[None, :], segment, key_segment, prefix, queries, keys, window,
                    SEGMENTS, CAUSAL, PREFIX, LOCAL,
                )  # fmt: skip
                products = tl.where(allowed, products, float("-inf"))
            new_maximum = tl.maximum(maximum, tl.max(products, 1) * unit)
            # Minus infinity minus itself would be NaN in rows that have met no allowed key yet.
            shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
            probabilities = tl.exp2(products * unit - shift[:, None])
            rescale = tl.exp2(maximum - shift)
            maximum = new_maximum
            # Dropout follows the softmax, so the denominator is a sum of all.
            total = total * rescale + tl.sum(probabilities, 1)
            if DROPOUT:
                kept = _kept(row_bits[:, None], j[None, :], own_key, threshold, DROPOUT)
                # Fewer instructions than a choice between probabilities, which are rounded next.
                probabilities *= tl.where(kept, keep_scale, 0.0)
            block_v = _load(value, j, k, value_s, keys, WIDTH, PADDED, EVEN_S)
            mixed = tl.dot(
                probabilities.to(block_v.dtype), block_v, mixed * rescale[:, None],
                input_precision=PRECISION,
            )  # fmt: skip

    empty = total == 0.0
    mixed = mixed / tl.where(empty, 1.0, total)[:, None]
    out += row * queries * heads * WIDTH + head * WIDTH
    out += i[:, None] * (heads * WIDTH) + k[None, :]
    tl.store(out, mixed.to(out.dtype.element_ty), mask=in_query)
    log_total = tl.where(empty, float("inf"), maximum + tl.log2(tl.where(empty, 1.0, total)))
    tl.store(normalizer + (row * heads + head) * queries + i, log_total, mask=i < queries)


@triton.jit
def query_gradient_kernel(
    query, key, value, segments, key_segments, ranges, prefix, bias, dropout_key, out, normalizer,
    grad, delta, dropout_rows, query_grad, bias_partial,
    query_b, query_h, query_t, key_b, key_h, key_s, value_b, value_h, value_s,
    grad_b, grad_h, grad_t,
    heads, queries, keys, window, scale, threshold, keep_scale,
    SEGMENTS: tl.constexpr, CAUSAL: tl.constexpr, PREFIX: tl.constexpr, LOCAL: tl.constexpr,
    BIAS: tl.constexpr, BIAS_GRADIENT: tl.constexpr, DROPOUT: tl.constexpr, WIDTH: tl.constexpr,
    PADDED: tl.constexpr, PRECISION: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
    EVEN_T: tl.constexpr, EVEN_S: tl.constexpr,
):  # fmt: skip
    """One block of queries of one head: `query_grad` [B, T, H, K], and `delta`, `dropout_rows`.

    The last two, [B, H, T], are for `key_gradient_kernel`. delta is the product of a row of `out`
    with its gradient, which every gradient of a score subtracts. With a bias, also sums the
    gradients of scores along diagonals into `bias_partial` [B, H, T / BLOCK, S / BLOCK + 1, BLOCK];
    `bias_gradient_kernel` adds these.
    """
    blocks = tl.cdiv(queries, BLOCK_T)
    block = tl.program_id(0) % blocks
    start = block * BLOCK_T
    head = tl.program_id(0) // blocks % heads
    row = (tl.program_id(0) // blocks // heads).to(tl.int64)

    i = start + tl.arange(0, BLOCK_T)
    k = tl.arange(0, PADDED)
    in_query = (i < queries)[:, None] & (k < WIDTH)[None, :]
    own = row * queries * heads * WIDTH + head * WIDTH
    own += i[:, None] * (heads * WIDTH) + k[None, :]
    query += row * query_b + head * query_h
    grad += row * grad_b + head * grad_h
    q = _load(query, i, k, query_t, queries, WIDTH, PADDED, EVEN_T)
    g = _load(grad, i, k, grad_t, queries, WIDTH, PADDED, EVEN_T)
    o = tl.load(out + own, mask=in_query, other=0.0)
    row_products = tl.sum(g.to(tl.float32) * o.to(tl.float32), 1)
    statistics = (row * heads + head) * queries + i
    tl.store(delta + statistics, row_products, mask=i < queries)
    # Infinity makes the probabilities of queries beyond the last one 0.
    log_total = tl.load(normalizer + statistics, mask=i < queries, other=float("inf"))
    own_key = 0
    row_bits = i
    if DROPOUT:
        own_key = tl.load(dropout_key + row)
        row_bits = _row_bits(head, i, queries, keys, own_key, DROPOUT)
        tl.store(dropout_rows + statistics, row_bits, mask=i < queries)

    total = tl.zeros([BLOCK_T, PADDED], tl.float32)
    key += row * key_b + head * key_h
    value += row * value_b + head * value_h
    if PREFIX:
        prefix += row * keys
    segment = 0
    if SEGMENTS:
        segment = tl.load(segments + row * queries + i, mask=i < queries, other=0)[:, None]
        key_segments += row * keys
        ranges += (row * blocks + tl.program_id(0) % blocks) * 4
    low, high, full_low, full_high = tile_range(
        start, ranges, keys, window, BLOCK_T, BLOCK_S, SEGMENTS, CAUSAL, PREFIX, LOCAL, True
    )
    if BIAS_GRADIENT:
        columns = tl.arange(0, BLOCK_S)
        turned_column = columns[None, :] + tl.arange(0, BLOCK_T)[:, None]
        diagonals = tl.zeros([BLOCK_T, BLOCK_S], tl.float32)
        places = (tl.cdiv(keys, BLOCK_S) + 1) * BLOCK_S
        bias_partial += ((row * heads + head) * blocks + block) * places + columns
    MASKED: tl.constexpr = SEGMENTS or CAUSAL or LOCAL or not EVEN_S
    unit = 1.0 if BIAS else scale * LOG2_E
    # The sums along diagonals need the tiles in their order.
    before, full, others = count_tiles(
        low, high, full_low, full_high, BLOCK_S, MASKED, not BIAS_GRADIENT
    )
    for part in tl.static_range(1 if BIAS_GRADIENT and MASKED else 0, 2 if MASKED else 1):
        for number in range(full if part == 0 else others):
            start_s = tile_start(number, low, before, full, BLOCK_S, part)
            j = start_s + tl.arange(0, BLOCK_S)
            block_k = _load(key, j, k, key_s, keys, WIDTH, PADDED, EVEN_S)
            block_v = _load(value, j, k, value_s, keys, WIDTH, PADDED, EVEN_S)
            products = tl.dot(q, tl.trans(block_k), input_precision=PRECISION)
            if BIAS:
                products = _biased(
                    products, i[:, None], j[None, :], head, bias, queries, keys, scale,
                    False,  # fewer registers than without bounds
                )  # fmt: skip
            probabilities = tl.exp2(products * unit - log_total[:, None])
            if MASKED and part == 1:
                key_segment = 0
                if SEGMENTS:
                    key_segment = tl.load(key_segments + j, mask=j < keys, other=NOWHERE)[None, :]
                allowed = _allowed(
                    i[:, None], j[None, :], segment, key_segment, prefix, queries, keys, window,
                    SEGMENTS, CAUSAL, PREFIX, LOCAL,
                )  # fmt: skip
                probabilities = tl.where(allowed, probabilities, 0.0)
            gradient = tl.dot(g, tl.trans(block_v), input_precision=PRECISION)
            if DROPOUT:
                kept = _kept(row_bits[:, None], j[None, :], own_key, threshold, DROPOUT)
                gradient = tl.where(kept, gradient * keep_scale, 0.0)
            gradient = probabilities * (gradient - row_products[:, None])
            if BIAS_GRADIENT:
                # Row r of a tile is turned left by r, so columns are diagonals. Of a tile of 3:
                #     a b c      a b c   diagonals  0  1  2 of this tile: a e i, b f, c
                #     d e f  ->  e f d   and after the end of a row    -2 -1: g, d h
                #     g h i      i g h   which the previous tile has as its  1  2.
                # So each sum is over the turned ends of this tile and the begins of the one before.
                turned = tl.gather(gradient, turned_column % BLOCK_S, 1)
                both = tl.where(turned_column < BLOCK_S, diagonals, turned)
                tl.store(bias_partial + start_s, tl.sum(both, 0))
                diagonals = turned
            total = tl.dot(gradient.to(block_k.dtype), block_k, total, input_precision=PRECISION)
    if BIAS_GRADIENT and low < high:
        last = low + tl.cdiv(high - low, BLOCK_S) * BLOCK_S
        rest = tl.where(turned_column < BLOCK_S, diagonals, 0.0)
        tl.store(bias_partial + last, tl.sum(rest, 0))
    tl.store(query_grad + own, (total * scale).to(query_grad.dtype.element_ty), mask=in_query)


@triton.jit
def key_gradient_kernel(
    query, key, value, segments, key_segments, ranges, prefix, bias, dropout_key, normalizer, grad,
    delta, dropout_rows, key_grad, value_grad,
    query_b, query_h, query_t, key_b, key_h, key_s, value_b, value_h, value_s,
    grad_b, grad_h, grad_t,
    heads, queries, keys, window, scale, threshold, keep_scale,
    SEGMENTS: tl.constexpr, CAUSAL: tl.constexpr, PREFIX: tl.constexpr, LOCAL: tl.constexpr,
    BIAS: tl.constexpr, DROPOUT: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
    EVEN_T: tl.constexpr, EVEN_S: tl.constexpr,
):  # fmt: skip
    """One block of keys of one head: `key_grad` and `value_grad` [B, S, H, K].

    Tiles are transposed, keys x queries: the first factors of both products that add to the
    gradients are then computed in registers, where the tensor cores read them.
    """
    blocks = tl.cdiv(keys, BLOCK_S)
    start = tl.program_id(0) % blocks * BLOCK_S
    head = tl.program_id(0) // blocks % heads
    row = (tl.program_id(0) // blocks // heads).to(tl.int64)

    j = start + tl.arange(0, BLOCK_S)
    k = tl.arange(0, PADDED)
    in_keys = (j < keys)[:, None] & (k < WIDTH)[None, :]
    key += row * key_b + head * key_h
    value += row * value_b + head * value_h
    own_k = _load(key, j, k, key_s, keys, WIDTH, PADDED, EVEN_S)
    own_v = _load(value, j, k, value_s, keys, WIDTH, PADDED, EVEN_S)
    own_key = 0
    if DROPOUT:
        own_key = tl.load(dropout_key + row)

    key_total = tl.zeros([BLOCK_S, PADDED], tl.float32)
    value_total = tl.zeros([BLOCK_S, PADDED], tl.float32)
    query += row * query_b + head * query_h
    grad += row * grad_b + head * grad_h
    statistics = (row * heads + head) * queries
    if PREFIX:
        prefix += row * keys
    key_segment = 0
    if SEGMENTS:
        key_segment = tl.load(key_segments + row * keys + j, mask=j < keys, other=0)[:, None]
        segments += row * queries
        ranges += (row * blocks + tl.program_id(0) % blocks) * 4
    low, high, full_low, full_high = tile_range(
        start, ranges, queries, window, BLOCK_S, BLOCK_T, SEGMENTS, CAUSAL, PREFIX, LOCAL, False
    )
    # Keys that do not exist need no mask: their gradients are not stored.
    MASKED: tl.constexpr = SEGMENTS or CAUSAL or LOCAL
    unit = 1.0 if BIAS else scale * LOG2_E
    before, full, others = count_tiles(low, high, full_low, full_high, BLOCK_T, MASKED, True)
    for part in tl.static_range(2 if MASKED else 1):
        for number in range(full if part == 0 else others):
            start_t = tile_start(number, low, before, full, BLOCK_T, part)
            i = start_t + tl.arange(0, BLOCK_T)
            q = _load(query, i, k, query_t, queries, WIDTH, PADDED, EVEN_T)
            g = _load(grad, i, k, grad_t, queries, WIDTH, PADDED, EVEN_T)
            # Infinity makes the probabilities of queries beyond the last one 0.
            log_total = tl.load(normalizer + statistics + i, mask=i < queries, other=float("inf"))
            row_products = tl.load(delta + statistics + i, mask=i < queries, other=0.0)
            products = tl.dot(own_k, tl.trans(q), input_precision=PRECISION)
            if BIAS:
                products = _biased(
                    products, i[None, :], j[:, None], head, bias, queries, keys, scale,
                    EVEN_T and EVEN_S,
                )  # fmt: skip
            probabilities = tl.exp2(products * unit - log_total[None, :])
            if MASKED and part == 1:
                segment = 0
                if SEGMENTS:
                    segment = tl.load(segments + i, mask=i < queries, other=0)[None, :]
                allowed = _allowed(
                    i[None, :], j[:, None], segment, key_segment, prefix, queries, keys, window,
                    SEGMENTS, CAUSAL, PREFIX, LOCAL,
                )  # fmt: skip
                probabilities = tl.where(allowed, probabilities, 0.0)
            gradient = tl.dot(own_v, tl.trans(g), input_precision=PRECISION)
            dropped = probabilities
            if DROPOUT:
                row_bits = tl.load(dropout_rows + statistics + i, mask=i < queries, other=0)
                kept = _kept(row_bits[None, :], j[:, None], own_key, threshold, DROPOUT)
                keep = tl.where(kept, keep_scale, 0.0)
                dropped = probabilities * keep
                gradient *= keep
            value_total = tl.dot(dropped.to(g.dtype), g, value_total, input_precision=PRECISION)
            gradient = probabilities * (gradient - row_products[None, :])
            key_total = tl.dot(gradient.to(q.dtype), q, key_total, input_precision=PRECISION)
    own = row * keys * heads * WIDTH + head * WIDTH
    own += j[:, None] * (heads * WIDTH) + k[None, :]
    tl.store(key_grad + own, (key_total * scale).to(key_grad.dtype.element_ty), mask=in_keys)
    tl.store(value_grad + own, value_total.to(value_grad.dtype.element_ty), mask=in_keys)


@triton.jit
def bias_gradient_kernel(
    partial, bias_grad, rows, heads, queries, keys,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Adds the sums of `query_gradient_kernel` over the batch: `bias_grad` [H, T + S - 1].

    Entry e of the bias is the diagonal j - i = e - (T - 1). The block of queries number n begins
    at i = n * BLOCK and stores diagonal j - i at place j - i + (n + 1) * BLOCK.
    """
    head = tl.program_id(1)
    entry = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    blocks = tl.cdiv(queries, BLOCK)
    places = (tl.cdiv(keys, BLOCK) + 1) * BLOCK
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, rows * blocks, ROWS):
        number = first + tl.arange(0, ROWS)
        row = (number // blocks).to(tl.int64)
        block = number % blocks
        place = entry[None, :] - (queries - 1) + (block[:, None] + 1) * BLOCK
        inside = (number < rows * blocks)[:, None] & (place >= 0) & (place < places)
        start = ((row * heads + head) * blocks + block) * places
        sums += tl.load(partial + start[:, None] + place, mask=inside, other=0.0)
    bias_grad += head * (queries + keys - 1) + entry
    sums = tl.sum(sums, 0).to(bias_grad.dtype.element_ty)
    tl.store(bias_grad, sums, mask=entry < queries + keys - 1)
