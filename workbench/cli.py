"""The command line. Each command loads what it needs when it is called, so that ``--help`` costs next to nothing.

Exit codes: 0 done; 1 an arm or a notebook failed; 2 refused, nothing started; 124 timed out; 130 interrupted; 137 killed.
Results go to standard output, progress and errors to standard error.
"""

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from workbench import cli_planning
from workbench.console import AsJson, print_json, stderr, stdout
from workbench.errors import Refused

if TYPE_CHECKING:
    from workbench.records.record import RunRecord

app = typer.Typer(
    name="workbench",
    help="Controlled experiments on what makes large vision models train faster, and by how much.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
data = typer.Typer(help="Data sets: list, verify, fetch.", no_args_is_help=True)
app.add_typer(data, name="data")

Root = Annotated[Path, typer.Option("--root", help="Folder of the run records.", envvar="WORKBENCH_RUNS")]
Seconds = Annotated[float | None, typer.Option("--timeout", min=0.001, help="Seconds that one run may take.")]
RUNS = Path("runs")


@app.command()
def doctor(root: Root = RUNS, as_json: AsJson = False) -> None:
    """Say what this machine can run, and why not the rest."""
    from workbench.batch.doctor import examine

    checks = examine(root)
    if as_json:
        print_json([check.model_dump() for check in checks])
    else:
        from rich.markup import escape
        from rich.table import Table

        table = Table(box=None, show_header=False, pad_edge=False)
        style = {"yes": "[green]yes[/]", "no": "[yellow]no[/]", "trouble": "[red]trouble[/]"}
        for check in checks:
            fix = f"\n[dim]{escape(check.fix)}[/]" if check.fix else ""
            table.add_row(escape(check.subject), style[check.state], escape(check.detail) + fix)
        stdout().print(table)
    raise typer.Exit(1 if any(check.state == "trouble" for check in checks) else 0)


PAIR_OPTIONS = ("-p", "--parameters", "-r", "--parameters_raw")


class PairsCommand(TyperCommand):
    """Papermill's ``-p NAME VALUE``: typer knows no repeated option of two words, so each pair is handed on as JSON."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        joined, rest = [], list(args)
        while rest:
            word = rest.pop(0)
            joined.append(word)
            if word == "--":
                joined, rest = joined + rest, []
            elif word in PAIR_OPTIONS:
                if len(rest) < 2:
                    raise Refused(f"option {word} takes two words", allowed=f"{word} NAME VALUE")
                joined.append(json.dumps([rest.pop(0), rest.pop(0)]))
        return super().parse_args(ctx, joined)


def _pairs(words: list[str] | None) -> list[tuple[str, str]]:
    return [(name, value) for name, value in map(json.loads, words or ())]


@app.command(cls=PairsCommand)
def run(
    notebook: Annotated[Path, typer.Argument(help="The notebook to run.")],
    typed: Annotated[
        list[str] | None,
        typer.Option("-p", "--parameters", metavar="NAME VALUE", help="A parameter, typed by the notebook's cell."),
    ] = None,
    raw: Annotated[
        list[str] | None,
        typer.Option("-r", "--parameters_raw", metavar="NAME VALUE", help="A parameter's string as it is."),
    ] = None,
    files: Annotated[
        list[Path] | None,
        typer.Option("-f", "--parameters_file", help="YAML, JSON or TOML file of parameters."),
    ] = None,
    inline: Annotated[
        list[str] | None,
        typer.Option("-y", "--parameters_yaml", help="Parameters as YAML; wins over -f, -p wins over it."),
    ] = None,
    timeout: Seconds = None,
    cell_timeout: Annotated[
        int | None, typer.Option("--execution-timeout", min=1, help="Whole seconds that one cell may take.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="The run's own folder, which must not exist.")] = None,
    root: Root = RUNS,
    help_notebook: Annotated[bool, typer.Option("--help-notebook", help="List the notebook's parameters.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run one notebook and record what became of it."""
    if help_notebook:
        return _help_notebook(notebook, as_json)
    from workbench.batch.detail import summary
    from workbench.batch.preflight import prepare
    from workbench.batch.progress import RunDisplay
    from workbench.batch.runner import run_notebook
    from workbench.batch.sources import from_options
    from workbench.batch.status import as_json as record_json
    from workbench.batch.status import status_text
    from workbench.experiment.finding import read_finding

    given = from_options(_pairs(typed), _pairs(raw), inline or (), files or ())
    prepared = prepare(notebook, given)
    if out is not None and not out.absolute().name:
        raise Refused("--out", str(out), allowed="a folder that does not exist", fix="name one inside it")
    folder, run_id = (out.absolute().parent, out.absolute().name) if out else (root, None)
    with RunDisplay(stderr()) as display:
        record = run_notebook(
            prepared,
            folder,
            run_id=run_id,
            timeout=timeout,
            cell_timeout=cell_timeout,
            on_start=display.begin,
            on_tick=display.tick,
        )
    if as_json:
        print_json(record_json(record))
    else:
        stderr().print(f"{status_text(record.status)}", end=": " if record.error else "\n")
        if record.error:
            stderr().print(record.error, soft_wrap=True, markup=False, highlight=False)
        if found := read_finding(record.dir):
            stderr().print(summary(found))
        print(record.dir)
    raise typer.Exit(record.exit_code or 0)


@app.command()
def ladder(
    profile: Annotated[str, typer.Option(help="smoke, cpu, gpu, or a TOML file of parameters. [default: cpu]")] = "",
    stages: Annotated[str, typer.Option(help="Numbers or names of notebooks, such as 02,03. [default: all]")] = "",
    resume: Annotated[str, typer.Option(metavar="ID|last", help="Finish an earlier ladder: keep what completed.")] = "",
    notebooks: Annotated[
        Path | None, typer.Option(help="Folder of numbered notebooks. [default: Workbench's own]")
    ] = None,
    timeout: Seconds = None,
    root: Root = RUNS,
    as_json: AsJson = False,
) -> None:
    """Run the notebooks in order, whatever fails."""
    from workbench.batch.ladder import NOTEBOOKS, exit_code, new_ladder, resumed_ladder, run_ladder
    from workbench.batch.progress import Display
    from workbench.batch.status import as_json as record_json
    from workbench.batch.status import runs_table

    chosen = stages.split(",")
    if resume:
        if notebooks is not None:
            raise Refused("--notebooks together with --resume", fix="a resumed ladder keeps its own notebooks")
        planned = resumed_ladder(resume, root, profile, chosen)
    else:
        planned = new_ladder(profile or "cpu", chosen, root, notebooks or NOTEBOOKS)
    stderr().print(f"ladder {planned.plan.id}, profile {planned.plan.profile}", highlight=False, markup=False)
    with Display(planned, stderr()) as display:
        records = run_ladder(planned, display, timeout=timeout)
    code = exit_code(records)
    if as_json:
        print_json({"ladder": planned.plan.id, "exit_code": code, "runs": [record_json(r) for r in records]})
    else:
        stdout().print(runs_table(records))
        if code:
            completed = sum(r.status == "completed" for r in records)
            said = f"{completed} of {len(planned.stages)} completed"
            if completed < len(planned.stages):
                said += f"; repeat the rest with --resume {planned.plan.id}"
            stderr().print(said, highlight=False)
    raise typer.Exit(code)


@app.command()
def status(
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="How many of the newest.")] = 20,
    root: Root = RUNS,
    as_json: AsJson = False,
) -> None:
    """Show the newest runs and what the running ones do."""
    from workbench.batch.status import as_json as record_json
    from workbench.records.query import scan

    records = scan(root)[-limit:]
    if as_json:
        print_json([record_json(record) for record in records])
    else:
        _print_runs(records, root)


