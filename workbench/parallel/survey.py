"""Dry runs of one model over worlds and plans: on how many devices of what memory does it fit?"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from workbench.errors import Refused
from workbench.models.config import check_model
from workbench.parallel.plan import check_plan_name, named_plan

if TYPE_CHECKING:
    from rich.table import Table

    from workbench.parallel.dryrun import DryRun

OUTSIDE = 2 * 2**30
"""Of a device's memory, what is not the allocator's to give: the CUDA context and NCCL's buffers, rounded up."""
GIB = 2**30
KINDS = ("parameters", "gradients", "optimizer", "activations", "gathered")


class Row(NamedTuple):
    """One named plan in one world: its dry run, or why it cannot be."""

    plan: str
    world: int
    run: "DryRun | None"
    refusal: str = ""

    def fits(self, memory_gib: float) -> Literal["yes", "tight", "no"]:
        """Whether a rank runs on such a device; ``tight`` where the allocator must give back what lies free in between."""
        assert self.run is not None
        room = memory_gib * GIB - OUTSIDE
        return "yes" if self.run.reserved_bytes <= room else "tight" if self.run.peak_bytes <= room else "no"

    def as_json(self, memory_gib: float | None) -> dict[str, Any]:
        if self.run is None:
            return {"name": self.plan, "world": self.world, "refused": self.refusal}
        fits = {} if memory_gib is None else {"device_memory_gib": memory_gib, "fits": self.fits(memory_gib)}
        return {"name": self.plan, **self.run.model_dump(mode="json"), **fits}


def survey(
    model: str, worlds: Sequence[str | int], plans: Sequence[str], *, batch: int = 1, on_gpu: bool = False
) -> list[Row]:
    """A dry run of every plan in every world. Where there are several, one that cannot compose is a row with the reason.

    Raises:
        Refused: an unknown model or plan, a world that is no number, or the only plan asked for cannot compose.
    """
    check_model(model)
    sizes = [_number(world) for world in worlds]
    for plan in plans:
        check_plan_name(plan)
    asked = [(plan, size) for plan in plans for size in sizes]
    from workbench.parallel.dryrun import dry_run

    rows = []
    for name, size in asked:
        try:
            method: Literal["allocator", "fake tensors"] = "allocator" if on_gpu else "fake tensors"
            rows.append(Row(name, size, dry_run(model, named_plan(name, size), world=size, batch=batch, method=method)))
        except Refused as refusal:
            if len(asked) == 1:
                raise
            rows.append(Row(name, size, None, str(refusal)))
    return rows


def survey_table(rows: Sequence[Row], memory_gib: float | None = None) -> "Table":
    """GiB per rank: the peak, what for, what the allocator reserves, and whether it fits."""
    from rich.table import Table

    heads = ["plan", "ranks", "peak", *KINDS, "other", "reserved", "host"]
    table = Table(*heads, box=None, pad_edge=False, header_style="bold", caption="GiB per rank", caption_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    if memory_gib is not None:
        table.add_column(f"fits {memory_gib:g} GiB")
    for row in rows:
        if row.run is None:
            table.add_row(row.plan, str(row.world), f"[yellow]{row.refusal.partition(';')[0]}[/]")
            continue
        run = row.run
        parts = [run.breakdown.get(kind, 0) for kind in KINDS]
        other = run.peak_bytes - sum(parts) if run.breakdown else 0
        sizes = [run.peak_bytes, *parts, other, run.reserved_bytes, run.host_bytes]
        fits = [] if memory_gib is None else [row.fits(memory_gib)]
        table.add_row(row.plan, str(row.world), *(f"{size / GIB:,.1f}" for size in sizes), *fits)
    return table


def _number(world: str | int) -> int:
    try:
        size = int(world)
    except ValueError:
        raise Refused("world", world, allowed="a number of ranks, or several as 8,16,32") from None
    if size < 1:
        raise Refused("world", size, allowed="1 or more")
    return size
