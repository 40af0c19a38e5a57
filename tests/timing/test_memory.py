"""The caching allocator's pools, and what time does to them."""

from records import Rank

from sim.timing.costs.costfile import HOST_CALLS, load_cluster
from sim.timing.costs.model import CostModel
from sim.timing.replay.memory import CachingAllocator, MemoryTimeline, memory_timeline
from sim.timing.replay.timeline import replay

MIB = 1 << 20
CLUSTER = load_cluster("h200-x2").changed(host=dict.fromkeys(HOST_CALLS, 0.0), launch_latency_ns=0)


def test_sizes_are_rounded_up() -> None:
    allocator = CachingAllocator()
    allocator.allocate(0, 1)
    assert allocator.allocated == 512
    assert allocator.reserved == 2 * MIB


def test_small_large_and_huge_blocks_come_from_segments_of_their_own() -> None:
    allocator = CachingAllocator()
    reserved = []
    for size in (MIB, MIB + 1, 8 * MIB, 12 * MIB + 1):
        allocator.allocate(0, size)
        reserved.append(allocator.reserved // MIB)
    assert reserved == [2, 22, 22, 36]


def test_the_smallest_block_that_fits_is_given_out_again() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(0, size * MIB) for size in (60, 40, 50)]
    for block in blocks:
        allocator.release(block)
    assert allocator.allocate(0, 45 * MIB) is blocks[2]
    assert allocator.reserved == 150 * MIB


def test_a_large_block_is_split_and_joined_again() -> None:
    allocator = CachingAllocator()
    whole = allocator.allocate(0, 100 * MIB)
    allocator.release(whole)
    parts = [allocator.allocate(0, 30 * MIB) for _ in range(3)]
    assert allocator.reserved == 100 * MIB
    for part in (parts[0], parts[2], parts[1]):
        allocator.release(part)
    assert allocator.allocate(0, 100 * MIB).size == 100 * MIB
    assert allocator.reserved == 100 * MIB


def test_streams_share_no_blocks() -> None:
    allocator = CachingAllocator()
    allocator.release(allocator.allocate(0, 50 * MIB))
    allocator.allocate(1, 50 * MIB)
    assert allocator.reserved == 100 * MIB


def timeline(story: Rank) -> MemoryTimeline:
    return memory_timeline(replay([story.trace()], CostModel(CLUSTER)), 0)


def test_a_recorded_stream_delays_reuse_until_it_is_done() -> None:
    def run(is_recorded: bool) -> MemoryTimeline:
        story = Rank()
        story.step()
        story.add("allocate", stream=0, storage=1, bytes=50 * MIB)
        story.kernel(3)
        if is_recorded:
            story.add("record_stream", stream=3, storage=1)
        story.add("free", storage=1)
        story.add("allocate", stream=0, storage=2, bytes=50 * MIB)
        story.done()
        return timeline(story)

    assert run(False).peak_reserved_bytes == 50 * MIB
    assert run(True).peak_reserved_bytes == 100 * MIB


def test_it_comes_back_once_the_host_has_waited_for_that_stream() -> None:
    story = Rank()
    story.step()
    story.add("allocate", stream=0, storage=1, bytes=50 * MIB)
    story.kernel(3)
    story.add("record_stream", stream=3, storage=1)
    story.add("free", storage=1)
    story.add("host_sync", what="stream", on=3)
    story.add("allocate", stream=0, storage=2, bytes=50 * MIB)
    story.done()
    assert timeline(story).peak_reserved_bytes == 50 * MIB


def test_memory_from_before_the_step_counts() -> None:
    story = Rank()
    story.add("allocate", stream=0, storage=1, bytes=8 * MIB)
    story.step()
    story.add("allocate", stream=0, storage=2, bytes=4 * MIB)
    story.add("free", storage=2)
    story.done()
    assert timeline(story).peak_bytes == 12 * MIB


def test_gathered_parameters_are_counted_while_they_are_there() -> None:
    story = Rank()
    story.group("g", 0)
    story.step()
    for n in range(2):
        story.add("resize", stream=2, storage=6, bytes=8 * MIB, was=0)
        story.collective("g", n)
        story.add("resize", stream=2, storage=6, bytes=0, was=8 * MIB)
    story.done()
    found = timeline(story)
    assert found.peak_gathered_bytes == 8 * MIB
    assert found.points[-1][1] == 0