@app.command()
def runs(
    where: Annotated[
        str, typer.Option(help="A DuckDB condition, such as \"status = 'failed' and parameters.steps > 40\".")
    ] = "",
    root: Root = RUNS,
    as_json: AsJson = False,
) -> None:
    """List the runs that satisfy an SQL condition."""
    from workbench.records.query import read
    from workbench.records.query import where as query

    rows = query(root, where)
    if as_json:
        print_json(rows)
    else:
        _print_runs([read(root / row["id"]) for row in rows], root)


@app.command()
def show(run_id: Annotated[str, typer.Argument(metavar="RUN")], root: Root = RUNS, as_json: AsJson = False) -> None:
    """Show one run: its id, a part of it, or last."""
    from workbench.batch.detail import describe
    from workbench.batch.status import as_json as record_json
    from workbench.records.query import finding, load

    record = load(root, run_id)
    if as_json:
        print_json({**record_json(record), "finding": finding(record.dir)})
    else:
        stdout().print(describe(record))


@app.command()
def compare(
    first: Annotated[str, typer.Argument(metavar="RUN")],
    second: Annotated[str, typer.Argument(metavar="RUN")],
    root: Root = RUNS,
    as_json: AsJson = False,
) -> None:
    """Show in what two runs differ."""
    from workbench.batch.detail import comparison_table, differences
    from workbench.records.query import load

    a, b = load(root, first), load(root, second)
    rows = differences(a, b)
    if as_json:
        print_json({"runs": [a.id, b.id], "differences": [row._asdict() for row in rows]})
    else:
        stdout().print(comparison_table(a, b, rows) if rows else f"{a.id} and {b.id} do not differ")


