"""The inner loops of the Numba attention: a tile's scores and its weighted values, in registers.

A key or value is widened once for up to ``ROWS`` rows (queries, and query heads of a group), whose
sums stay in registers. A row's order of sums depends on its keys alone: a score adds its columns
vector by vector, a value its keys one by one.
"""

from __future__ import annotations

from numba import types
from numba.extending import intrinsic

from stairs.attention.cpu_vectors import (
    I32,
    I64,
    ROWS,
    Vectors,
    lanes_of,
    loop,
    numbers,
    shifted,
    widen,
)
from stairs.attention.jit import njit

__all__ = ["largest", "score_tile", "value_tile"]


def _scores_of(num_rows: int, num_keys: int):
    """out[r * stride + j] = row r of q . key j for ``count`` times ``num_keys`` keys, over the
    whole vectors of head_dim; rows of q, and keys, lie one behind the other. As many rows from
    ``ahead`` on are asked for."""

    @intrinsic
    def scores(typing, q, k, count, head_dim, ahead, out, stride):
        def codegen(context, builder, signature, args):
            q, k, count, head_dim, ahead, out, stride = args
            dtype, stored = signature.args[0].dtype, signature.args[1].dtype
            vectors = Vectors(builder, dtype)

            def keys(block, _):
                first = builder.mul(builder.mul(block, I64(num_keys)), head_dim)
                k_here, ahead_here = builder.gep(k, [first]), builder.gep(ahead, [first])

                def chunk(index, sums):
                    column = builder.mul(index, I64(vectors.lanes))
                    places = [
                        builder.add(builder.mul(head_dim, I64(i)), column)
                        for i in range(max(num_keys, num_rows))
                    ]
                    for place in places[:num_keys]:
                        vectors.prefetch(ahead_here, place)
                    keys = [vectors.load(k_here, place, stored) for place in places[:num_keys]]
                    sums = list(sums)
                    for row in range(num_rows):
                        x = vectors.load(q, places[row], dtype)
                        for j, key in enumerate(keys):
                            i = row * num_keys + j
                            sums[i] = vectors.fma(x, key, sums[i])
                    return sums

                whole = builder.sdiv(head_dim, I64(vectors.lanes))
                sums = loop(builder, whole, vectors.sums(num_rows * num_keys), chunk)
                for row in range(num_rows):
                    total = vectors.across(sums[row * num_keys : (row + 1) * num_keys])
                    place = builder.add(
                        builder.mul(stride, I64(row)), builder.mul(block, I64(num_keys))
                    )
                    vectors.store(total, out, place)
                return []

            loop(builder, count, [], keys)
            return context.get_dummy_value()

        i64 = types.int64
        return types.void(q, k, i64, i64, k, out, i64), codegen

    return scores


