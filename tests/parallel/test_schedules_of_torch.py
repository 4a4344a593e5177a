"""The tables that torch.distributed.pipelining builds for the same schedules, pass by pass."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, schedules
from torch.testing._internal.distributed.fake_pg import FakeStore

from workbench.parallel.schedules import Action, Table, num_chunks, schedule_table, stages_of_rank

CLASSES = {
    "gpipe": schedules.ScheduleGPipe,
    "1f1b": schedules.Schedule1F1B,
    "interleaved-1f1b": schedules.ScheduleInterleaved1F1B,
    "looped-bfs": schedules.ScheduleLoopedBFS,
    "zb-v": schedules.ScheduleZBVZeroBubble,
    "dualpipe-v": schedules.ScheduleDualPipeV,
}
KINDS: dict[str, Any] = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}


def torch_table(name: str, ranks: int, microbatches: int, chunks: int | None) -> Table:
    """Its passes alone: neither idle slots nor transfers, and what it overlaps one after the other."""
    v = num_chunks(name, chunks)
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        mine = stages_of_rank(name, 0, ranks, chunks)
        stages = [PipelineStage(torch.nn.Identity(), s, ranks * v, torch.device("cpu")) for s in mine]
        many = issubclass(CLASSES[name], schedules.PipelineScheduleMulti)
        schedule = CLASSES[name](stages if many else stages[0], microbatches, loss_fn=lambda *_: None)
        order = schedule.pipeline_order if many else schedule._get_pipeline_order()
    finally:
        dist.destroy_process_group()
    rows = ([b for a in order[r] if a is not None for b in (a.sub_actions or (a,))] for r in range(ranks))
    return tuple(
        tuple(
            Action(KINDS[a.computation_type.name], a.stage_index, a.microbatch_index)
            for a in row
            if a.computation_type.name in KINDS
        )
        for row in rows
    )


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 4), (4, 16), (5, 20)])
@pytest.mark.parametrize("name", CLASSES)
def test_tables_are_torchs(name, ranks, microbatches):
    if name == "dualpipe-v" and microbatches < 2 * ranks:
        pytest.skip("two micro-batches per rank at least")
    chunks = 3 if name in ("interleaved-1f1b", "looped-bfs") else None
    mine, theirs = schedule_table(name, ranks, microbatches, chunks), torch_table(name, ranks, microbatches, chunks)
    if name == "1f1b":  # torch numbers the last rank's forward passes from 1 to m in this listing; it runs 0 to m-1
        mine, theirs = mine[:-1], theirs[:-1]
    assert mine == theirs