@data.command("list")
def data_list(as_json: AsJson = False) -> None:
    """List the data sets that have a manifest, and whether they are here."""
    from workbench.data.fetch import list_sources

    rows = list_sources()
    if as_json:
        return print_json([row.model_dump() for row in rows])
    from rich.markup import escape
    from rich.table import Table

    table = Table("name", "here", "size", "licence", "about", box=None, pad_edge=False, header_style="bold")
    for row in rows:
        here = "verified" if row.verified else "yes" if row.present else "no"
        size = f"{row.size_bytes / 2**20:,.1f} MiB" if row.size_bytes else ""
        about = row.problem or row.description.partition(". ")[0]
        table.add_row(row.name, here, size, escape(row.licence), escape(about))
    stdout().print(table)


@data.command("verify")
def data_verify(name: str) -> None:
    """Compare every file of a data set with its manifest's hash."""
    from workbench.data.fetch import verify

    print(verify(name))


@data.command("fetch")
def data_fetch(name: str) -> None:
    """Download a data set and check it."""
    from workbench.data.fetch import fetch

    print(fetch(name))


for command in (cli_planning.dryrun, cli_planning.schedule):
    app.command()(command)


@app.command()
def site(out: Annotated[Path, typer.Option(help="Folder to build into.")] = Path("site"), root: Root = RUNS) -> None:
    """Build offline HTML of all findings."""
    from workbench.report.site import build_site

    print(build_site(root, out))


@app.command()
def lab(
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8888,
    browser: Annotated[bool, typer.Option(help="Open a browser.")] = True,
    folder: Annotated[
        Path | None, typer.Option(help="What to serve. [default: the folder above the notebooks]")
    ] = None,
    root: Root = RUNS,
) -> None:
    """Start JupyterLab on 127.0.0.1, behind a new token."""
    import secrets

    from workbench.batch.ladder import NOTEBOOKS

    served = (folder or NOTEBOOKS.absolute().parent).absolute()
    command = [sys.executable, "-m", "jupyterlab", "--ServerApp.ip=127.0.0.1", f"--ServerApp.port={port}"]
    command += [f"--ServerApp.root_dir={served}"] + ["--no-browser"] * (not browser)
    command += ["--allow-root"] * (os.geteuid() == 0)  # in containers; it listens to this machine alone
    # By the environment, since a command line can be read by every user of the machine. Paths are made absolute
    # because a kernel works in its notebook's folder.
    os.environ["JUPYTER_TOKEN"] = secrets.token_hex(24)
    os.environ["WORKBENCH_RUNS"] = str(root.absolute())
    os.environ["WORKBENCH_DATA"] = str(Path(os.environ.get("WORKBENCH_DATA", "data")).absolute())
    os.execv(sys.executable, command)


def main() -> None:
    """Entry point: what is refused, and what the machine does not allow, is one line on standard error."""
    try:
        app()
    except Refused as refused:
        print(f"refused: {refused}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:  # a full disk, a file system that went away
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


def _help_notebook(notebook: Path, as_json: bool) -> None:
    from workbench.batch.preflight import read
    from workbench.batch.values import jsonable

    parameters = read(notebook)[1].parameters.values()
    if as_json:
        rows = [
            {"name": p.name, "type": str(p.type), "default": jsonable(p.default), "help": p.help} for p in parameters
        ]
        return print_json(rows)
    for p in parameters:
        print(f"{p.name}: {p.type} = {p.default!r}" + (f"  # {p.help}" if p.help else ""))


def _print_runs(records: "Iterable[RunRecord]", root: Path) -> None:
    from workbench.batch.status import runs_table

    table = runs_table(records)
    if table.row_count:
        stdout().print(table)
    else:
        stderr().print(f"no runs in {root}/", highlight=False, markup=False)


if __name__ == "__main__":
    main()
