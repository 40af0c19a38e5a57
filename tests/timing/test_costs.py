"""What kernels and messages cost, against arithmetic and against PyTorch's own estimate."""

import dataclasses

import pytest

from sim.timing.costs.collectives import Placement, collective_ns, place
from sim.timing.costs.costfile import Curve, load_cluster
from sim.timing.costs.kernels import kernel_class, work_of
from sim.timing.costs.model import CostModel

H100 = load_cluster("h100")
FLAT = Curve(sizes=(1.0,), values=(1.0,))
IDEAL = H100.changed(
    efficiency=dict.fromkeys(H100.efficiency, FLAT),
    links={
        tier: dataclasses.replace(
            link, latency_ns=0, hop_ns=0, efficiency=dict.fromkeys(link.efficiency, FLAT)
        )
        for tier, link in H100.links.items()
    },
)


@pytest.mark.parametrize(
    ("name", "shapes", "flops"),
    [
        ("mm", [["bf16", 64, 32], ["bf16", 32, 128], ["bf16", 64, 128]], 2 * 64 * 32 * 128),
        ("te:gemm_TN", [["bf16", 128, 32], ["bf16", 64, 32], ["bf16", 64, 128]], 2 * 64 * 32 * 128),
        ("te:gemm_NT", [["bf16", 64, 32], ["bf16", 64, 128], ["bf16", 1, 128], ["bf16", 128, 32]],
         2 * 64 * 32 * 128),
        ("bmm", [["bf16", 4, 64, 32], ["bf16", 4, 32, 128], ["bf16", 4, 64, 128]],
         4 * 2 * 64 * 32 * 128),
        ("baddbmm", [["bf16", 4, 64, 128], ["bf16", 4, 64, 32], ["bf16", 4, 32, 128],
                     ["bf16", 4, 64, 128]], 4 * 2 * 64 * 32 * 128),
        ("addmm", [["bf16", 128], ["bf16", 64, 32], ["bf16", 32, 128], ["bf16", 64, 128]],
         2 * 64 * 32 * 128),
        ("grouped_mm", [["bf16", 64, 32], ["bf16", 8, 32, 128], ["bf16", 64, 128]],
         2 * 64 * 32 * 128),
        ("te:grouped_gemm", [["bf16", 64, 32], ["bf16", 64, 128], ["bf16", 8, 128, 32]],
         2 * 64 * 32 * 128),
        ("_scaled_dot_product_flash_attention", [["bf16", 2, 4, 64, 16]] * 4,
         2 * 2 * 2 * 4 * 64 * 64 * 16 / 2),
        ("te:fused_attn_bwd", [["bf16", 64, 2, 4, 16]] * 4, 2.5 * 2 * 2 * 2 * 4 * 64 * 64 * 16 / 2),
    ],
)  # fmt: skip
def test_flops_follow_from_shapes(name: str, shapes: list[list[object]], flops: float) -> None:
    assert work_of(name, shapes).flops == pytest.approx(flops)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("mul", "elementwise"), ("te:rmsnorm_forward", "reduction"), ("cat", "copy"),
     ("index_select", "copy"), ("_softmax", "reduction"), ("_unsafe_view", ""),
     ("te:gemm_TN", "matrix"), ("te:grouped_gemm_NN", "grouped_matrix")],
)  # fmt: skip
def test_kernels_have_a_class(name: str, kind: str) -> None:
    assert kernel_class(name) == kind


def test_a_lookup_moves_what_it_takes_and_not_the_whole_table() -> None:
    shapes = [["bf16", 32000, 64], ["i64", 1, 16], ["bf16", 1, 16, 64]]
    assert work_of("embedding", shapes).num_bytes == 2 * 16 * 64 * 2


def test_a_lookup_of_single_elements_moves_single_elements() -> None:
    """One logit of each row: the table has 32,768 of them in each."""
    shapes = [["f32", 8192, 32768], ["i64", 8192], ["i64", 8192], ["f32", 8192]]
    assert work_of("index", shapes).num_bytes == 2 * 8192 * 4


