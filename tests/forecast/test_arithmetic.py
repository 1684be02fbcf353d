"""The FLOPs of compiled programs, compared with counts by hand."""

import functools

import jax
import jax.numpy as jnp
import pytest

from forecast import arithmetic
from forecast.traffic import rows_in_use
from tests.common import full, net, slow
from tests.helpers import make, mesh_of, program_of
from tests.parallel.test_hlo import of_text
from zigzag.parallel.pipeline import ticks
from zigzag.run.plan import compiled


def S(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def operations(fn, *args):
    return arithmetic.arithmetic(jax.jit(fn).lower(*args).compile())


def test_products_are_counted_by_hand():
    """A loop's body counted once, as by XLA; batch dimensions counted as contracted."""
    def body(x, w):
        return jnp.tanh(x @ w), None

    assert operations(lambda x, ws: jax.lax.scan(body, x, ws)[0],
                      S(8, 32), S(5, 32, 32)) == 5 * 2 * 8 * 32 * 32
    assert operations(lambda a, b: jnp.einsum("bij,bjk->bik", a, b),
                      S(3, 4, 5), S(3, 5, 6)) == 2 * 3 * 4 * 5 * 6


@pytest.mark.parametrize("stride, pad, dilated", [(1, 0, 1), (2, 1, 1), (1, 2, 2)])
def test_convolutions_are_counted_by_hand(stride, pad, dilated):
    """Products with padding, or with the zeros of a dilated image, counted as arithmetic."""
    image = {i * dilated for i in range(10)}        # where there are numbers
    places = range(0, 9 * dilated + 1 + 2 * pad - 2, stride)
    taps = sum(o + k - pad in image for o in places for k in range(3))
    assert operations(lambda x, k: jax.lax.conv_general_dilated(
        x, k, (stride,), [(pad, pad)], lhs_dilation=(dilated,)),
        S(2, 4, 10), S(6, 4, 3)) == 2 * 2 * 6 * 4 * taps


def test_a_batched_product_of_a_tpu_is_not_a_convolution():
    """A count 16 times too high: a TPU program writes a product of 16 batches as a convolution with
    a dilated side."""
    text = ", window={size=16 stride=15 pad=0_0 lhs_dilate=16}, dim_labels=0bf_0io->0bf"
    assert arithmetic._convolution_products([16, 8, 4], [16, 8, 32], [16, 32, 4],
                                     text) == 16 * 8 * 4 * 32


# Operands of kernels are in their layouts: queries, keys and values of cuDNN [B, T, H, N], of
# splash attention blocks [1, n, m], queries [B H, T, N] or [B, H, T, N], documents and slots, of a
# ragged product groups and two matrices.
QKV = "bf16[8,512,4,128]{3,2,1,0}, bf16[8,384,2,128]{3,2,1,0}, bf16[8,384,2,128]{3,2,1,0}"
BLOCKS = "s8[1,4,4]{2,1,0}, s8[1,4,4]{2,1,0}, bf16[8,512,64]{2,1,0}, bf16[8,512,64]{2,1,0}"
SLOTS = "s32[512,128]{1,0}"
WINDOW = "s8[1,2,4]{2,1,0}, s8[1,2,4]{2,1,0}, bf16[8,512,64]{2,1,0}, s32[8,512]{1,0}"
DOCUMENTS = ("s8[1,4,4]{2,1,0}, s8[1,4,4]{2,1,0}, bf16[2,4,512,64]{3,2,1,0}, "
             "s32[2,512,128]{2,1,0}, s32[2,8,512]{2,1,0}")
RAGGED = "s32[1]{0}, s32[5]{0}, bf16[4096,512]{1,0}, bf16[4,512,352]{2,1,0}"
TPU = 'custom_call_target="tpu_custom_call", operand_layout_constraints='
KERNELS = [
    (f'custom_call_target="__cudnn$fmhaSoftmax", operand_layout_constraints={{{QKV}}}, '
     f'backend_config={{"mask_type": "CAUSAL"}}', 2 * 8 * 512 * 384 * 4 * 128),
    (f'custom_call_target="__cudnn$fmhaSoftmaxBackward", operand_layout_constraints={{{QKV}}}, '
     f'backend_config={{"mask_type": "CAUSAL"}}', 5 * 8 * 512 * 384 * 4 * 128),
    (f'custom_call_target="__cudnn$fmhaSoftmax", operand_layout_constraints={{{QKV}}}',
     4 * 8 * 512 * 384 * 4 * 128),
    (f'custom_call_target="__cudnn$fmhaSoftmax", operand_layout_constraints={{{QKV}}}, '
     f'backend_config={{"mask_type":"CAUSAL","sliding_window_length":128}}',
     4 * 8 * 128 * (512 - 64) * 4 * 128),
    (f'{TPU}{{{BLOCKS}, {SLOTS}}}, kernel="%splash_mha_fwd_residuals"',
     2 * 8 * 512 * 512 * 64 * 5 / 4),
    (f'{TPU}{{{BLOCKS}, {SLOTS}}}, kernel="%splash_mha_dq_no_residuals"',
     3 * 8 * 512 * 512 * 64 * 5 / 4),
    (f'{TPU}{{{BLOCKS}, {SLOTS}}}, kernel="%splash_mha_dkv_no_residuals"',
     4 * 8 * 512 * 512 * 64 * 5 / 4),
    (f'{TPU}{{{BLOCKS}}}, kernel="%splash_mha_fwd_residuals"', 4 * 8 * 512 * 512 * 64),
    (f'{TPU}{{{WINDOW}}}, kernel="%splash_mha_dkv_no_residuals"', 8 * 8 * 512 * 512 * 64 * 7 / 16),
    (f'{TPU}{{{DOCUMENTS}, {SLOTS}}}, kernel="%splash_mha_fwd_segmented_residuals"',
     2 * 8 * 512 * 512 * 64 * 5 / 4),
    (f'{TPU}{{{DOCUMENTS}}}, kernel="%splash_mha_dq_segmented_no_residuals"',
     6 * 8 * 512 * 512 * 64),
    (f'{TPU}{{{RAGGED}}}, frontend_attributes={{ragged_dot_tiling="128,512,352"}}',
     0.5 * 2 * 4096 * 512 * 352)]


@pytest.mark.parametrize("call, expected", KERNELS)
def test_kernels_are_counted_by_hand(call, expected):
    """Half of a step's arithmetic missing, because a kernel is one opaque call."""
    text = ("ENTRY %main.1 (p: f32[]) -> f32[] {\n"
            f"  %c.1 = bf16[4096,352]{{1,0}} custom-call(%p), {call}\n}}")
    assert arithmetic.arithmetic(of_text(text), ragged=0.5) == expected


WIDE = dict(layers=8, d_model=64, heads=8, d_ff=128, batch=64, seq_len=32, vocab_size=256)


@functools.cache
def work_of_one_device(**changes):
    return arithmetic.arithmetic(compiled(program_of(make(**WIDE, **changes), "")))


@pytest.mark.full
@pytest.mark.parametrize("mesh, changes", [
    full("data=8", {}), ("tensor=8", {}), ("seq=8", {}), full("fsdp=8", {}),
    slow("pipe=8", dict(microbatches=8)), slow("expert=8", {}),
    slow("expert=8", dict(experts=8)), slow("tensor=8", dict(experts=8)),
    slow("data=2,fsdp=2,tensor=2", {}), slow("pipe=2,seq=2,tensor=2", dict(microbatches=8)),
    slow("data=2,expert=2,tensor=2", dict(experts=4, shared_experts=1)),
    slow("pipe=4,tensor=2", dict(microbatches=8, schedule="interleaved", chunks=2))])
def test_the_work_is_divided(mesh, changes):
    """A device that does work which others do too: a product with unsplit weights, or all
    tokens."""
    config, one = make(**WIDE, **changes), work_of_one_device(**changes)
    usual, c = net.flops(config, 64 * 32), config.network
    # (Experts have the largest number of blocks.)
    assert 1 <= one / usual < 1.2 if c.experts else one == usual
    sizes = dict(mesh_of(mesh).shape)
    # An expert's device skips the rows that are in no group.
    S, M, program = sizes["pipe"], c.microbatches, program_of(config, mesh)
    each = arithmetic.arithmetic(compiled(program), rows_in_use(program.config, program.mesh))
    count = ticks(S, M, c.schedule, c.chunks) / c.chunks if S > 1 else M
    assert each <= 1.05 * one / 8 * count / M
