"""Jit helpers that several kernels share."""

from __future__ import annotations

import os

import triton
import triton.language as tl

INTERPRETING: tl.constexpr = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
NEG_INF: tl.constexpr = tl.constexpr(float("-inf"))
PAD: tl.constexpr = tl.constexpr(-1)  # where there is no token

# How the bytes of an fp8 (e4m3) cache become numbers.
KV_PLAIN: tl.constexpr = tl.constexpr(0)  # not fp8: stored in the query's dtype
KV_FP8_NATIVE: tl.constexpr = tl.constexpr(1)  # the chip converts
KV_FP8_BYTES: tl.constexpr = tl.constexpr(2)  # the cache is viewed as uint8 and decoded here


@triton.jit
def widen(x):
    """In the interpreter, where half-precision arithmetic works on raw bits, as fp32; unchanged on a chip."""
    if INTERPRETING:
        x = x.to(tl.float32)
    return x


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """fp32 in another dtype, rounded to nearest even (the interpreter cuts bf16 off instead)."""
    if INTERPRETING and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
        x = tl.where(x == x, rounded, x)
    return x.to(dtype)


@triton.jit
def matmul(a, b, acc):
    """``acc + a @ b`` in fp32; fp32 operands are not rounded to TF32."""
    if INTERPRETING:  # its BLAS rounds a row by the row's place in the tile, which a chip does not
        rows = tl.broadcast_to(widen(b)[None, :, :], [a.shape[0], b.shape[0], b.shape[1]])
        acc = tl.reshape(tl.dot(widen(a)[:, None, :], rows, acc[:, None, :], input_precision="ieee"), acc.shape)
    else:
        acc = tl.dot(a, b, acc, input_precision="ieee")
    return acc