def test_the_slower_of_memory_and_arithmetic_decides() -> None:
    model = CostModel(IDEAL)
    side = 8192
    square = [["bf16", side, side]] * 3
    assert model.kernel_ns("mm", square) == round(2 * side**3 / 989e3)
    thin = [["bf16", side, 1], ["bf16", 1, side], ["bf16", side, side]]
    assert model.kernel_ns("mm", thin) == round(2 * (side * side + 2 * side) / 3350)
    assert model.kernel_ns("add", square) == round(3 * 2 * side * side / 3350)


def test_a_small_kernel_takes_the_floor_and_a_view_nothing() -> None:
    model = CostModel(IDEAL)
    assert model.kernel_ns("add", [["f32", 4]]) == IDEAL.kernel_floor_ns
    assert model.kernel_ns("_unsafe_view", [["f32", 4]]) == 0


INSIDE = Placement(num_ranks=8, num_nodes=1, per_node=8)


@pytest.mark.parametrize(
    ("kind", "given", "moved"),
    [
        ("all_gather", 1 << 20, 7 << 20),
        ("reduce_scatter", 8 << 20, 7 << 20),
        ("all_reduce", 8 << 20, 14 << 20),
        ("all_to_all_single", 8 << 20, 7 << 20),
        ("broadcast", 8 << 20, 7 << 20),
    ],
)
def test_a_collective_inside_a_node_moves_what_a_ring_moves(
    kind: str, given: int, moved: int
) -> None:
    assert collective_ns(IDEAL, kind, given, INSIDE) == round(moved / 450)


def test_between_nodes_the_slower_tier_decides() -> None:
    two = Placement(num_ranks=16, num_nodes=2, per_node=8)
    # Each rank sends half of its tokens away through its own port.
    assert collective_ns(IDEAL, "all_to_all_single", 16 << 20, two) == round((8 << 20) / 50)
    # Half of the result comes from the other node, an eighth of it through each port: NVLink,
    # which carries all of it, takes longer.
    assert collective_ns(IDEAL, "all_gather", 1 << 20, two) == round((15 << 20) / 450)
    many = Placement(num_ranks=128, num_nodes=16, per_node=8)
    assert collective_ns(IDEAL, "all_gather", 1 << 20, many) == round((120 << 20) / 8 / 50)


def test_latency_grows_with_the_logarithm_of_the_group() -> None:
    link = H100.links["node"]
    assert collective_ns(H100, "barrier", 0, INSIDE) == round(link.latency_ns + 3 * link.hop_ns)


def test_ranks_fill_nodes_in_order() -> None:
    assert place([0, 1, 2, 3], 8).tiers == ("node",)
    assert place([0, 8], 8).tiers == ("network",)
    assert place(range(16), 8) == Placement(num_ranks=16, num_nodes=2, per_node=8)
    assert place([3], 8).tiers == ()


@pytest.mark.parametrize("num_ranks", [2, 8])
@pytest.mark.parametrize("num_bytes", [1 << 20, 1 << 26, 1 << 28])
@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all"])
def test_pytorch_agrees_on_the_order_of_magnitude(
    kind: str, num_bytes: int, num_ranks: int
) -> None:
    analysis = pytest.importorskip("torch._inductor.comm_analysis")
    coll = getattr(analysis.NCCL_COLL, kind.upper(), None)
    if coll is None:
        pytest.skip(f"this PyTorch has no estimate of {kind}")
    theirs = analysis.estimate_nccl_collective_runtime_impl(num_bytes, num_ranks, coll)
    placement = Placement(num_ranks=num_ranks, num_nodes=1, per_node=num_ranks)
    given = num_bytes // num_ranks if kind == "all_gather" else num_bytes
    ours = collective_ns(H100, kind, given, placement) / 1e6
    assert theirs / 5 < ours < theirs * 5
