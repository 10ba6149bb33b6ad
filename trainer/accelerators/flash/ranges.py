"""Which blocks of keys the attention kernels read for a block of queries, and the reverse.

Ranges are bounds of loops. A branch inside a loop would make the compiler for Hopper wait for each
product of matrices before the next.
"""

# Triton reads the annotations of these functions, so they are not postponed.
import triton
import triton.language as tl

LAST = tl.constexpr(2**31 - 1)
FEW = tl.constexpr(4)


@triton.jit
def range_kernel(
    segments, key_segments, ranges, queries, keys, BLOCK: tl.constexpr, STEP: tl.constexpr
):
    """Where a block of queries finds keys of its segments: `ranges` [B, blocks, 4].

    The first of these keys and the end after the last; then the same of keys that all queries of
    the block may attend to. With blocks of 4:

        segments    1 1 1 1  1 2 2 2   2 2 3 0
        ranges      0 5 0 5  0 10 0 0  5 12 5 5

    Keys of segments between the least and the greatest of the block are in the range, so it has
    all that matter in any order of segments, and few others if segments ascend. Padding, 0, is
    last in a row, so it counts as the greatest segment.
    """
    blocks = tl.cdiv(queries, BLOCK)
    block = tl.program_id(0) % blocks
    row = (tl.program_id(0) // blocks).to(tl.int64)
    i = block * BLOCK + tl.arange(0, BLOCK)
    own = tl.load(segments + row * queries + i, mask=i < queries, other=0)
    own = tl.where(own == 0, LAST, own)
    least = tl.min(tl.where(i < queries, own, LAST), 0)
    greatest = tl.max(tl.where(i < queries, own, -LAST), 0)
    first = keys
    end = 0
    count = 0
    for start in range(0, keys, STEP):
        j = start + tl.arange(0, STEP)
        other = tl.load(key_segments + row * keys + j, mask=j < keys, other=0)
        other = tl.where(other == 0, LAST, other)
        inside = (other >= least) & (other <= greatest) & (j < keys)
        first = tl.minimum(first, tl.min(tl.where(inside, j, keys), 0))
        end = tl.maximum(end, tl.max(tl.where(inside, j + 1, 0), 0))
        count += tl.sum(inside.to(tl.int32), 0)
    ranges += (row * blocks + block) * 4
    tl.store(ranges, first)
    tl.store(ranges + 1, end)
    alike = (least == greatest) & (count == end - first)
    tl.store(ranges + 2, first)
    tl.store(ranges + 3, tl.where(alike, end, first))


@triton.jit
def tile_range(
    start, ranges, length, window, BLOCK: tl.constexpr, OTHER: tl.constexpr,
    SEGMENTS: tl.constexpr, CAUSAL: tl.constexpr, PREFIX: tl.constexpr, LOCAL: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """The keys that some query of a block may attend to, and those that all may attend to.

    Without KEYS, the queries that may attend to some key of a block, and to all. The block has
    BLOCK positions from `start` on. The first range begins at a multiple of OTHER, the size of
    blocks on the other side, which has `length` positions.
    """
    low = 0
    high = length
    full_low = 0
    full_high = length
    if CAUSAL:
        if KEYS:
            full_high = tl.minimum(full_high, start + 1)
            if not PREFIX:
                high = tl.minimum(high, start + BLOCK)
        else:
            full_low = start + BLOCK - 1
            if not PREFIX:
                low = start // OTHER * OTHER
    if LOCAL:
        low = tl.maximum(low, tl.maximum(start - window, 0) // OTHER * OTHER)
        high = tl.minimum(high, start + BLOCK + window)
        full_low = tl.maximum(full_low, start + BLOCK - 1 - window)
        full_high = tl.minimum(full_high, start + window + 1)
    if SEGMENTS:
        first = tl.load(ranges)
        low = tl.maximum(low, first // OTHER * OTHER)
        high = tl.minimum(high, tl.load(ranges + 1))
        full_low = tl.maximum(full_low, tl.load(ranges + 2))
        full_high = tl.minimum(full_high, tl.load(ranges + 3))
    return low, high, full_low, full_high


@triton.jit
def count_tiles(
    low, high, full_low, full_high,
    BLOCK: tl.constexpr, MASKED: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Tiles before the first that needs no mask, tiles that need none, and all others.

    A kernel computes the tiles without masks in a loop of their own, then the others. Starting
    another loop costs the latency of its first loads, so a few tiles are masked like the others.
    Without SPLIT all are, in the order of their positions.
    """
    total = tl.cdiv(tl.maximum(high - low, 0), BLOCK)
    if not MASKED:
        return 0, total, 0
    if not SPLIT:
        return 0, 0, total
    before = tl.cdiv(tl.maximum(full_low - low, 0), BLOCK)
    full = (tl.minimum(full_high, low + total * BLOCK) - low) // BLOCK - before
    full = tl.where(full < FEW, 0, full)
    return before, full, total - full


@triton.jit
def tile_start(number, low, before, full, BLOCK: tl.constexpr, PART: tl.constexpr):
    """The first position of a tile of part 0, those without masks, or of part 1, the others."""
    if PART == 0:
        return low + (before + number) * BLOCK
    return low + tl.where(number < before, number, number + full) * BLOCK