@triton.jit
def product(
    x_row,  # pointers [BLOCK_M,1] to the first elements of rows
    weight_column,  # pointers [1,BLOCK_N] to the first elements of the weight's rows
    row_exists,  # [BLOCK_M,1]
    column_exists,  # [1,BLOCK_N]
    first,  # the first block of K, and the one after the last
    last,
    width,  # K
    stride_weight_lane,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """fp32 ``[BLOCK_M,BLOCK_N]``: rows times columns, added up over blocks of K in order; 0 where a row or column does not exist.

    All linear layers' loop: with the tiles of ``linear_config`` a column has the same bits in each kernel that calls it.
    """
    lane = tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for block in range(first, last):
        k = block * BLOCK_K + lane
        x = tl.load(x_row + k[None, :], mask=row_exists & (k < width)[None, :], other=0.0)
        k_offset = k.to(tl.int64)[:, None] * stride_weight_lane
        weight = tl.load(weight_column + k_offset, mask=(k < width)[:, None] & column_exists, other=0.0)
        acc = matmul(x, weight, acc)
    return acc


@triton.jit
def decode_e4m3(byte):
    """uint8 -> fp32, exact: sign, 4 bits of exponent (bias 7), 3 of mantissa. 0x7f and 0xff are NaN.

    The sign and the seven low bits, moved to where fp16 has its sign, exponent and mantissa, are the number divided by 2^8
    (fp16's bias is 15), subnormal numbers included; only NaN comes out beyond 448.
    """
    bits = (byte.to(tl.int8, bitcast=True).to(tl.int16) << 7) & -0x4080
    x = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where(tl.abs(x) > 448.0, float("nan"), x)


@triton.jit
def encode_e4m3(x):
    """fp32 -> uint8 as e4m3, rounded to nearest even; beyond 448 it saturates, NaN stays NaN."""
    magnitude = tl.minimum(tl.abs(x), 448.0)
    bits = magnitude.to(tl.int32, bitcast=True)
    bits += 0x7FFFF + ((bits >> 20) & 1)  # round the 20 bits that go
    normal = (bits >> 20) - ((127 - 7) << 3)
    # Below 2^-6 the step is 2^-9: adding 2^23 leaves the nearest integer in the low bits.
    subnormal = ((magnitude * 512.0 + 8388608.0).to(tl.int32, bitcast=True)) & 0xF
    code = tl.where(magnitude < 0.015625, subnormal, normal)
    code = tl.where(x != x, 0x7F, code)
    return tl.where(x.to(tl.int32, bitcast=True) < 0, code | 0x80, code).to(tl.uint8)


@triton.jit
def load_kv(pointers, mask, dtype: tl.constexpr, KV: tl.constexpr):
    """Stored keys or values in the dtype of the query; 0 where masked."""
    if KV == KV_FP8_BYTES:
        x = decode_e4m3(tl.load(pointers, mask=mask, other=0))
    else:
        x = tl.load(pointers, mask=mask, other=0.0)
    return x.to(dtype)


@triton.jit
def page_slot(table_ptr, position, mask, PAGE_SIZE: tl.constexpr):
    """int64 page and slot of the token (or tokens) at ``position`` of the request whose table row is given."""
    page = tl.load(table_ptr + position // PAGE_SIZE, mask=mask, other=0).to(tl.int64)
    return page, (position % PAGE_SIZE).to(tl.int64)


@triton.jit
def key_offset(table_ptr, position, mask, stride_page, stride_slot, PAGE_SIZE: tl.constexpr):
    """int64 offset of that token in a cache."""
    page, slot = page_slot(table_ptr, position, mask, PAGE_SIZE)
    return page * stride_page + slot * stride_slot


@triton.jit
def head_tile(block, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEADS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Block ``block`` of a token's ``[Hkv,D]`` row: int64 heads ``[HEADS,1]``, lanes ``[1,BLOCK_D]``, which of them exist.

    Rows of a tile, not one flat range: the lanes of a head are contiguous in memory, the heads need not be.
    """
    head = (block * HEADS + tl.arange(0, HEADS)).to(tl.int64)[:, None]
    lane = tl.arange(0, BLOCK_D)[None, :]
    return head, lane, (head < KV_HEADS) & (lane < HEAD_DIM)


@triton.jit
def softmax_step(scores, highest, total):
    """Online softmax in base 2: new maximum and sum of a row, the block's weights, and the factor on what came before.

    A block that a row does not see (all -inf) leaves the row's bits as they are.
    """
    new_highest = tl.maximum(highest, tl.max(scores, 1))
    finite = tl.where(new_highest == NEG_INF, 0.0, new_highest)
    weights = tl.exp2(scores - finite[:, None])
    factor = tl.exp2(highest - finite)
    return new_highest, total * factor + tl.sum(weights, 1), weights, factor


@triton.jit
def tanh(x):
    """Accurate to a few ulp: a series near 0, where 1 - exp cancels."""
    squared = x * x
    series = x * (1.0 + squared * (-1.0 / 3 + squared * (2.0 / 15 + squared * (-17.0 / 315))))
    decay = tl.exp2(tl.abs(x) * (-2.0 * LOG2_E))
    far = (1.0 - decay) / (1.0 + decay)
    return tl.where(tl.abs(x) < 0.1, series, tl.where(x < 0, -far, far))


@triton.jit
def popcount(x):
    """Set bits of an int64."""
    x = x - ((x >> 1) & 0x5555555555555555)
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
    return ((x * 0x0101010101010101) >> 56) & 0x7F


# Noise. The same Philox streams as the reference: counter (token id // 4, position, node, stream), key the request's seed.

STREAM_COUPLED: tl.constexpr = tl.constexpr(0)
STREAM_DRAFT: tl.constexpr = tl.constexpr(1)
STREAM_ACCEPT: tl.constexpr = tl.constexpr(2)
STREAM_RECOVERED: tl.constexpr = tl.constexpr(3)
STREAM_BONUS: tl.constexpr = tl.constexpr(4)


@triton.jit
def to_uniform(word):
    """uint32 -> fp32 in the open interval (0, 1), with full floating-point resolution near 0."""
    return tl.minimum(word.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10, 0.99999994)


@triton.jit
def uniform(seed, position, node, stream: tl.constexpr):
    """One uniform number for each element of ``node``."""
    zero = node * 0
    word, _, _, _ = tl.philox(seed, zero, zero + position.to(tl.int32), node, zero + stream)
    return to_uniform(word)


@triton.jit
def gumbel_of(seed, position, node, stream, quad):
    """Standard Gumbel noise ``[..., 4n]`` of the tokens 4 quad .. 4 quad + 3, for ``quad [..., n]``.

    -log of an exponential number, which is -log1p(-u): winners lie near u = 0, where u is finely resolved.
    """
    zero = quad * 0
    w0, w1, w2, w3 = tl.philox(seed, quad, zero + position.to(tl.int32), zero + node, zero + stream)
    u = to_uniform(tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3)))
    rest = 1.0 - u
    # log1p by log: the factor undoes the rounding of 1 - u.
    exponential = tl.where(rest == 1.0, u, -tl.log(rest) * (u / tl.where(rest == 1.0, 1.0, 1.0 - rest)))
    return -tl.log(exponential)


@triton.jit
def gumbel(seed, position, node, stream, first, BLOCK: tl.constexpr):
    """The noise of the tokens ``first .. first + BLOCK - 1``; ``first`` is a multiple of 4."""
    return gumbel_of(seed, position, node, stream, first // 4 + tl.arange(0, BLOCK // 4))


@triton.jit
def inverse_of(temperature):
    """1 / temperature; temperature 0 (greedy) counts as 1, tiny ones as 1e-5."""
    return tl.div_rn(1.0, tl.where(temperature <= 0, 1.0, tl.maximum(temperature, 1e-5)))


@triton.jit
def scaled_logits(x, inverse):
    """Logits over the temperature, in fp32."""
    return widen(x).to(tl.float32) * inverse