def _values_of(num_rows: int, num_chunks: int):
    """parts[r * width + e] += sum over num_keys keys j of weights[r * stride + j] * value j, for
    ``num_chunks`` vectors of columns. The keys from ``ahead`` on are asked for."""

    @intrinsic
    def values(typing, weights, stride, v, head_dim, num_keys, ahead, parts, width):
        def codegen(context, builder, signature, args):
            weights, stride, v, head_dim, num_keys, ahead, parts, width = args
            dtype, stored = signature.args[0].dtype, signature.args[2].dtype
            vectors = Vectors(builder, dtype)
            step = max(1, 64 * 8 // stored.bitwidth)  # elements of a cache line
            places = [
                builder.add(builder.mul(width, I64(row)), I64(vectors.lanes * chunk))
                for row in range(num_rows)
                for chunk in range(num_chunks)
            ]

            def key(index, sums):
                row_start = builder.mul(index, head_dim)
                for element in range(0, vectors.lanes * num_chunks, step):
                    vectors.prefetch(ahead, builder.add(row_start, I64(element)))
                columns = [
                    vectors.load(v, builder.add(row_start, I64(vectors.lanes * chunk)), stored)
                    for chunk in range(num_chunks)
                ]
                sums = list(sums)
                for row in range(num_rows):
                    place = builder.add(builder.mul(stride, I64(row)), index)
                    weight = vectors.spread(builder.load(builder.gep(weights, [place])))
                    for chunk, column in enumerate(columns):
                        i = row * num_chunks + chunk
                        sums[i] = vectors.fma(weight, column, sums[i])
                return sums

            sums = [vectors.load(parts, place, dtype) for place in places]
            sums = loop(builder, num_keys, sums, key)
            for total, place in zip(sums, places, strict=True):
                vectors.store(total, parts, place)
            return context.get_dummy_value()

        i64 = types.int64
        return types.void(weights, i64, v, i64, i64, v, parts, i64), codegen

    return values


@intrinsic
def _largest_of(typing, row, num_vectors, initial):
    """The largest of whole vectors of ``row`` and ``initial``; NaN is not looked at."""

    def codegen(context, builder, signature, args):
        row, count, initial = args
        dtype = signature.args[0].dtype
        vectors = Vectors(builder, dtype)

        def larger(a, b):
            return builder.select(builder.fcmp_ordered(">", a, b), a, b)

        def step(index, sums):
            place = builder.mul(index, I64(vectors.lanes))
            return [larger(vectors.load(row, place, dtype), sums[0])]

        (found,) = loop(builder, count, [vectors.spread(initial)], step)
        width = vectors.lanes
        while width > 1:
            width //= 2
            halves = [numbers(list(range(start, start + width))) for start in (0, width)]
            found = larger(*(builder.shuffle_vector(found, found, half) for half in halves))
        return builder.extract_element(found, I32(0))

    return row.dtype(row, types.int64, row.dtype), codegen


@njit(error_model="numpy")
def largest(row, num, initial):
    """The largest of ``num`` numbers and ``initial``; NaN is not looked at."""
    lanes = lanes_of(row)
    found = _largest_of(row, num // lanes, initial)
    for i in range(num // lanes * lanes, num):
        if row[i] > found:
            found = row[i]
    return found


_scores_1_4, _scores_2_4, _scores_3_4, _scores_4_4 = (_scores_of(n, 4) for n in (1, 2, 3, 4))
_scores_1_1, _scores_2_1, _scores_3_1, _scores_4_1 = (_scores_of(n, 1) for n in (1, 2, 3, 4))
_values_1_4, _values_2_4, _values_3_4, _values_4_4 = (_values_of(n, 4) for n in (1, 2, 3, 4))
_values_1_1, _values_2_1, _values_3_1, _values_4_1 = (_values_of(n, 1) for n in (1, 2, 3, 4))


@njit(error_model="numpy")
def _score_rows(q, num_rows, k, num_keys, head_dim, ahead, scores, stride):
    """Scores of rows of q with keys of one page: four by four, then one by one."""
    rest, fours, row = head_dim % lanes_of(q), num_keys // 4, 0
    while row < num_rows:
        rows = min(num_rows - row, ROWS)
        x, out = shifted(q, row * head_dim), shifted(scores, row * stride)
        last, more = shifted(k, 4 * fours * head_dim), shifted(ahead, 4 * fours * head_dim)
        end, ones = shifted(out, 4 * fours), num_keys - 4 * fours
        if rows == 4:
            _scores_4_4(x, k, fours, head_dim, ahead, out, stride)
            _scores_4_1(x, last, ones, head_dim, more, end, stride)
        elif rows == 3:
            _scores_3_4(x, k, fours, head_dim, ahead, out, stride)
            _scores_3_1(x, last, ones, head_dim, more, end, stride)
        elif rows == 2:
            _scores_2_4(x, k, fours, head_dim, ahead, out, stride)
            _scores_2_1(x, last, ones, head_dim, more, end, stride)
        else:
            _scores_1_4(x, k, fours, head_dim, ahead, out, stride)
            _scores_1_1(x, last, ones, head_dim, more, end, stride)
        if rest:
            for r in range(rows):
                for j in range(num_keys):
                    for e in range(head_dim - rest, head_dim):
                        out[r * stride + j] += x[r * head_dim + e] * widen(k[j * head_dim + e])
        row, ahead = row + rows, k  # asked for once


@njit(error_model="numpy")
def score_tile(
    q, num_q, group, past, k_pool, v_pool, pages, page_stride, block_size, head_dim, start, stop,
    scores, stride,
):  # fmt: skip
    """scores[row * stride + j] = row of q . key start + j, where the row sees that key; the keys'
    values are asked for. A row is (query, head of the group); query i sees key k if k <= past + i.

    Pools point at a head of page 0: offset o of page p is at p * page_stride + o * head_dim.
    """
    column, offset, key = start // block_size, start % block_size, start
    while key < stop:
        num = min(block_size - offset, stop - key)
        first = pages[column] * page_stride + offset * head_dim
        k, v, out = shifted(k_pool, first), shifted(v_pool, first), shifted(scores, key - start)
        # From this query on all keys of the page are seen.
        whole = min(num_q, max(0, key + num - 1 - past))
        row = whole * group
        _score_rows(
            shifted(q, row * head_dim), num_q * group - row, k, num, head_dim, v,
            shifted(out, row * stride), stride,
        )  # fmt: skip
        for query in range(max(0, key - past), whole):
            row = query * group
            _score_rows(
                shifted(q, row * head_dim), group, k, past + query + 1 - key, head_dim, v,
                shifted(out, row * stride), stride,
            )  # fmt: skip
        key, column, offset = key + num, column + 1, 0


@njit(error_model="numpy")
def _value_rows(weights, num_rows, stride, v, num_keys, head_dim, ahead, parts, width):
    """parts[row] += weights[row, :num_keys] * that many values."""
    lanes = lanes_of(weights)
    rest = head_dim % lanes
    row = 0
    while row < num_rows:
        rows, e = min(num_rows - row, ROWS), 0
        w, out = shifted(weights, row * stride), shifted(parts, row * width)
        while e + 4 * lanes <= head_dim:
            x, coming, to = shifted(v, e), shifted(ahead, e), shifted(out, e)
            if rows == 4:
                _values_4_4(w, stride, x, head_dim, num_keys, coming, to, width)
            elif rows == 3:
                _values_3_4(w, stride, x, head_dim, num_keys, coming, to, width)
            elif rows == 2:
                _values_2_4(w, stride, x, head_dim, num_keys, coming, to, width)
            else:
                _values_1_4(w, stride, x, head_dim, num_keys, coming, to, width)
            e += 4 * lanes
        while e + lanes <= head_dim:
            x, coming, to = shifted(v, e), shifted(ahead, e), shifted(out, e)
            if rows == 4:
                _values_4_1(w, stride, x, head_dim, num_keys, coming, to, width)
            elif rows == 3:
                _values_3_1(w, stride, x, head_dim, num_keys, coming, to, width)
            elif rows == 2:
                _values_2_1(w, stride, x, head_dim, num_keys, coming, to, width)
            else:
                _values_1_1(w, stride, x, head_dim, num_keys, coming, to, width)
            e += lanes
        if rest:
            for r in range(rows):
                for j in range(num_keys):
                    for i in range(e, head_dim):
                        out[r * width + i] += w[r * stride + j] * widen(v[j * head_dim + i])
        row, ahead = row + rows, v  # asked for once


@njit(error_model="numpy")
def value_tile(
    weights, stride, num_q, group, past, k_pool, v_pool, pages, page_stride, block_size, head_dim,
    start, stop, end, parts, width,
):  # fmt: skip
    """parts[row] += weights[row, j] * value start + j, over the keys that the row sees; pools as in
    ``score_tile``. ``end``: where this thread's keys end; those of the next tile, ``stride``
    further, are asked for."""
    column, offset, key = start // block_size, start % block_size, start
    while key < stop:
        num = min(block_size - offset, stop - key)
        v = shifted(v_pool, pages[column] * page_stride + offset * head_dim)
        ahead = v
        if key + stride < end:
            page = pages[(key + stride) // block_size]
            place = page * page_stride + (key + stride) % block_size * head_dim
            ahead = shifted(k_pool, place)
        w = shifted(weights, key - start)
        whole = min(num_q, max(0, key + num - 1 - past))
        row = whole * group
        _value_rows(
            shifted(w, row * stride), num_q * group - row, stride, v, num, head_dim, ahead,
            shifted(parts, row * width), width,
        )  # fmt: skip
        for query in range(max(0, key - past), whole):
            row = query * group
            _value_rows(
                shifted(w, row * stride), group, stride, v, past + query + 1 - key, head_dim, ahead,
                shifted(parts, row * width), width,
            )  # fmt: skip
        key, column, offset = key + num, column + 1, 0
