"""Commands that run the scheduler without a cluster: simulate, replay."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swapper.errors import ConfigError, GswapdError

if TYPE_CHECKING:
    from scheduler.core.config import PolicyName
    from scheduler.simulate.hardware import SimulatedModel
    from scheduler.simulate.outcome import Outcome

Policy = Annotated[str | None, typer.Option(help="gswapd, lru or computron. Default: the configured one.")]
Report = Annotated[Path | None, typer.Option(help="Write an HTML page with pictures to this file.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")]


class NotSimulated(GswapdError):
    """What was asked for cannot be simulated."""


def simulate(
    config: Annotated[
        Path | None, typer.Argument(metavar="CONFIG", help="Configuration file. Default: gswapd.yaml here, if any.")
    ] = None,
    workload: Annotated[
        Path | None, typer.Option(help="CSV trace: time,model,prompt_tokens,output_tokens, or the Azure LLM trace's.")
    ] = None,
    rate: Annotated[float, typer.Option(min=1e-6, help="Requests a second in all, if there is no trace.")] = 4.0,
    cv: Annotated[
        float, typer.Option(min=0.01, help="Burstiness: variation of the gaps; 1 is a Poisson process.")
    ] = 1.0,
    skew: Annotated[
        float, typer.Option(min=0, help="Popularity: the k-th model gets a share of k to minus this.")
    ] = 0.5,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long requests come.")] = 300.0,
    seed: Annotated[int, typer.Option(help="Of the arrivals.")] = 0,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 200,
    output: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 50,
    models: Annotated[int, typer.Option(min=0, help="Made-up models instead of those of the store.")] = 0,
    size: Annotated[str, typer.Option(help="Size of a made-up model.")] = "16GB",
    groups: Annotated[int, typer.Option(min=0, help="So many groups like the first configured one.")] = 0,
    memory: Annotated[str | None, typer.Option(help="Size of a worker's frame pool.")] = None,
    bandwidth: Annotated[str, typer.Option(help="Bytes a second into a worker's memory.")] = "25GB",
    storage_bandwidth: Annotated[
        str | None, typer.Option(help="Bytes a second from storage, for what is not in memory.host_tier.")
    ] = None,
    pass_ms: Annotated[
        float, typer.Option(min=0.001, help="A forward pass, in milliseconds, where a model has no profile.")
    ] = 20.0,
    token_ms: Annotated[float, typer.Option(min=0, help="What each token adds to it.")] = 0.05,
    objective: Annotated[float, typer.Option(min=0.001, help="Seconds to answer in, where a model has no slo.")] = 10.0,
    policy: Policy = None,
    report: Report = None,
    as_json: AsJson = False,
) -> None:
    """See what would happen: the real scheduler on simulated groups, for a trace or for random arrivals."""
    from scheduler.core.core import SchedulerCore
    from scheduler.simulate.simulator import Simulator
    from scheduler.simulate.workload import gamma, power_law, read_trace
    from server.config import load_config
    from server.simulation import group_specs, made_up, priced, simulated_config, stored

    settings = load_config(config, memory=memory)
    known = made_up(settings, models, _size(size)) if models else stored(settings)
    if not known:
        raise NotSimulated(f"There are no models in {settings.store}. Add some, or make some up with --models 8.")
    simulated = priced(settings, known, pass_ms / 1e3, token_ms / 1e3, objective)
    names = [model.spec.name for model in simulated]
    if workload is not None:
        try:
            requests = read_trace(workload, power_law(names, 1.0, skew), seed)
        except (OSError, ValueError) as error:
            raise NotSimulated(f"{error}.") from error
        if unknown := sorted(set(requests.models) - set(names)):
            raise NotSimulated(
                f"The trace asks for {', '.join(unknown[:5])}, but there are only {', '.join(names[:5])}."
            )
    else:
        requests = gamma(power_law(names, rate, skew), cv, seconds, seed, prompt=prompt, output=output)
    from_storage = _size(storage_bandwidth) if storage_bandwidth is not None else 0
    places = group_specs(settings, groups, _size(bandwidth), from_storage)
    core = SchedulerCore(simulated_config(settings, places, _policy(policy) if policy else None))
    outcome = Simulator(core, places, simulated, timeout=settings.timeouts.request).run(requests)
    what = str(workload) if workload is not None else f"{rate:g} requests/s, CV {cv:g}, skew {skew:g}, seed {seed}"
    setting = [
        f"{_counted(len(requests), 'request')} ({what}) for {_counted(len(simulated), 'model')} of {_sizes(simulated)} "
        f"pages of {settings.memory.page >> 20} MiB, on {_counted(len(places), 'group')} "
        f"of {places[0].frames:,} frames, {bandwidth}/s.",
    ]
    _show({"": outcome}, setting, report, as_json)


def replay(
    journal: Annotated[Path, typer.Argument(metavar="JOURNAL", help="A file that gswapd serve --journal wrote.")],
    model: Annotated[str | None, typer.Option(help="Show all that was decided about this model.")] = None,
    policy: Annotated[
        list[str] | None, typer.Option(help="Simulate the same requests, as the machine was, under this policy.")
    ] = None,
    report: Report = None,
    as_json: AsJson = False,
) -> None:
    """Repeat the decisions of a journal, and say whether they are the same; or simulate others for its requests."""
    from scheduler.journal import files

    if not journal.exists():
        raise NotSimulated(f"There is no journal {journal}.")
    if policy:
        _compare(journal, policy, report, as_json)
        return
    same = [_repeat(file, model) for file in files(journal)]
    raise typer.Exit(0 if all(same) else 1)


def _repeat(file: Path, model: str | None) -> bool:
    from scheduler.replay import Decided
    from scheduler.replay import replay as lines

    began, count, line = None, 0, None
    for line in lines(file):
        if not isinstance(line, Decided):
            continue
        began = line.event.at if began is None else began
        count += 1
        about = [f"{line.event}", *(f"  → {action}" for action in line.actions)]
        if model is not None and any(repr(model) in text for text in about):
            print(f"{line.event.at - began:10.3f}  " + "\n            ".join(about))
        if not line.same:
            print(f"{file}: decision {count} is another one than it was. Now:\n  " + "\n  ".join(about))
            return False
    print(f"{file}: {count:,} events, and all decisions are the same")
    return True


def _compare(journal: Path, policies: Sequence[str], report: Path | None, as_json: bool) -> None:
    from dataclasses import replace

    from scheduler.core.core import SchedulerCore
    from scheduler.journal import files
    from scheduler.simulate.measured import measure
    from scheduler.simulate.simulator import Simulator

    measured = measure(files(journal)[0])
    outcomes = {"as it was": measured.outcome}
    for policy in dict.fromkeys([measured.config.policy, *policies]):
        core = SchedulerCore(replace(measured.config, policy=_policy(policy)))
        outcomes[policy] = Simulator(core, measured.groups, measured.models).run(measured.workload)
    _show(outcomes, [f"The requests of {journal}"], report, as_json)


# ---- what is asked and shown


def _policy(name: str) -> PolicyName:
    from typing import get_args

    from scheduler.core.config import PolicyName

    if name not in get_args(PolicyName):
        raise ConfigError(f"There is no policy {name!r}; there are {', '.join(get_args(PolicyName))}.")
    return name  # type: ignore[return-value]  # as was checked


def _size(text: str) -> int:
    from server.config import parse_size

    try:
        value = parse_size(text)
    except ValueError as error:
        raise ConfigError(f"{error}.") from error
    assert isinstance(value, int)
    return value


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _sizes(models: Sequence[SimulatedModel]) -> str:
    counts = sorted(model.pages for model in models)
    return str(counts[0]) if counts[0] == counts[-1] else f"{counts[0]} to {counts[-1]}"


def _show(outcomes: dict[str, Outcome], setting: Sequence[str], report: Path | None, as_json: bool) -> None:
    from scheduler.simulate.report import page, seconds, size

    *_, last = outcomes.values()
    if report is not None:
        try:
            report.write_text(page(last, "gswapd, simulated", setting))
        except OSError as error:
            raise NotSimulated(f"The report {report} cannot be written: {error.strerror}.") from error
    if as_json:
        whole = {name: outcome.summary() for name, outcome in outcomes.items()}
        print(json.dumps(whole if len(whole) > 1 else last.summary(), indent=1))
        return
    from rich.console import Console
    from rich.table import Table

    for line in setting:
        print(line)
    table = Table(box=None, pad_edge=False)
    for column in ("", "requests", "failed", "mean", "p50", "p99", "in objective", "page-ins", "moved", "busy"):
        table.add_column(column, justify="left" if not column else "right")

    def row(name: str, figures: dict[str, Any], moved: str = "", busy: str = "") -> None:
        times = [seconds(figures[column]) for column in ("mean", "p50", "p99")]
        counts = f"{figures['requests']:,}", f"{figures['failed']:,}"
        table.add_row(name, *counts, *times, f"{figures['attainment']:.1%}", f"{figures['page_ins']:,}", moved, busy)

    for name, outcome in outcomes.items():
        busy = outcome.busy_seconds.values()
        share = f"{sum(busy) / len(busy) / max(outcome.seconds, 1e-9):.0%}" if busy else ""
        row(name or "all", outcome.summary(), size(outcome.bytes_moved), share)
    for name, model in last.models.items() if len(outcomes) == 1 else ():
        row(name, model.summary())
    Console(width=None if Console().is_terminal else 160).print(table)
    for name, outcome in outcomes.items():
        for reason, count in outcome.reasons.items():
            print(f"{name + ': ' if name else ''}{_counted(count, 'request')} failed: {reason}")
    if report is not None:
        print(f"The report is in {report}.")


def register(app: typer.Typer) -> None:
    for command in (simulate, replay):
        app.command(rich_help_panel="Measuring and foreseeing")(command)
