"""What compiled programs do, read off their text, against what is known of them."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.sharding import NamedSharding, PartitionSpec

from experiments.studies.compiling.cost import COLLECTIVES, cost_of, kernel_flops
from experiments.studies.compiling.hlo import parse
from tests.training.batches import mesh_of


def compiled_cost(function, *arguments, chips=1, **options):
    lowered = jax.jit(function, **options).lower(*arguments)
    return cost_of(parse(lowered.compile().as_text()), chips)


def test_the_body_of_a_loop_counts_as_often_as_it_runs():
    def loop(x, kernels):
        return jax.lax.scan(lambda x, kernel: (jnp.tanh(x @ kernel), None), x, kernels)[0]

    cost = compiled_cost(loop, jnp.zeros((8, 16)), jnp.zeros((5, 16, 16)))
    assert cost.flops == 5 * 2 * 8 * 16 * 16
    assert cost.endless == 0


def test_a_loop_of_unknown_length_is_told():
    def loop(x):
        return jax.lax.while_loop(lambda x: x.sum() < 100, lambda x: x @ x, x)

    cost = compiled_cost(loop, jnp.ones((4, 4)))
    assert (cost.flops, cost.endless) == (2 * 4**3, 1)


def test_a_batched_matmul_that_is_written_as_a_convolution_counts_no_padding():
    text = """HloModule m

ENTRY %main (x: bf16[8,4,64], k: bf16[8,64,512]) -> bf16[8,4,512] {
  %x = bf16[8,4,64]{2,1,0:T(8,128)(2,1)} parameter(0)
  %k = bf16[8,64,512]{2,1,0:T(8,128)(2,1)S(1)} parameter(1)
  ROOT %y = bf16[8,4,512]{2,1,0} convolution(%x, %k), WHERE
}
""".replace("WHERE", "window={size=8 stride=7 lhs_dilate=8}, dim_labels=0bf_0io->0bf")
    cost = cost_of(parse(text), 1)
    assert cost.flops == 8 * 2 * 4 * 64 * 512
    assert cost.hbm_bytes == 2 * (8 * 4 * 64 + 8 * 4 * 512)  # the kernel is not in HBM


def test_of_a_stack_that_a_loop_reads_and_writes_a_turn_moves_its_own_rows():
    def loop(stack):
        return jax.lax.scan(lambda x, row: (x + row, x * row), stack[0], stack)

    once, often = (compiled_cost(loop, jnp.zeros((n, 1 << 14))).hbm_bytes for n in (64, 128))
    assert often < 2.5 * once


def hbm_bytes(operands, instruction, chips=1):
    """HBM traffic of an instruction of these operands, each of which has a type."""
    lines = [f"  %{name} = {kind} parameter({i})" for i, (name, kind) in enumerate(operands.items())]
    text = "\n".join(
        ["HloModule m", "", "ENTRY %main () -> f32[] {", *lines, f"  ROOT %y = {instruction}", "}"]
    )
    return cost_of(parse(text), chips).hbm_bytes


def test_a_slice_reads_its_own_rows_and_its_indices():
    table, row = "f32[64,1024]{1,0}", "f32[1,1024]{1,0}"
    sliced = f"{row} dynamic-slice(%x, %i, %j), dynamic_slice_sizes={{1,1024}}"
    assert hbm_bytes({"x": table, "i": "s32[]", "j": "s32[]"}, sliced) == 2 * 4096 + 2 * 4
    looked_up = "f32[3,1024]{1,0} gather(%x, %i), slice_sizes={1,1024}"
    assert hbm_bytes({"x": table, "i": "s32[3]{0}"}, looked_up) == 2 * 3 * 4096 + 3 * 4
    written = f"{table} dynamic-update-slice(%x, %r, %i, %j)"
    assert hbm_bytes({"x": table, "r": row, "i": "s32[]", "j": "s32[]"}, written) == 2 * 4096 + 2 * 4


def test_a_collective_that_goes_on_in_the_background_writes_its_result():
    part, whole = "f32[4,8]{1,0}", "f32[32,8]{1,0}"
    groups = "replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}"
    gathered = f"({part}, {whole}) all-gather-start(%x), {groups}"
    assert hbm_bytes({"x": part}, gathered, chips=8) == 128 + 1024
    both = f"(({part}, {part}), ({whole}, {whole})) all-gather-start(%x, %z), {groups}"
    assert hbm_bytes({"x": part, "z": part}, both, chips=8) == 2 * (128 + 1024)
    moved = f"({part}, {part}, u32[], u32[]) collective-permute-start(%x), source_target_pairs={{{{0,1}}}}"
    assert hbm_bytes({"x": part}, moved, chips=8) == 128 + 128


def test_collectives_are_counted_in_bytes_that_a_chip_sends():
    mesh = mesh_of(8, data=1, fsdp=8)
    split, whole = (NamedSharding(mesh, PartitionSpec(axis)) for axis in ("fsdp", None))
    w = jax.ShapeDtypeStruct((32, 8), jnp.float32, sharding=split)
    gathered = compiled_cost(lambda w: w, w, chips=8, out_shardings=whole).bytes_by_kind()
    assert gathered == {**dict.fromkeys(COLLECTIVES, 0.0), "all-gather": 7 * 32 * 8 * 4 / 8}
    added = compiled_cost(lambda w: w.sum(0), w, chips=8, out_shardings=whole).bytes_by_kind()
    assert added == {**dict.fromkeys(COLLECTIVES, 0.0), "all-reduce": 2 * 7 / 8 * 8 * 4}


def test_a_kernel_counts_its_grid_within_the_loops_around_it():
    def kernel(x_ref, y_ref, out_ref):
        out_ref[...] = x_ref[...] @ y_ref[...]

    def multiply(x, y):
        return pl.pallas_call(
            kernel,
            grid=(4,),
            in_specs=[pl.BlockSpec((8, 16), lambda i: (i, 0)), pl.BlockSpec((16, 16), lambda i: (0, 0))],
            out_specs=pl.BlockSpec((8, 16), lambda i: (i, 0)),
            out_shape=jax.ShapeDtypeStruct((32, 16), jnp.float32),
            interpret=True,
        )(x, y)

    def loop(x, y):
        return jax.lax.fori_loop(0, 3, lambda _, x: multiply(x, y), x)

    traced = jax.jit(loop).trace(jnp.zeros((32, 16)), jnp.zeros((16, 16)))
    assert kernel_flops(traced.jaxpr.jaxpr, 1) == 3 * 2 * 32 * 16 * 16
    assert kernel_flops(jax.make_jaxpr(lambda x: x @ x)(np.eye(3)).jaxpr, 1) == 0
