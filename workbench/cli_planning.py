"""The commands that foretell: what a plan needs and what a schedule costs, without a device."""

from pathlib import Path
from typing import Annotated

import typer

from workbench.console import AsJson, print_json, stdout


def dryrun(
    model: Annotated[str, typer.Option(help="A registered model, such as vit-10b.")],
    world: Annotated[str, typer.Option(help="Ranks: a number, or several as 8,16,32.")] = "8",
    plan: Annotated[str, typer.Option(help="A named plan, or several as fsdp,hsdp.")] = "fsdp",
    batch: Annotated[int, typer.Option(min=1, help="Samples per rank and forward pass.")] = 1,
    device_memory: Annotated[
        float | None, typer.Option(min=1, help="GiB of a device: say what fits. [default: only say what is needed]")
    ] = None,
    on_gpu: Annotated[bool, typer.Option("--on-gpu", help="Take the step on this machine's GPU.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say what memory each rank of a plan needs, without the ranks."""
    from workbench.parallel.survey import survey, survey_table

    runs = survey(model, world.split(","), plan.split(","), batch=batch, on_gpu=on_gpu)
    if as_json:
        rows = [row.as_json(device_memory) for row in runs]
        return print_json(rows[0] if len(rows) == 1 else rows)
    stdout().print(survey_table(runs, device_memory))


def schedule(
    name: Annotated[
        str,
        typer.Option(
            "--schedule",
            help="gpipe, 1f1b, interleaved-1f1b, looped-bfs, zb-h1, zb-h2, zb-1p, zb-2p, zb-v or dualpipe-v.",
        ),
    ],
    stages: Annotated[int, typer.Option(min=1, help="Ranks of the pipeline: devices, not the chunks on them.")],
    microbatches: Annotated[int, typer.Option(min=1, help="Micro-batches per optimizer step.")],
    chunks: Annotated[
        int | None, typer.Option(min=1, help="Model chunks per rank, of schedules that loop. [default: 2]")
    ] = None,
    forward: Annotated[float, typer.Option(help="Time of a rank's forward pass over a micro-batch.")] = 1.0,
    backward_input: Annotated[float, typer.Option(help="Of its backward pass for the input.")] = 1.0,
    backward_weight: Annotated[float, typer.Option(help="Of its backward pass for the weights.")] = 1.0,
    transfer: Annotated[float, typer.Option(help="Of an activation, or its gradient, between ranks.")] = 0.0,
    gantt: Annotated[Path | None, typer.Option(help="Draw the timeline into this .svg or .png.")] = None,
    as_json: AsJson = False,
) -> None:
    """Simulate a pipeline: bubble, makespan, memory."""
    from workbench.batch.schedule import check_gantt, simulate_schedule, summary, summary_text, write_gantt

    if gantt is not None:
        check_gantt(gantt)
    times = (forward, backward_input, backward_weight)
    run = simulate_schedule(name, stages, microbatches, chunks, times, transfer)
    answer = summary(name, run, microbatches)
    if gantt is not None:
        said = f"F {forward:g}, I {backward_input:g}, W {backward_weight:g}, transfer {transfer:g}"
        write_gantt(gantt, run, answer, f"simulated · times of a stage: {said}")
    if as_json:
        print_json(answer)
    else:
        stdout().print(summary_text(answer))
